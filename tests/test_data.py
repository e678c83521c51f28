"""The configs of the group `data`, and what `load_data` makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from pipetrain.cli import conf_dir
from pipetrain.data import (
    Data,
    DataMissing,
    Draw,
    Images,
    declared_example,
    digits,
    load_augment,
    load_data,
)
from pipetrain.errors import ConfigError
from pipetrain.network.values import TensorSpec, Value, ValueSpec

CONFIGS = sorted(path.stem for path in (conf_dir() / "data").glob("*.yaml"))


def data_config(name: str, **overrides: Any) -> DictConfig:
    whole = OmegaConf.create({"data": OmegaConf.load(conf_dir() / "data" / f"{name}.yaml")})
    for key, value in overrides.items():
        OmegaConf.update(whole, f"data.{key}", value)
    data: DictConfig = whole.data
    return data


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_have_the_keys_of_every_data_set(name):
    data, digits_ = data_config(name), data_config("digits")
    assert set(data) >= set(digits_) - {"augment", "source"}
    assert "source" in data or {"train", "test"} <= set(data)
    assert set(data.recipe) == set(digits_.recipe)


def test_digits_are_loaded():
    loaded = load_data(data_config("digits", train_limit=100, test_limit=30))
    whole = digits.load()
    assert (loaded.name, len(loaded.train), len(loaded.test)) == ("digits", 100, 30)
    ids = torch.arange(100)
    assert loaded.train.targets(ids, None).tolist() == whole.train.labels[:100].tolist()
    assert loaded.train.mean == whole.train.mean
    assert len(load_data(data_config("digits", train_limit=99_999)).train) == 1437


def missing(tmp_path: Path, **overrides: Any) -> DictConfig:
    nowhere = {"source.url": "file:///no/such/archive", "root": str(tmp_path)}
    return data_config("cifar10", **nowhere, **overrides)


def test_what_cannot_be_had_comes_through_for_the_fallback_and_without_one_names_the_ways_out(tmp_path):
    with pytest.raises(DataMissing, match=str(tmp_path)) as error:
        load_data(missing(tmp_path))
    assert "fallback" not in str(error.value)
    with pytest.raises(DataMissing) as error:
        load_data(missing(tmp_path, fallback=None))
    for way in ("data.root", "data.source.url", "data=digits", "data.fallback=digits"):
        assert way in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [{"train_limit": 0}, {"train_limit": "many"}, {"test_limit": 1.5}],
)
def test_numbers_that_cannot_be_are_refused(overrides):
    with pytest.raises(ConfigError, match=rf"data.{next(iter(overrides))}=\S+ must be a whole number"):
        load_data(data_config("digits", **overrides))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"_target_": "no.such.module"}, "data.source cannot be made"),
        ({"_target_": "pipetrain.data.digits.load", "colour": "red"}, "colour"),
        ({"_target_": "builtins.dict"}, "data.source must give a pipetrain.data.Data; got dict"),
    ],
)
def test_a_source_that_is_none_is_refused_in_one_sentence(source, says):
    data = data_config("digits")
    data = DictConfig({**data, "source": source})
    with pytest.raises(ConfigError) as error:
        load_data(data)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def own(classes: int = 10, **fields: Any) -> Data:
    """Give somebody's own data set: 30 black images, 20 of them to train on."""
    images, labels = torch.zeros(20, 3, 32, 32, dtype=torch.uint8), torch.arange(20) % 10
    split = replace(Images(images, labels, mean=(0.5,) * 3, std=(0.2,) * 3), **fields)
    return Data("own", split, split.first(10), classes)


def test_an_own_data_set_is_proven_whole_and_then_cut():
    source = {"_target_": f"{__name__}.own", "mean": [0.1, 0.2, 0.3]}
    loaded = load_data(DictConfig({**data_config("digits", train_limit=5), "source": source}))
    assert (len(loaded.train), len(loaded.test), loaded.classes) == (5, 10, 10)
    with pytest.raises(ConfigError, match=r"^the data set own cannot be used: train labels\[9\] is 9"):
        load_data(DictConfig({**data_config("digits", train_limit=5), "source": {**source, "classes": 9}}))


def test_augment_may_be_none_and_must_be_sound():
    assert load_augment(data_config("digits", augment=None)) is None
    with pytest.raises(ConfigError, match="crop must be 0"):
        load_augment(data_config("digits", **{"augment.crop": -1}))
    with pytest.raises(ConfigError, match=r"must give a pipetrain\.data\.Augment; got dict"):
        load_augment(DictConfig({"augment": {"_target_": "builtins.dict"}}))


# Data sets of any kind


@dataclass(frozen=True)
class Numbers:
    """Samples of two tensors, or of one."""

    n: int = 6
    pair: bool = False

    def __len__(self) -> int:
        return self.n

    def inputs(self, ids: torch.Tensor, draw: Draw | None) -> Value:
        x = ids[:, None].double().expand(-1, 3)
        return (x, ids) if self.pair else x

    def targets(self, ids: torch.Tensor, draw: Draw | None) -> Value:
        return ids % 2

    def first(self, n: int) -> Numbers:
        return replace(self, n=min(n, self.n))

    def checksum(self) -> int:
        return self.n


def whole(pair: bool = False) -> Data:
    return Data("whole", Numbers(6, pair), Numbers(3, pair), classes=2)


def own_config(**fields: Any) -> DictConfig:
    data = {**data_config("digits"), "name": "own", "sample": None, "source": None}
    return DictConfig({**data, **fields})


SPLITS = {
    "train": {"_target_": f"{__name__}.Numbers"},
    "test": {"_target_": f"{__name__}.Numbers", "n": 3, "pair": True},
}


def test_a_data_set_is_two_splits_or_a_source_of_both():
    loaded = load_data(own_config(**SPLITS, classes=2, train_limit=4))
    assert (loaded.name, len(loaded.train), len(loaded.test), loaded.classes) == ("own", 4, 3, 2)
    source = load_data(own_config(source={"_target_": f"{__name__}.whole", "pair": True}, test_limit=2))
    assert (source.name, len(source.train), len(source.test), source.classes) == ("whole", 6, 2, 2)
    specs = TensorSpec((3,), torch.float64), TensorSpec((), torch.int64)
    assert source.facts.example == ValueSpec(specs, single=False)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "data=own has no train: give data.source, a function that returns both splits, or"),
        ({"train": SPLITS["train"]}, "data=own has no test: give data.source"),
        ({**SPLITS, "test": {"_target_": "builtins.dict"}}, "data.test has no sample"),
        ({**SPLITS, "train": {**SPLITS["train"], "n": 0}}, "data.train has no sample"),
        ({**SPLITS, "train": {**SPLITS["train"], "colour": 1}}, "data.train cannot be made: "),
        (
            {**SPLITS, "train": {"_target_": f"{__name__}.Nmbers"}},
            f"data.train cannot be made: Error loading '{__name__}.Nmbers': ModuleNotFoundError",
        ),
        (
            {**SPLITS, "train": {"_target_": "builtins.open", "file": "nowhere.jsonl"}},
            "data.train cannot be made: FileNotFoundError: ",
        ),
    ],
)
def test_splits_that_cannot_be_are_refused(fields, says):
    with pytest.raises(ConfigError) as error:
        load_data(own_config(**fields))
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


# What one input is


@pytest.mark.parametrize(
    ("data", "dtype", "spec"),
    [
        (data_config("cifar10"), torch.float64, TensorSpec((3, 32, 32), torch.float64)),
        (data_config("digits"), torch.float32, TensorSpec((3, 32, 32), torch.float32)),
        (DictConfig({"sample": {"shape": [], "dtype": "int64"}}), torch.float32, TensorSpec((), torch.int64)),
        (DictConfig({"sample": None}), torch.float32, None),
        (DictConfig({}), torch.float32, None),
    ],
)
def test_a_declaration_says_what_one_input_is(data, dtype, spec):
    assert declared_example(data, dtype) == (spec and ValueSpec((spec,)))


@pytest.mark.parametrize(
    "sample",
    [
        {"shape": [3, 32, 32]},
        {"shape": 3, "dtype": "float"},
        {"shape": [3], "dtype": "nn"},
        "float",
    ],
)
def test_a_declaration_that_is_none_is_refused(sample):
    with pytest.raises(ConfigError) as error:
        declared_example(DictConfig({"sample": sample}), torch.float32)
    assert str(error.value).startswith("data.sample=")
    assert str(error.value).endswith(
        " must be the shape and dtype of one input, such as {shape: [3, 32, 32], dtype: float}, or null"
    )


@pytest.mark.parametrize(
    ("sample", "pair", "says"),
    [
        ({"shape": [4], "dtype": "float"}, False, "float64[3], and data.sample says float32[4]"),
        (
            {"shape": [3], "dtype": "float"},
            True,
            "float64[3] + int64[], and data.sample says float32[3]",
        ),
        ({"shape": [3], "dtype": "int64"}, False, "float64[3], and data.sample says int64[3]"),
    ],
)
def test_a_declaration_that_the_data_set_contradicts_is_refused(sample, pair, says):
    source = {"_target_": f"{__name__}.whole", "pair": pair}
    with pytest.raises(ConfigError) as error:
        load_data(own_config(source=source, sample=sample))
    assert str(error.value) == (
        f"the inputs of data set whole are {says}: correct data.sample, or set it to null"
    )


def test_a_declaration_of_the_run_s_dtype_is_of_whatever_numbers_the_data_set_gives():
    """They become the run's dtype; only float64 for a run in float32 is refused, when it is planned."""
    source = {"_target_": f"{__name__}.whole"}
    load_data(own_config(source=source, sample={"shape": [3], "dtype": "float"}), torch.float64)
