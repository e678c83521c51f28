"""A data set of the user's own whose samples differ in length, and the function that pads them to a batch.

A collate function takes a list of samples and returns a batch, as one of torch's DataLoader and as Hugging
Face's collators do. Ranks read other samples of a batch, and must pad them alike. So each sample is collated
by itself, beside one that is as long as the batch, and its row is taken. Thus it does not depend on
microbatches, and a collator that draws, to mask words, draws the same for inputs and targets.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipetrain.data.splits import Split
from pipetrain.data.user_data import HALVES, Columns, DatasetSplit, has_numbers
from pipetrain.errors import ConfigError, failing
from pipetrain.model.specs import TensorSpec, ValueSpec, as_tuple, on_each

Collate = Callable[[list[Any]], Any]
_READ_AT_ONCE = 64


class CollatedSplit(DatasetSplit):
    """A map-style Dataset as a `Padded` split. Making it reads all samples once, to know their lengths.

    `collate` returns a pair (inputs, targets) of tensors [n, ...] or tuples or dicts of them; with `columns`
    a dict, of which these are the inputs and the targets.
    """

    def __init__(
        self, dataset: Any, what: str, columns: Columns | None, dtype: torch.dtype, collate: Collate
    ) -> None:
        if isinstance(dataset, Split | tuple) or not has_numbers(dataset):
            kind = type(dataset).__name__
            raise ConfigError(f"{what} is a {kind}, and data.collate needs a map-style Dataset of samples")
        self._collate = collate
        self._beside: list[int] = []  # samples of the lengths to which others are padded
        self._forms = []
        super().__init__(dataset, what, columns or {}, dtype)

    def _forms_of(self, first: list[ValueSpec]) -> list[ValueSpec]:
        from tqdm.auto import tqdm  # here, as the GPU check trains without it

        hidden = os.environ.get("RANK", "0") != "0" or None  # None: where it is no terminal
        self._first, rows = first, list[list[int]]()
        with tqdm(desc=f"{self._what}: lengths", total=self._length, leave=False, disable=hidden) as bar:
            for ids in torch.split(torch.arange(self._length), _READ_AT_ONCE):
                for number, pair in zip(ids.tolist(), self._read(ids, None), strict=True):
                    rows.append(self._shape(number, pair))
                bar.update(len(ids))
        self._shapes = torch.tensor(rows)  # [samples, dimensions of all inputs and targets]
        return self._open(self._shapes)

    def _shape(self, number: int, pair: tuple[object, object]) -> list[int]:
        forms = [ValueSpec.like(self._value(number, half, part)) for half, part in enumerate(pair)]
        for half, form, other in zip(HALVES, self._first, forms, strict=True):
            if _kinds(form) != _kinds(other):
                raise ConfigError(
                    f"{self._what}: data.collate makes {half} {other} of sample {number}, and {form} of "
                    f"sample 0: only sizes may differ"
                )
        return [n for form in forms for spec in form.specs for n in spec.shape]

    def _open(self, shapes: Tensor) -> list[ValueSpec]:
        """Find the lengths, dimensions that differ in `shapes`; return the forms at the largest ones."""
        columns = [tuple(column) for column in shapes.T.tolist()]
        differing = [*dict.fromkeys(column for column in columns if len({*column}) > 1)]
        numbers = iter(-1 - differing.index(of) if of in differing else of[0] for of in columns)
        self._lengths = self._shapes[:, [columns.index(of) for of in differing]]
        self._open_forms = [
            replace(
                form,
                specs=tuple(TensorSpec(tuple(next(numbers) for _ in s.shape), s.dtype) for s in form.specs),
            )
            for form in self._first
        ]
        return [form.at([max(of) for of in differing]) for form in self._open_forms]

    def joined(self, other: CollatedSplit) -> CollatedSplit:
        """Return the split with the lengths that it has together with another, and the largest of both."""
        joined = copy(self)
        joined._forms = joined._open(torch.cat([self._shapes, other._shapes]))
        return joined

    def lengths(self, ids: Tensor) -> tuple[int, ...]:
        return tuple(self._lengths[ids].amax(0).tolist())

    def padded(self, lengths: tuple[int, ...]) -> CollatedSplit:
        split = copy(self)
        split._forms = [form.at(lengths) for form in self._open_forms]
        found = [(self._lengths[:, n] == length).nonzero() for n, length in enumerate(lengths)]
        split._beside = sorted({int(samples[0]) for samples in found if len(samples)})
        return split

    def _item(self, number: int) -> Any:
        return self._collate([self._dataset[of] for of in (number, *self._beside)])

    def _pair(self, number: int) -> tuple[object, object]:
        """Return a sample's inputs and targets. Up to lengths that no sample has they are filled with 0."""
        pair = []
        for half, part in enumerate(super()._pair(number)):
            value = self._value(number, half, part)
            with failing(f"{self._what}: data.collate must return tensors [n, ...]"):
                value = on_each(value, lambda t: t[0])
            if self._forms:
                form = self._forms[half]
                both = zip(as_tuple(value), form.specs, strict=True)
                value = form.pack(tuple(_filled(t, spec.shape) for t, spec in both))
            pair.append(value)
        return pair[0], pair[1]


def _kinds(form: ValueSpec) -> object:
    return [(spec.dtype, len(spec.shape)) for spec in form.specs], form.single, form.names


def _filled(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    missing = [max(0, most - size) for size, most in zip(tensor.shape, shape, strict=True)]
    return pad(tensor, [n for more in reversed(missing) for n in (0, more)]) if any(missing) else tensor
