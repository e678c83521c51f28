"""The data room: data sets as bytes in memory, the order of their samples, and the images of a microbatch.

`load_data` reads what the config asks for. It never takes another data set in its place: that is the caller's
choice, because a data set's recipe goes with it; `fallback_message` is the line that says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig

from pipetrain.data.augment import Augment, Transform
from pipetrain.data.loader import Sampler, inputs, pieces
from pipetrain.data.sets import IMAGE, DataMissing, ImageData, Split, prove
from pipetrain.errors import ConfigError

__all__ = [
    "IMAGE",
    "Augment",
    "DataMissing",
    "ImageData",
    "Sampler",
    "Split",
    "Transform",
    "fallback_message",
    "inputs",
    "load_augment",
    "load_data",
    "pieces",
]


def load_data(data: DictConfig) -> ImageData:
    """Read the data set of a config of the group `data`, cut to its `train_limit` and `test_limit`.

    Raises DataMissing where it can't be had; with `fallback: null` the message names the ways out. Raises
    ConfigError for a limit under 1, `workers` under 0, a damaged file, a `source` that is none, or a data set
    that is not what it should be, cut or not.
    """
    for name, least in (("train_limit", 1), ("test_limit", 1), ("workers", 0)):
        number = data.get(name)
        if number is not None and (type(number) is not int or number < least):
            raise ConfigError(f"data.{name} must be a whole number, {least} or more; got {number}")
    try:
        loaded = _make(data, "source")
    except DataMissing as error:
        if data.get("fallback") is not None:
            raise
        raise DataMissing(
            f"{error}; put the files there (data.root says where), or give a network or a data.source.url "
            "that answers, or train on the digits with data=digits or data.fallback=digits"
        ) from error
    if not isinstance(loaded, ImageData):
        raise ConfigError(f"data.source must give a pipetrain.data.ImageData; got {type(loaded).__name__}")
    prove(loaded)
    if data.get("train_limit") is not None:
        loaded = replace(loaded, train=loaded.train.first(data.train_limit))
    if data.get("test_limit") is not None:
        loaded = replace(loaded, test=loaded.test.first(data.test_limit))
    return loaded


def load_augment(data: DictConfig) -> Augment | None:
    """Make the augmentation of a config of the group `data`, where null stands for none.

    Raises ConfigError where `augment` is something else.
    """
    if data.get("augment") is None:
        return None
    augment = _make(data, "augment")
    if not isinstance(augment, Augment):
        raise ConfigError(f"data.augment must give a pipetrain.data.Augment; got {type(augment).__name__}")
    return augment


def fallback_message(error: DataMissing, name: str) -> str:
    """Say in one line that the data set `name` is used instead, and why."""
    return f"{error}; using {name} instead"


def _make(data: DictConfig, part: str) -> Any:
    """Call a part's `_target_`. What it refuses comes through; keys that are wrong are a ConfigError."""
    try:
        call = instantiate(data[part], _partial_=True)
    except InstantiationException as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ConfigError(f"data.{part} cannot be made: {reason}") from error
    try:
        return call()
    except TypeError as error:  # a missing or unknown argument
        raise ConfigError(f"data.{part} cannot be made: {error}") from error
