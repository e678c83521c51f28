"""What a data set is: samples by number in two splits, of any kind; and tensors as a split."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pipetrain.errors import ConfigError
from pipetrain.network.values import Value, ValueSpec, as_tuple, bytes_of, on_each, specs_of


class DataMissing(ConfigError):
    """A data set that is neither there nor can be downloaded; a damaged one raises plain ConfigError."""


class Draw(NamedTuple):
    """What the random numbers of a sample derive from, together with its id."""

    seed: int
    epoch: int


@runtime_checkable
class Split(Protocol):
    """Samples in a fixed order: a sample's id is its position. Picklable, for worker processes."""

    def __len__(self) -> int: ...

    def inputs(self, ids: Tensor, draw: Draw | None) -> Value:
        """Return the inputs of samples int64 [n]: tensors [n, ...] in host memory.

        `draw` decides their augmentation; None for none.
        """

    def targets(self, ids: Tensor, draw: Draw | None) -> Value:
        """Return the targets of samples int64 [n]: tensors [n, ...] in host memory."""

    def first(self, n: int) -> Split:
        """Return the first n samples."""

    def checksum(self) -> int:
        """Return a number from 0 that tells other samples apart."""


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What every rank needs to know of a data set. `sample`: an ValueSpec of its inputs, as JSON."""

    name: str
    train: int  # samples
    test: int
    fingerprint: str
    note: str
    sample: list[Any]

    @property
    def example(self) -> ValueSpec:
        return ValueSpec.from_json(self.sample)


@dataclass(frozen=True)
class Data:
    """A data set. `classes`: how many its targets tell apart, None if unknown or none.

    `note`: why it replaces the configured data set, if it does.
    """

    name: str
    train: Split
    test: Split
    classes: int | None = None
    note: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """Name, sizes, and a checksum of the samples."""
        sums = [self.train.checksum(), self.test.checksum()]
        checksum = zlib.crc32(repr([self.classes, *sums]).encode())
        return f"{self.name} {len(self.train)}+{len(self.test)} {checksum:08x}"

    @cached_property
    def facts(self) -> DataFacts:
        first = ValueSpec.in_batch(self.train.inputs(torch.zeros(1, dtype=torch.int64), None))
        return DataFacts(
            name=self.name,
            train=len(self.train),
            test=len(self.test),
            fingerprint=self.fingerprint,
            note=self.note,
            sample=first.to_json(),
        )


def crc(*tensors: Tensor) -> int:
    """Return a checksum of the bytes of tensors in host memory."""
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(bytes_of(tensor).numpy().data, checksum)
    return checksum


@dataclass(frozen=True)
class Tensors:
    """A split in memory: a tensor, or a tuple of them, of all inputs, and the same of all targets.

    Row i of each is of sample i. Nothing is augmented.
    """

    all_inputs: Value  # [n, ...] each, any dtype
    all_targets: Value  # [n, ...] each, any dtype

    def __len__(self) -> int:
        return len(as_tuple(self.all_inputs)[0])

    def inputs(self, ids: Tensor, draw: Draw | None) -> Value:
        return _rows(self.all_inputs, ids)

    def targets(self, ids: Tensor, draw: Draw | None) -> Value:
        return _rows(self.all_targets, ids)

    def first(self, n: int) -> Tensors:
        return Tensors(_rows(self.all_inputs, slice(n)), _rows(self.all_targets, slice(n)))

    def checksum(self) -> int:
        return checksum((*as_tuple(self.all_inputs), *as_tuple(self.all_targets)))


def checksum(tensors: Sequence[Tensor]) -> int:
    """Return the CRC-32 of contents, shapes and dtypes, which does not depend on the layout in memory."""
    return zlib.crc32(repr(specs_of(tensors)).encode(), crc(*tensors))


def _rows(value: Value, rows: Tensor | slice) -> Value:
    return on_each(value, lambda tensor: tensor[rows])
