"""A data set of the user's own as a `Split`: tensors, a map-style Dataset, or a Hugging Face data set.

The first stage's rank reads the inputs of a sample and the last stage's rank its targets, in separate
processes. Both must get the same augmentation. So the global random generators are seeded for each item by
the run's seed, the epoch and the sample's number, and restored afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from pipetrain.data.augment import draw as draw_words
from pipetrain.data.augment import key
from pipetrain.data.splits import Draw, Split, Tensors, checksum
from pipetrain.errors import ConfigError, failing
from pipetrain.model.random_numbers import RngSnapshot
from pipetrain.model.specs import Value, ValueSpec, as_tuple

HALVES = ("inputs", "targets")
_READ_FIRST = 8  # samples read twice before the start
_SUMMED = 64  # most samples in the checksum

Columns = Mapping[str, str | Sequence[str] | Mapping[str, str]]


def as_split(
    data: object, what: str, columns: Columns | None = None, dtype: torch.dtype = torch.float32
) -> Split:
    """Return a user's data set as a `Split`; `what` names it in errors ("data.train").

    `data`: a Split; a pair (inputs, targets), each a tensor or a NumPy array [n, ...] or a tuple or dict of
    them; a TensorDataset of two tensors; or anything with a length and items by number, each a pair (inputs,
    targets) of tensors, numbers, NumPy arrays, tuples or dicts of these. `columns`: if items are dicts, as in
    Hugging Face's data sets, the columns of the inputs and the targets; several make a tuple, a mapping a
    dict. `dtype`: of Python's floats. Raises ConfigError, also at reading, for a sample that cannot be read
    or has another shape.
    """
    if isinstance(data, Split):
        return data
    if isinstance(data, TensorDataset):
        data = data.tensors
    if isinstance(data, tuple | list) and len(data) == 2 and all(map(_is_of_tensors, data)):
        inputs, targets = (_value(part) for part in data)
        if len({len(t) if t.dim() else 0 for t in (*as_tuple(inputs), *as_tuple(targets))}) != 1:
            raise ConfigError(f"{what} holds tensors of several lengths: give a row of each for each sample")
        return Tensors(inputs, targets)
    if not has_numbers(data):
        raise ConfigError(
            f"{what} is a {type(data).__name__}, which has no length and no samples by number: give a "
            "map-style Dataset, or pass a loader of your own to pipetrain.Pipeline"
        )
    return DatasetSplit(data, what, columns or {}, dtype)


def has_numbers(data: object) -> bool:
    """Return whether an object has a length and samples by number."""
    has = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    return has and not isinstance(data, IterableDataset)


def _is_of_tensors(part: object) -> bool:
    parts = part.values() if isinstance(part, dict) else part if isinstance(part, tuple) and part else [part]
    return all(isinstance(t, Tensor | np.ndarray) for t in parts)


class DatasetSplit:
    """A map-style Dataset as a split: item i is sample i, and is read whenever needed."""

    _advice = "all samples must have one shape and dtype; data.collate= names a function that pads them"

    def __init__(
        self, dataset: Any, what: str, columns: Columns, dtype: torch.dtype, limit: int | None = None
    ) -> None:
        self._dataset = dataset
        self._what = what
        self._dtype = dtype
        self._length = len(dataset) if limit is None else min(limit, len(dataset))
        if not self._length:
            raise ConfigError(f"{what} has no sample")
        if columns and set(columns) != set(HALVES):
            raise ConfigError(
                f"data.columns must name the columns of inputs and of targets; got {', '.join(columns)}: set "
                "data.columns={inputs: NAME, targets: NAME}"
            )
        self._columns = columns and [columns[half] for half in HALVES]
        first = enumerate(self._read(torch.tensor([0]), None)[0])
        self._forms = self._forms_of([ValueSpec.like(self._value(0, half, part)) for half, part in first])
        # A data set with its own random generator would give two ranks different samples.
        for number in range(min(self._length, _READ_FIRST)):
            if self._sum(number) != self._sum(number):
                raise ConfigError(
                    f"{what}: sample {number} differs from one reading to the next: draw random numbers from "
                    "the global generators of torch, numpy or random, which are seeded for each sample"
                )

    def _forms_of(self, first: list[ValueSpec]) -> list[ValueSpec]:
        """Return the forms of all inputs and targets; `first`: of sample 0."""
        return first

    def __len__(self) -> int:
        return self._length

    def inputs(self, ids: Tensor, draw: Draw | None) -> Value:
        return self._microbatch(0, ids, draw)

    def targets(self, ids: Tensor, draw: Draw | None) -> Value:
        return self._microbatch(1, ids, draw)

    def first(self, n: int) -> DatasetSplit:
        cut = copy(self)
        cut._length = min(n, self._length)
        return cut

    def checksum(self) -> int:
        """Return the CRC-32 of the type, the length and at most 64 evenly spaced samples."""
        kind, count = type(self._dataset), min(self._length, _SUMMED)
        evenly = (index * (self._length - 1) // max(count - 1, 1) for index in range(count))
        return checksum([], kind.__module__, kind.__qualname__, self._length, *map(self._sum, evenly))

    def _sum(self, number: int) -> int:
        ids = torch.tensor([number])
        return checksum([t for half in (0, 1) for t in as_tuple(self._microbatch(half, ids, None))])

    def _microbatch(self, half: int, ids: Tensor, draw: Draw | None) -> Value:
        """Return the inputs (0) or the targets (1) of samples, [n, ...] each."""
        form, rows = self._forms[half], []
        for number, pair in zip(ids.tolist(), self._read(ids, draw), strict=True):
            rows.append(value := self._value(number, half, pair[half]))
            if (spec := ValueSpec.like(value)).specs != form.specs:
                raise ConfigError(
                    f"{self._what}: the {HALVES[half]} of sample {number} are {spec}, and of sample 0 "
                    f"{form}: {self._advice}"
                )
        columns = zip(*map(as_tuple, rows), strict=True)
        microbatch: Value = form.pack(tuple(default_collate(list(column)) for column in columns))
        return microbatch

    def _read(self, ids: Tensor, draw: Draw | None) -> list[tuple[object, object]]:
        """Return inputs and targets of samples from the data set, each read under its own seed."""
        stream = 0 if draw is None else key(draw.seed, draw.epoch)
        seeds = draw_words(stream, ids.numpy().astype(np.uint64)).tolist()
        read = []
        with RngSnapshot().replayed():
            for number, seed in zip(ids.tolist(), seeds, strict=True):
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed those of a GPU too
                np.random.seed(seed % 2**32)
                random.seed(seed)
                read.append(self._pair(number))
        return read

    def _item(self, number: int) -> Any:
        return self._dataset[number]

    def _pair(self, number: int) -> tuple[object, object]:
        what = f"{self._what}: sample {number}"
        with failing(f"{what} cannot be read"):
            item = self._item(number)
            if self._columns:
                inputs, targets = (_selected(item, column) for column in self._columns)
                return inputs, targets
        if isinstance(item, tuple | list) and len(item) == 2:
            return item[0], item[1]
        columns = f" of {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
        raise ConfigError(
            f"{what} must be (inputs, targets); got a {type(item).__name__}{columns}: return two values from "
            f"its __getitem__ or from data.collate, or name its columns with data.columns={{inputs: NAME, "
            f"targets: NAME}}"
        )

    def _value(self, number: int, half: int, part: object) -> Value:
        with failing(
            f"{self._what}: the {HALVES[half]} of sample {number} are a {type(part).__name__}, and must be "
            f"a tensor, a number, a NumPy array or a tuple of these"
        ):
            return _value(part, self._dtype)


def _selected(item: Any, column: str | Sequence[str] | Mapping[str, str]) -> object:
    if isinstance(column, str):
        return item[column]
    if isinstance(column, Mapping):
        return {name: _selected(item, part) for name, part in column.items()}
    return tuple(_selected(item, part) for part in column)


def _value(part: Any, dtype: torch.dtype = torch.float32) -> Value:
    """Return tensors in host memory; Python's floats, which have no dtype, become `dtype`."""
    if isinstance(part, Mapping):
        return {str(name): _tensor(element, dtype) for name, element in part.items()}
    if isinstance(part, tuple):
        return as_tuple([_tensor(element, dtype) for element in part])
    return _tensor(part, dtype)


def _tensor(part: Any, dtype: torch.dtype) -> Tensor:
    tensor = torch.as_tensor(part)
    if tensor.is_floating_point() and not isinstance(part, Tensor | np.ndarray):
        tensor = torch.as_tensor(part, dtype=torch.promote_types(tensor.dtype, dtype))
    return tensor.detach().cpu()
