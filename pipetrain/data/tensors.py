"""Samples that lie in memory: one tensor, or a tuple of them, of all inputs, and the same of all targets."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pipetrain.boundary import Value, as_tuple, on_each, specs_of
from pipetrain.data.sets import Draw, crc


@dataclass(frozen=True)
class Tensors:
    """A split of tensors: row i of each of them is of sample i. Nothing is augmented."""

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
