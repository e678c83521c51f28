"""Data sets of any kind, the order of their samples, and the samples of a microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from pipetrain.data.augment import Augment
from pipetrain.data.collated import Collate, CollatedSplit
from pipetrain.data.sampling import Sampler, loaded
from pipetrain.data.splits import Data, DataFacts, DataMissing, Draw, Images, Padded, Split
from pipetrain.data.user_data import as_split
from pipetrain.errors import ConfigError, failing
from pipetrain.instantiate import make
from pipetrain.model.specs import TensorSpec, ValueSpec
from pipetrain.rules import COUNT

__all__ = [
    "Augment",
    "Data",
    "DataFacts",
    "DataMissing",
    "Draw",
    "Images",
    "Padded",
    "Sampler",
    "Split",
    "declared_example",
    "load_augment",
    "load_data",
    "loaded",
]

FLOAT = "float"  # in data.sample.dtype: the run's dtype
T = TypeVar("T")


def load_data(data: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Data:
    """Read the data set of a config of the group `data`, limited to its `train_limit` and `test_limit`.

    `dtype`: of images and of Python's floats. Raises DataMissing if it is not available (with `fallback:
    null` the message names solutions), and ConfigError for a limit under 1, a damaged file, or an invalid
    data set. The caller chooses a fallback, because each data set has its own recipe.
    """
    limits = {split: data.get(f"{split}_limit") for split in ("train", "test")}
    for split, limit in limits.items():
        COUNT.read(f"data.{split}_limit", limit, null=True)
    try:
        whole = _from_source(data, dtype) if data.get("source") is not None else _from_splits(data, dtype)
    except DataMissing as error:
        if data.get("fallback") is not None:
            raise
        raise DataMissing(
            f"{error}; put the files there (data.root says where), give a network or a data.source.url that "
            "answers, or train on the digits with data=digits or data.fallback=digits"
        ) from error
    cut = {split: getattr(whole, split).first(limit) for split, limit in limits.items() if limit is not None}
    whole = replace(whole, **cut)
    declared, actual = declared_example(data, dtype), whole.facts.example
    if declared is not None and (not actual.single or _kind(actual.specs[0]) != _kind(declared.specs[0])):
        raise ConfigError(
            f"the inputs of data set {whole.name} are {actual}, and data.sample says {declared}: correct "
            "data.sample, or set it to null"
        )
    return whole


def _from_source(data: Mapping[str, Any], dtype: torch.dtype) -> Data:
    if data.get("collate") is not None:
        raise ConfigError("data.collate is of data.train and data.test: leave it out with data.source")
    source = _make(data, "source", Data)
    for name, split in (("train", source.train), ("test", source.test)):
        if isinstance(split, Images):
            if fault := split.fault(source.classes):
                raise ConfigError(
                    f"the data set {source.name} cannot be used: {name} {fault}; correct what "
                    f"data.source gives"
                )
            augment = load_augment(data) if name == "train" else None
            read: dict[str, Any] = {name: replace(split, dtype=dtype, augment=augment or split.augment)}
            source = replace(source, **read)
    return source


def _from_splits(data: Mapping[str, Any], dtype: torch.dtype) -> Data:
    splits: list[Split] = []
    collate = None if data.get("collate") is None else _make_collate(data)
    for name in ("train", "test"):
        if data.get(name) is None:
            raise ConfigError(
                f"data={data.get('name')} has no {name}: give data.source, a function that returns both "
                f"splits, or data.train and data.test, each with the _target_ of a Dataset"
            )
        arguments = _make(data, name, object), f"data.{name}", data.get("columns"), dtype
        if collate is None:
            split = as_split(*arguments)
        else:
            split = CollatedSplit(*arguments, collate, data.get(f"{name}_limit"))
        if not len(split):  # of tensors
            raise ConfigError(f"data.{name} has no sample")
        splits.append(split)
    train, test = splits
    if isinstance(train, CollatedSplit) and isinstance(test, CollatedSplit):
        train, test = train.joined(test), test.joined(train)
    return Data(str(data["name"]), train, test, data.get("classes"))


def declared_example(data: Mapping[str, Any], dtype: torch.dtype) -> ValueSpec | None:
    """Return the spec of one input as declared in `data.sample`, without reading data; None if undeclared."""
    sample = data.get("sample")
    if sample is None:
        return None
    try:
        kind = dtype if sample["dtype"] == FLOAT else getattr(torch, sample["dtype"])
        return ValueSpec.like(torch.empty(tuple(sample["shape"]), dtype=kind, device="meta"))
    except (RuntimeError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"data.sample={sample} must be the shape and dtype of one input, such as "
            f"{{shape: [3, 32, 32], dtype: float}}, or null"
        ) from error


def _kind(spec: TensorSpec) -> object:
    """Return what a declaration fixes: floating-point numbers of any dtype become the run's dtype."""
    return spec.shape, spec.dtype.is_floating_point or spec.dtype


def load_augment(data: Mapping[str, Any]) -> Augment | None:
    """Build the augmentation of a config of the group `data`, None for null. Raises ConfigError."""
    return None if data.get("augment") is None else _make(data, "augment", Augment)


def _make_collate(data: Mapping[str, Any]) -> Collate:
    """Build `data.collate`: a function of a list of samples, or a class whose instances are."""
    call = _maker(data, "collate")
    with failing("data.collate cannot be made"):
        collate: Any = call() if isinstance(call.func, type) else call
    if not callable(collate):
        raise ConfigError(f"data.collate must take a list of samples; got {type(collate).__name__}")
    made: Collate = collate
    return made


def _maker(data: Mapping[str, Any], part: str) -> Any:
    if not isinstance(data[part], Mapping) or "_target_" not in data[part]:
        raise ConfigError(f"data.{part} needs a _target_: the dotted name of what makes it")
    with failing(f"data.{part} cannot be made"):
        return make(data[part], later=True)


def _make(data: Mapping[str, Any], part: str, kind: type[T]) -> T:
    call = _maker(data, part)
    with failing(f"data.{part} cannot be made"):
        result = call()
    if not isinstance(result, kind):
        raise ConfigError(
            f"data.{part} must give a pipetrain.data.{kind.__name__}; got {type(result).__name__}"
        )
    return result
