"""The configs of the group `data`, and what `load_data` makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig

from pipetrain.cli import conf_dir
from pipetrain.data import (
    DataMissing,
    ImageData,
    Split,
    cifar10,
    digits,
    fallback_message,
    load_augment,
    load_data,
)
from pipetrain.errors import ConfigError
from tests.support.cases import config

CONFIGS = sorted(path.stem for path in (conf_dir() / "data").glob("*.yaml"))


def data_config(name: str, **overrides: Any) -> DictConfig:
    data: DictConfig = config(
        [f"data={name}", *(f"data.{key}={value}" for key, value in overrides.items())]
    ).data
    return data


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_have_the_keys_of_every_data_set(name):
    data, digits_ = data_config(name), data_config("digits")
    assert set(data) >= set(digits_) - {"augment"}
    assert set(data.recipe) == set(digits_.recipe)


def test_digits_are_loaded():
    loaded = load_data(data_config("digits", train_limit=100, test_limit=30))
    whole = digits.load()
    assert (loaded.name, len(loaded.train), len(loaded.test)) == ("digits", 100, 30)
    assert loaded.train.labels.tolist() == whole.train.labels[:100].tolist()
    assert loaded.mean == whole.mean
    assert len(load_data(data_config("digits", train_limit=99_999)).train) == 1437


def test_cifar10_config_is_the_official_one():
    data = data_config("cifar10", root="/here")
    assert data.source.url == cifar10.URL
    assert data.source.root == "/here"


def missing(tmp_path: Path, **overrides: Any) -> DictConfig:
    nowhere = {"source.url": "file:///no/such/archive", "root": tmp_path}
    return data_config("cifar10", **nowhere, **overrides)


def test_what_cannot_be_had_comes_through_for_the_fallback(tmp_path):
    data = missing(tmp_path)
    with pytest.raises(DataMissing) as error:
        load_data(data)
    line = fallback_message(error.value, data.fallback)
    assert "\n" not in line
    assert str(tmp_path) in line
    assert line.endswith("using digits instead")


def test_without_a_fallback_the_error_names_the_ways_out(tmp_path):
    with pytest.raises(DataMissing) as error:
        load_data(missing(tmp_path, fallback="null"))
    for way in ("data.root", "data.source.url", "data=digits", "data.fallback=digits"):
        assert way in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [{"train_limit": 0}, {"train_limit": "many"}, {"test_limit": 1.5}],
)
def test_numbers_that_cannot_be_are_refused(overrides):
    with pytest.raises(ConfigError, match=f"data.{next(iter(overrides))} must be a whole number"):
        load_data(data_config("digits", **overrides))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"_target_": "no.such.module"}, "data.source cannot be made"),
        ({"_target_": "pipetrain.data.digits.load", "colour": "red"}, "colour"),
        ({"_target_": "builtins.dict"}, "must give a pipetrain.data.ImageData; got dict"),
    ],
)
def test_a_source_that_is_none_is_refused_in_one_sentence(source, says):
    data = data_config("digits")
    data = DictConfig({**data, "source": source})
    with pytest.raises(ConfigError) as error:
        load_data(data)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def own(**fields: Any) -> ImageData:
    """Give somebody's own data set: 30 black images, 20 of them to train on."""
    split = Split(torch.zeros(20, 3, 32, 32, dtype=torch.uint8), torch.arange(20) % 10)
    data = ImageData("own", split, split.first(10), classes=10, mean=(0.5,) * 3, std=(0.2,) * 3)
    return replace(data, **fields)


def test_an_own_data_set_that_is_wrong_is_refused_when_it_is_read():
    """The whole of it, before it is cut: what is wrong with it does not depend on a limit."""
    source = {"_target_": f"{__name__}.own", "classes": 9}
    with pytest.raises(ConfigError, match=r"^the data set own cannot be used: train labels\[9\] is 9"):
        load_data(DictConfig({**data_config("digits", train_limit=5), "source": source}))


def test_an_own_data_set_that_is_right_is_cut_and_given():
    source = {"_target_": f"{__name__}.own", "mean": [0.1, 0.2, 0.3]}
    loaded = load_data(DictConfig({**data_config("digits", train_limit=5), "source": source}))
    assert (len(loaded.train), len(loaded.test), loaded.classes) == (5, 10, 10)


def test_augment_may_be_none_and_must_be_sound():
    assert load_augment(data_config("digits", augment="null")) is None
    with pytest.raises(ConfigError, match="crop must be 0"):
        load_augment(data_config("digits", **{"augment.crop": -1}))
    with pytest.raises(ConfigError, match=r"must give a pipetrain\.data\.Augment; got dict"):
        load_augment(DictConfig({"augment": {"_target_": "builtins.dict"}}))
