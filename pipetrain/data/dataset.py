"""A data set of the user's own as a `Split`: tensors, a map-style Dataset, or a Hugging Face data set.

The rank of the first stage reads the inputs of a sample and that of the last its targets, in processes of
their own. Both must see the same augmentation. So the global random generators are seeded for each item by
the run's seed, the epoch and the sample's number, and restored afterwards.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset, default_collate

from pipetrain.data.augment import draw as draw_words
from pipetrain.data.augment import key
from pipetrain.data.sets import Draw, Split, Tensors, checksum
from pipetrain.errors import ConfigError, one_line
from pipetrain.network.values import TensorSpec, Value, ValueSpec, as_tuple, specs_of

_HALVES = ("inputs", "targets")
_READ_FIRST = 8  # samples that are read before the start, twice
_SUMMED = 64  # samples that the checksum reads, at most

Columns = Mapping[str, str | Sequence[str] | Mapping[str, str]]
Column = str | tuple[str, ...] | dict[str, str]  # a tensor, a tuple, or a dict: name -> column


def as_split(
    made: object, what: str, columns: Columns | None = None, dtype: torch.dtype = torch.float32
) -> Split:
    """Return what a user gives as a data set as a `Split`; `what` names it in errors ("data.train").

    `made`: a Split; a pair (inputs, targets), each a tensor or a NumPy array [n, ...] or a tuple or dict of
    them; a TensorDataset of two tensors; or anything with a length and items by number, each a pair (inputs,
    targets) of tensors, numbers, NumPy arrays, tuples or dicts of these. `columns`: where items are dicts, as
    those of Hugging Face, the columns that are the inputs and the targets; several make a tuple, a mapping a
    dict. `dtype`: of what are Python's floats.
    Raises ConfigError, also for a sample that cannot be read or has another shape, when it is read.
    """
    if isinstance(made, TensorDataset):
        made = made.tensors
    if isinstance(made, tuple | list) and made and all(_are_tensors(part) for part in made):
        if columns:
            raise ConfigError(f"{what} holds tensors, which have no columns: set data.columns=null")
        return _of_tensors(made, what)
    if isinstance(made, Split):
        return made
    if isinstance(made, IterableDataset) or not (hasattr(made, "__getitem__") and hasattr(made, "__len__")):
        raise ConfigError(
            f"{what} is a {type(made).__name__}, which has no length and no samples by number: give a "
            "map-style Dataset, or pass a loader of your own to pipetrain.Pipeline"
        )
    items = Items(made, what, _checked(columns), dtype)
    items.prove()
    return items


def _are_tensors(part: object) -> bool:
    if isinstance(part, dict):
        part = tuple(part.values())
    return all(
        isinstance(t, Tensor | np.ndarray) for t in (part if isinstance(part, tuple) and part else [part])
    )


def _of_tensors(parts: Sequence[Any], what: str) -> Tensors:
    if len(parts) != 2:
        raise ConfigError(
            f"{what} holds {len(parts)} tensors, and must hold inputs and targets: give (inputs, targets), "
            "where either may be a tuple of tensors"
        )
    inputs, targets = (_value(part) for part in parts)
    tensors = (*as_tuple(inputs), *as_tuple(targets))
    lengths = [len(tensor) if tensor.dim() else 0 for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ConfigError(
            f"{what} has inputs of {_listed(lengths[: len(as_tuple(inputs))])} samples and targets of "
            f"{_listed(lengths[len(as_tuple(inputs)) :])}: their first dimensions must be equal"
        )
    if not lengths[0]:
        raise ConfigError(f"{what} has no sample")
    return Tensors(inputs, targets)


def _listed(numbers: Sequence[int]) -> str:
    return " and ".join(map(str, numbers))


def _checked(columns: Columns | None) -> dict[str, Column] | None:
    """Return the columns as plain names, which can be pickled."""
    if not columns:
        return None
    if set(columns) != set(_HALVES):
        raise ConfigError(
            f"data.columns must name the columns of inputs and of targets; got {', '.join(columns)}: set "
            "data.columns={inputs: NAME, targets: NAME}"
        )
    return {half: _plain(column) for half, column in columns.items()}


def _plain(column: Any) -> Column:
    if isinstance(column, str):
        return column
    return {str(k): str(v) for k, v in column.items()} if isinstance(column, Mapping) else tuple(column)


class Items:
    """A map-style Dataset as a split: item i is sample i, which is read whenever it is needed."""

    def __init__(
        self, dataset: Any, what: str, columns: dict[str, Column] | None, dtype: torch.dtype
    ) -> None:
        self._dataset = dataset
        self._what = what
        self._columns = columns
        self._dtype = dtype
        self._length = len(dataset)
        if not self._length:
            raise ConfigError(f"{what} has no sample")
        first = [
            self._value(0, half, part) for half, part in enumerate(self._read(torch.tensor([0]), None)[0])
        ]
        self._forms = [ValueSpec.like(value) for value in first]
        self._specs = [specs_of(as_tuple(value)) for value in first]

    def __len__(self) -> int:
        return self._length

    def inputs(self, ids: Tensor, draw: Draw | None) -> Value:
        return self._microbatch(0, ids, draw)

    def targets(self, ids: Tensor, draw: Draw | None) -> Value:
        return self._microbatch(1, ids, draw)

    def first(self, n: int) -> Items:
        cut = copy(self)
        cut._length = min(n, self._length)
        return cut

    def checksum(self) -> int:
        """Return the CRC-32 of the type, the length and at most 64 evenly spaced samples."""
        kind, count = type(self._dataset), min(self._length, _SUMMED)
        evenly = (index * (self._length - 1) // max(count - 1, 1) for index in range(count))
        content = (
            f"{kind.__module__}.{kind.__qualname__}",
            self._length,
            [self._sum(number) for number in evenly],
        )
        return zlib.crc32(repr(content).encode())

    def prove(self) -> None:
        """Read the first samples twice: they must have one shape, and be the same again.

        A data set with a random generator of its own would give one rank other inputs than another.
        """
        for number in range(min(self._length, _READ_FIRST)):
            if self._sum(number) != self._sum(number):
                raise ConfigError(
                    f"{self._what}: sample {number} differs from one reading to the next: draw random "
                    "numbers from the global generators of torch, numpy or random, which are seeded for each "
                    "sample"
                )

    def _sum(self, number: int) -> int:
        ids = torch.tensor([number])
        return checksum([t for half in (0, 1) for t in as_tuple(self._microbatch(half, ids, None))])

    def _microbatch(self, half: int, ids: Tensor, draw: Draw | None) -> Value:
        """Return the inputs (0) or the targets (1) of samples, [n, ...] each."""
        rows = []
        for number, parts in zip(ids.tolist(), self._read(ids, draw), strict=True):
            value = self._value(number, half, parts[half])
            self._refuse_another_shape(number, half, value)
            rows.append(as_tuple(value))
        tensors = tuple(default_collate(list(column)) for column in zip(*rows, strict=True))
        microbatch: Value = self._forms[half].pack(tensors)
        return microbatch

    def _read(self, ids: Tensor, draw: Draw | None) -> list[tuple[object, object]]:
        """Return inputs and targets of samples as the data set gives them, each under a seed of its own."""
        stream = 0 if draw is None else key(draw.seed, draw.epoch)
        seeds = draw_words(stream, ids.numpy().astype(np.uint64)).tolist()
        read = []
        with _random_state_restored():
            for number, seed in zip(ids.tolist(), seeds, strict=True):
                _seed(seed)
                read.append(self._pair(number))
        return read

    def _pair(self, number: int) -> tuple[object, object]:
        try:
            item = self._dataset[number]
        except ConfigError:
            raise
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"{self._what}: sample {number} cannot be read ({reason})") from error
        if self._columns:
            return self._of_columns(number, item, self._columns)
        if isinstance(item, tuple | list) and len(item) == 2:
            return item[0], item[1]
        got = f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, tuple | list) else "")
        hint = "return two values from its __getitem__"
        if isinstance(item, Mapping):
            got += f" of {', '.join(map(str, item))}"
            hint = "name its columns with data.columns={inputs: NAME, targets: NAME}"
        raise ConfigError(f"{self._what}: sample {number} must be (inputs, targets); got {got}: {hint}")

    def _of_columns(self, number: int, item: Any, columns: dict[str, Column]) -> tuple[object, object]:
        if not isinstance(item, Mapping):
            raise ConfigError(
                f"{self._what}: sample {number} is a {type(item).__name__}, which has no columns: set "
                "data.columns=null"
            )
        for name in (name for names in columns.values() for name in _names(names)):
            if name not in item:
                raise ConfigError(
                    f"{self._what}: sample {number} has no column {name}: data.columns can name "
                    f"{', '.join(map(str, item))}"
                )
        return _taken(item, columns["inputs"]), _taken(item, columns["targets"])

    def _value(self, number: int, half: int, part: object) -> Value:
        try:
            return _value(part, self._dtype)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{self._what}: the {_HALVES[half]} of sample {number} are a {type(part).__name__}, and must "
                f"be a tensor, a number, a NumPy array or a tuple of these ({one_line(error)})"
            ) from error

    def _refuse_another_shape(self, number: int, half: int, value: Value) -> None:
        specs = specs_of(as_tuple(value))
        if specs != self._specs[half]:
            raise ConfigError(
                f"{self._what}: the {_HALVES[half]} of sample {number} are {_text(specs)}, and of sample 0 "
                f"{_text(self._specs[half])}: all samples must have one shape and dtype"
            )


def _names(column: Column) -> tuple[str, ...]:
    if isinstance(column, str):
        return (column,)
    return tuple(column.values()) if isinstance(column, dict) else column


def _taken(item: Mapping[str, Any], column: Column) -> object:
    if isinstance(column, str):
        return item[column]
    if isinstance(column, dict):
        return {name: item[of] for name, of in column.items()}
    return tuple(item[of] for of in column)


def _text(specs: Sequence[TensorSpec]) -> str:
    return " + ".join(map(str, specs))


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


def _seed(seed: int) -> None:
    """Seed the three global generators; torch.manual_seed would seed those of a GPU too."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def _random_state_restored() -> Iterator[None]:
    states = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
