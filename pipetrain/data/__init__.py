"""Data sets as bytes in memory, the order of their samples, and the images of a microbatch."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

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

Made = TypeVar("Made")


def load_data(data: DictConfig) -> ImageData:
    """Read the data set of a config of the group `data`, cut to its `train_limit` and `test_limit`.

    Raises DataMissing if it is not available (with `fallback: null` the message names solutions), and
    ConfigError for a limit under 1, a damaged file, or an invalid data set. The caller decides on a fallback,
    because each data set has a recipe of its own.
    """
    limits = {split: data.get(f"{split}_limit") for split in ("train", "test")}
    for split, limit in limits.items():
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ConfigError(f"data.{split}_limit must be a whole number, 1 or more; got {limit}")
    try:
        loaded = _make(data, "source", ImageData)
    except DataMissing as error:
        if data.get("fallback") is not None:
            raise
        raise DataMissing(
            f"{error}; put the files there (data.root says where), or give a network or a data.source.url "
            "that answers, or train on the digits with data=digits or data.fallback=digits"
        ) from error
    prove(loaded)
    cut = {split: getattr(loaded, split).first(limit) for split, limit in limits.items() if limit is not None}
    return replace(loaded, **cut)


def load_augment(data: DictConfig) -> Augment | None:
    """Build the augmentation of a config of the group `data`, None for null. Raises ConfigError."""
    return None if data.get("augment") is None else _make(data, "augment", Augment)


def fallback_message(error: DataMissing, name: str) -> str:
    """Return the message that the data set `name` is used instead, and why."""
    return f"{error}; using {name} instead"


def _make(data: DictConfig, part: str, kind: type[Made]) -> Made:
    try:
        call = instantiate(data[part], _partial_=True)
    except InstantiationException as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise ConfigError(f"data.{part} cannot be made: {reason}") from error
    try:
        made = call()
    except TypeError as error:  # a missing or unknown argument
        raise ConfigError(f"data.{part} cannot be made: {error}") from error
    if not isinstance(made, kind):
        raise ConfigError(
            f"data.{part} must give a pipetrain.data.{kind.__name__}; got {type(made).__name__}"
        )
    return made
