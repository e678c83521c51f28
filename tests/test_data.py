"""The configs of the group `data`, and what `load_data` makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from pipetrain.commands.cli import values_of
from pipetrain.config.choices import conf_dir
from pipetrain.data import Data, Images, declared_example, load_augment, load_data
from pipetrain.data.augment import Augment
from pipetrain.data.splits import Draw, Tensors
from pipetrain.errors import ConfigError
from pipetrain.model.specs import TensorSpec, Value, ValueSpec

CONFIGS = sorted(path.stem for path in (conf_dir() / "data").glob("*.yaml"))


def data_config(name: str, **overrides: Any) -> dict[str, Any]:
    whole = OmegaConf.create({"data": OmegaConf.load(conf_dir() / "data" / f"{name}.yaml")})
    for key, value in overrides.items():
        OmegaConf.update(whole, f"data.{key}", value)
    data: dict[str, Any] = values_of(whole.data)
    return data


def refusal(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        load_data(data)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_have_the_keys_of_every_data_set(name):
    data, digits_ = data_config(name), data_config("digits")
    assert set(data) >= set(digits_) - {"augment", "source"}
    assert "source" in data or {"train", "test"} <= set(data)
    assert set(data["recipe"]) == set(digits_["recipe"])


# Data sets of any kind


def numbers(n: int = 6, pair: bool = False) -> tuple[Value, torch.Tensor]:
    """Samples of two tensors, or of one, and their targets."""
    ids = torch.arange(n)
    x = ids[:, None].double().expand(-1, 3)
    return (x, ids) if pair else x, ids % 2


def whole(pair: bool = False) -> Data:
    return Data("whole", Tensors(*numbers(6, pair)), Tensors(*numbers(3, pair)), classes=2)


def own_config(**fields: Any) -> dict[str, Any]:
    data = {**data_config("digits"), "name": "own", "sample": None, "source": None}
    return {**data, **fields}


def images(classes: int = 10, **fields: Any) -> Data:
    """Give somebody's own data set: 30 black images, 20 of them to train on."""
    black, labels = torch.zeros(20, 3, 32, 32, dtype=torch.uint8), torch.arange(20) % 10
    split = replace(Images(black, labels, mean=(0.5,) * 3, std=(0.2,) * 3), **fields)
    return Data("own", split, split.first(10), classes)


def made_by(name: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{name}", **arguments}


SPLITS = {"train": made_by("numbers"), "test": made_by("numbers", n=3, pair=True)}


def test_a_data_set_is_two_splits_or_a_source_of_both():
    loaded = load_data(own_config(**SPLITS, classes=2, train_limit=4))
    assert (loaded.name, len(loaded.train), len(loaded.test), loaded.classes) == ("own", 4, 3, 2)
    source = load_data(own_config(source=made_by("whole", pair=True), test_limit=2))
    assert (source.name, len(source.train), len(source.test), source.classes) == ("whole", 6, 2, 2)
    specs = TensorSpec((3,), torch.float64), TensorSpec((), torch.int64)
    assert source.facts.example == ValueSpec(specs, single=False)
    own = load_data(own_config(source=made_by("images", mean=[0.1, 0.2, 0.3]), train_limit=5))
    assert (len(own.train), len(own.test), own.classes) == (5, 10, 10)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "data=own has no train: give data.source, a function that returns both splits, or"),
        ({**SPLITS, "train": made_by("numbers", n=0)}, "data.train has no sample"),
        ({**SPLITS, "train": made_by("nmbers")}, "data.train cannot be made: ImportError: "),
        ({**SPLITS, "train": "numbers"}, "data.train needs a _target_: the dotted name of what makes it"),
        (
            {**SPLITS, "train": {"_target_": "builtins.open", "file": "nowhere.jsonl"}},
            "data.train cannot be made: FileNotFoundError: ",
        ),
        ({"source": {"_target_": "builtins.dict"}}, "data.source must give a pipetrain.data.Data; got dict"),
        (  # proven whole, and then cut
            {"source": made_by("images", classes=9), "train_limit": 5},
            "the data set own cannot be used: train labels[9] is 9",
        ),
        ({**SPLITS, "train_limit": 0}, "data.train_limit=0 must be a whole number"),
    ],
)
def test_what_is_no_data_set_is_refused_in_one_sentence(fields, says):
    assert refusal(own_config(**fields)).startswith(says)


def test_augment_must_be_sound():
    for option, values in {"crop": (-1, 1.5, True), "flip": (7, "yes")}.items():
        for value in values:
            with pytest.raises(ConfigError, match=rf"data\.augment\.{option}=.* must be "):
                load_augment(data_config("digits", **{f"augment.{option}": value}))
    augment = Augment(crop=4, flip=False)
    with pytest.raises(ConfigError, match=r"data\.augment\.crop=4 must be .* at most 3$"):  # of 4 pixels
        augment(torch.zeros((1, 1, 4, 9), dtype=torch.uint8), torch.tensor([0]), Draw(0, 0))
    with pytest.raises(ConfigError, match=r"must give a pipetrain\.data\.Augment; got dict"):
        load_augment({"augment": {"_target_": "builtins.dict"}})


def test_a_declaration_says_what_one_input_is_and_that_it_is_said_wrong():
    image, token = TensorSpec((3, 32, 32), torch.float64), TensorSpec((), torch.int64)
    assert declared_example(data_config("cifar10"), torch.float64) == ValueSpec((image,))
    tokens = {"sample": {"shape": [], "dtype": "int64"}}
    assert declared_example(tokens, torch.float32) == ValueSpec((token,))
    assert declared_example({}, torch.float32) is None
    for sample in ({"shape": [3, 32, 32]}, {"shape": [3], "dtype": "nn"}, "float"):
        with pytest.raises(ConfigError, match=r"data.sample=.* must be the shape and dtype of one input, su"):
            declared_example({"sample": sample}, torch.float32)


@pytest.mark.parametrize(
    ("sample", "pair", "says"),
    [
        ({"shape": [4], "dtype": "float"}, False, "float64[3], and data.sample says float32[4]"),
        ({"shape": [3], "dtype": "int64"}, True, "float64[3] + int64[], and data.sample says int64[3]"),
    ],
)
def test_a_declaration_that_the_data_set_contradicts_is_refused(sample, pair, says):
    assert refusal(own_config(source=made_by("whole", pair=pair), sample=sample)) == (
        f"the inputs of data set whole are {says}: correct data.sample, or set it to null"
    )
    fitting = {"shape": [3], "dtype": "float"}  # any floating-point numbers become the run's dtype
    load_data(own_config(source=made_by("whole"), sample=fitting))
