"""A data set of the user's own whose samples differ in length, and the function that pads them to a batch.

A collate function takes a list of samples and returns a batch, as one of torch's DataLoader and as Hugging
Face's collators do. Ranks read other samples of a batch, and must pad them alike. So each sample is collated
by itself, beside one that is as long as the batch, and its row, the first one, is taken. Thus it does not
depend on microbatches, and a collator that draws, to mask words, draws the same for inputs and targets.
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

    `collate` returns a pair (inputs, targets) of tensors [n, ...] or tuples or dicts of them, a row a sample
    in the order of the samples; with `columns` a dict, of which these are the inputs and the targets.
    `limit`: of samples, if not all are used.
    """

    _advice = "a sample must be as long each time that it is read, and data.collate pad to the longest"

    def __init__(
        self,
        dataset: Any,
        what: str,
        columns: Columns | None,
        dtype: torch.dtype,
        collate: Collate,
        limit: int | None = None,
    ) -> None:
        if isinstance(dataset, Split | tuple) or not has_numbers(dataset):
            kind = type(dataset).__name__
            raise ConfigError(f"{what} is a {kind}, and data.collate needs a map-style Dataset of samples")
        self._collate = collate
        self._beside: list[int] = []  # samples of the lengths to which others are padded
        self._fills = False  # with 0, as there are no such samples
        self._row = 0  # which is taken
        self._forms = []
        super().__init__(dataset, what, columns or {}, dtype, limit)
        self._refuse_sorting()

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
        self._fills, self._longest = True, dict[tuple[int, ...], list[int]]()  # by lengths; copies share it
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
        for half, form, other_form in zip(HALVES, self._first, other._first, strict=True):
            if _kinds(form) != _kinds(other_form):
                raise ConfigError(
                    f"data.collate makes {half} {form} of {self._what}, and {other_form} of {other._what}: "
                    f"only sizes may differ"
                )
        joined = copy(self)
        joined._forms = joined._open(torch.cat([self._shapes, other._shapes]))
        return joined

    def lengths(self, ids: Tensor) -> tuple[int, ...]:
        return tuple(self._lengths[ids].amax(0).tolist())

    def padded(self, lengths: tuple[int, ...]) -> CollatedSplit:
        """Return the split with samples padded to lengths; with 0 if none of it is as long, as of a test set.

        Samples of a batch are collated beside the first samples that are as long and no longer.
        """
        if lengths not in self._longest:
            fits = (self._lengths <= torch.tensor(lengths, dtype=torch.int64)).all(1)
            found = [(fits & (self._lengths[:, n] == size)).nonzero() for n, size in enumerate(lengths)]
            self._longest[lengths] = [int(samples[0]) for samples in found if len(samples)]
        split = copy(self)
        split._forms = [form.at(lengths) for form in self._open_forms]
        split._beside = [*dict.fromkeys(self._longest[lengths])]
        split._fills = len(self._longest[lengths]) < len(lengths)
        return split

    def _item(self, number: int) -> Any:
        samples = [self._dataset[of] for of in (number, *self._beside)]
        with failing(f"{self._what}: data.collate cannot take sample {number}"):
            return self._collate(samples)

    def _refuse_sorting(self) -> None:
        """Refuse a function that makes the same batch of two samples in either order."""
        unequal = (self._shapes != self._shapes[0]).any(1).nonzero()
        if not len(unequal):
            return
        first, other = 0, int(unequal[0])
        both, rows = copy(self), []
        both._forms = []
        for number, both._beside, both._row in (
            (first, [other], 0),
            (first, [other], 1),
            (other, [first], 0),
        ):
            rows.append(both._tensors(number))
        if all(map(torch.equal, rows[0], rows[2])) and not all(map(torch.equal, *rows[:2])):
            raise ConfigError(
                f"{self._what}: data.collate changes the order of samples {first} and {other}, as if it "
                f"sorted them by length: let it return a row for each, in their order"
            )

    def _tensors(self, number: int) -> list[Tensor]:
        (pair,) = self._read(torch.tensor([number]), None)
        return [t for half, part in enumerate(pair) for t in as_tuple(self._value(number, half, part))]

    def _pair(self, number: int) -> tuple[object, object]:
        """Return a sample's inputs and targets."""
        pair, count = [], 1 + len(self._beside)
        for half, part in enumerate(super()._pair(number)):
            value = self._value(number, half, part)
            if wrong := [t for t in as_tuple(value) if t.dim() == 0 or len(t) != count]:
                raise ConfigError(
                    f"{self._what}: data.collate makes {HALVES[half]} {[*wrong[0].shape]} of {count} "
                    f"samples: it must return tensors [n, ...], with a row for each"
                )
            value = on_each(value, lambda t: t[self._row])
            if self._forms and self._fills:
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
