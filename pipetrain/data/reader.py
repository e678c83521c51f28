"""A user's loader, as rank 0 reads it: the sizes of the next window, then its batches.

A batch is inputs and targets, each in the form that the first batch had.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from pipetrain.data.batch import BadBatch, Form, NamedTargets, Pair, kind, pair, refuse_outside, unlabelled
from pipetrain.data.loader_facts import has_length, known_sizes, share_in
from pipetrain.errors import ConfigError
from pipetrain.model.network import Limits
from pipetrain.model.specs import Size, Value, as_tuple, on_each
from pipetrain.tasks import counted_for

log = logging.getLogger("pipetrain")

Loader = Iterable[Any]
"""Yields (inputs, targets): each a tensor [n, ...], or a tuple, list or dict of them; or see NamedTargets."""

_END = object()


@dataclass(slots=True)
class Reader:
    """Rank 0's pass over a loader: the sizes of the next window, then its batches.

    `form`: what every sample looks like; None: as those of the first batch. `named`: the targets where
    batches are dicts. `weight`: what targets count for; batches of which nothing does are left out, of the
    windows that are read before they begin. `labelled`: whether targets are read. `ranks`: for which it is
    read; `microbatches`: into which batches are to be cut. `longest`: the largest lengths, one for all or one
    of each; empty: any. `limits`: of each length, that the model takes.
    """

    loader: Loader
    what: str
    form: Form | None = None
    named: NamedTargets | None = None
    weight: Callable[[Value], Tensor | float] | None = None
    labelled: bool = True
    ranks: int = 1
    microbatches: int = 1
    longest: Sequence[int] = ()
    limits: Sequence[Limits] = ()
    _batches: Iterator[Any] | None = None
    largest: tuple[int, ...] = ()
    """The largest lengths: those given, or else those of the batches from which the form is."""
    known_lengths: list[tuple[int, ...]] = field(default_factory=list)
    """Those of these batches."""
    _begun: deque[Any] = field(default_factory=deque)  # what the loader gave and nobody has read
    _given: int = 0  # by the loader
    _read_ahead: deque[tuple[Value, Value]] = field(default_factory=deque)  # batches read and not yet taken
    _read: int = 0  # the number of batches read
    _ended: bool = False  # the loader; after that some would begin another pass
    _announced: int = 0
    _taken: int = 0
    _all_counts: bool | None = None  # as far as is known at the start

    def first(self) -> tuple[Value, Value] | None:
        """Return the first batch in host memory without taking it, or None. Raises BadBatch, ConfigError."""
        if not self._read_ahead and not self._read_one():
            return None
        inputs, targets = self._read_ahead[0]
        return on_each(inputs, Tensor.cpu), targets

    def window(self, batches: int | None) -> list[Size] | None:
        """Return the size of each of the next `batches` (None: of all that are left).

        At the end that is empty; for a loader that never had a batch it is None.
        A window of one batch is read at once, so that an error of the loader comes before the window begins.
        So are batches whose sizes are unknown, and those of which nothing may count. Raises BadBatch, and
        ConfigError for a loader without length.
        """
        self._begin()
        all_sizes = self._known(batches)
        if all_sizes is not None:
            sizes = all_sizes[self._announced :][:batches]
            if not sizes and self._taken == self._announced:
                self._next()  # as a loop would: a sampler may draw at its end
        else:
            if batches is None and not has_length(self.loader):
                raise ConfigError(
                    "this schedule trains a whole pass as one window, and a loader without length does not "
                    "say how long that is: give train(loader, window=...)"
                )
            self._leave_out()
            before = self._announced - self._taken  # of windows that have not begun
            while (batches is None or len(self._read_ahead) < before + batches) and self._read_one():
                self._leave_out()
            sizes = [self._form.size(*batch) for batch in self._read_ahead][before:]
        self._announced += len(sizes)
        return sizes if self._announced or self._read else None

    def skip(self, batches: int, window: int | None) -> int:
        """Read so many batches for nothing; return how many there were. The loader's random numbers go on.

        `window`: batches of the windows that had them, which decides whether some were left out.
        """
        streamed = self._known(window) is not None
        skipped = 0
        while skipped < batches and (self._read_ahead or self._read_one()):
            if not streamed:
                self._leave_out()
            if self._read_ahead:
                self._read_ahead.popleft()
                skipped += 1
        self._announced += skipped
        self._taken += skipped
        return skipped

    def _known(self, window: int | None) -> list[Size] | None:
        """Return the size of each batch if windows are streamed; None if they are read before."""
        has_lengths = self.form is not None and self.form.lengths
        return None if has_lengths or window == 1 or not self._counts() else known_sizes(self.loader)

    def _counts(self) -> bool:
        """Return whether all targets of the first batch count, or of all samples where tensors hold them."""
        if self.weight is None:
            return True
        if self._all_counts is None:
            data = getattr(self.loader, "dataset", None)
            targets: Value | None = None
            if type(data) is TensorDataset and len(data.tensors) == 2:
                targets = data.tensors[1]
            elif first := self.first():
                targets = first[1]
            self._all_counts = targets is None or _all_count(self.weight, targets)
        return self._all_counts

    def _leave_out(self) -> None:
        if self.weight is None or not self._read_ahead:
            return
        if not counted_for(self.weight, self._read_ahead[-1][1]):
            self._read_ahead.pop()
            log.warning("%s %d is skipped: none of its targets counts", self.what, self._read - 1)

    def take(self, size: Size) -> tuple[Value, Value]:
        """Return the next batch, of this size. Raises BadBatch for another one."""
        if not self._read_ahead and not self._read_one():
            raise BadBatch(
                f"the loader ended after {self._read} batches, and its sampler said {self._announced}"
            )
        inputs, targets = self._read_ahead.popleft()
        self._taken += 1
        if (actual := self._form.size(inputs, targets)) != size:
            raise BadBatch(f"{self.what} {self._read - 1} has {actual}, and its sampler said {size}")
        return inputs, targets

    def _read_one(self) -> bool:
        """Read one more batch; return False at the end. The loader may fill the buffer of the last one."""
        self._begin()
        if self._read_ahead:
            inputs, targets = self._read_ahead.pop()
            self._read_ahead.append((on_each(inputs, _copy), on_each(targets, _copy)))
        batch = self._next()
        if batch is _END:
            return False
        what = f"{self.what} {self._read}"
        if self.labelled or self.form is None:
            inputs, targets = pair(batch, what, self.named)
        else:
            inputs, targets = unlabelled(batch, what, self.form, self.named)
        if self.form is None:
            inputs, targets = (on_each(half, _copy) for half in (inputs, targets))
            self.form = self._begin_form((inputs, targets))
        inputs, targets = self.form.inputs.ordered(inputs), self.form.targets.ordered(targets)
        self.form.refuse_other(inputs, targets, what)
        self._refuse_long(self.form.size(inputs, targets), what)
        self._read_ahead.append((inputs, targets))
        self._read += 1
        return True

    @property
    def _form(self) -> Form:
        assert self.form is not None, "a batch has been read"
        return self.form

    def _begin_form(self, first: Pair) -> Form:
        """Return the form of batches, by the first one, and by the second of a loader that may be read ahead.

        Another loader may wait for what the first one trains.
        """
        second = None
        if isinstance(self.loader, DataLoader | Sequence) and known_sizes(self.loader) is None:
            try:
                self._begun.append(self._fetch())
                second = None if self._begun[0] is _END else pair(self._begun[0], "", self.named)
            except BadBatch:  # which is raised when it comes
                pass
            except Exception as error:  # the loader's, after the first batch is trained
                self._begun.append(error)
        form = Form.of(first, second, len(self.longest))
        if 1 < len(self.longest) < form.lengths:
            raise ConfigError(
                f"max_length has {len(self.longest)} numbers, and the first two batches differ in "
                f"{form.lengths} dimensions: give one number for all, or {form.lengths}"
            )
        self.known_lengths = [form.size(*batch).lengths for batch in (first, second or first)]
        self.largest = tuple(map(max, *self.known_lengths))
        if self.longest:
            self.largest = tuple(islice(cycle(self.longest), form.lengths))
        return form

    def _refuse_long(self, size: Size, what: str) -> None:
        """Refuse lengths of 0, and above the largest. Raises BadBatch."""
        if 0 in size.lengths and self.labelled:
            raise BadBatch(f"{what} has {size}: leave it out, or pad it to 1 at least")
        for actual, most in zip(size.lengths, cycle(self.longest), strict=False):
            if actual > most:
                longest = [*self.longest] if len(self.longest) > 1 else most
                raise BadBatch(
                    f"{what} has {size}, and max_length={longest}: cut what is longer, or give a larger one"
                )
        refuse_outside(size, self.limits, what)

    def _begin(self) -> None:
        if self._batches is None:
            refuse_loader(self.loader, self.ranks, self.microbatches)
            self._batches = iter(self.loader)

    def _next(self) -> Any:
        """Return what the loader gives next, or _END."""
        given = self._begun.popleft() if self._begun else self._fetch()
        if isinstance(given, Exception):
            raise given
        return given

    def _fetch(self) -> Any:
        """Return what the loader gives next, or _END; log a line where it has not given what it said."""
        assert self._batches is not None
        batch = _END if self._ended else next(self._batches, _END)
        self._given += batch is not _END
        if batch is _END and not self._ended:
            self._ended = True
            if has_length(self.loader) and (said := len(self.loader)) != self._given:  # type: ignore[arg-type]
                log.warning(
                    "pipetrain: the loader gave %d batches in this pass, and its len() is %d: look for an "
                    "error that it swallows, or for a wrong len()",
                    *(self._given, said),
                )
        return batch


def _all_count(weight: Callable[[Value], Tensor | float], targets: Value) -> bool:
    first = as_tuple(targets)[0]
    return counted_for(weight, targets) in (len(first), first.numel())


def refuse_loader(loader: Any, ranks: int, microbatches: int = 1) -> None:
    """Refuse single samples, one rank's share of them, and a batch too small to cut. Raises ConfigError."""
    if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
        raise ConfigError(
            f"the loader is a Dataset, {kind(loader)}, which gives samples: let a DataLoader make batches of "
            f"them, DataLoader(dataset, batch_size=...), or None if it gives batches"
        )
    if ranks > 1 and (share := share_in(loader)):
        raise ConfigError(
            f"the loader's {share} gives each rank a share of the samples, and rank 0 alone reads the "
            f"loader, for all {ranks} ranks: give one of all samples, as DataLoader(dataset, shuffle=True); "
            f"with replicas pipetrain deals out its batches"
        )
    if why := too_small(known_sizes(loader) or (), microbatches):
        raise ConfigError(why)


def too_small(sizes: Sequence[Size], microbatches: int) -> str:
    """Say why a batch cannot be cut into its microbatches; "" if all can."""
    if not sizes or min(sizes).can_be_cut(microbatches):
        return ""
    return (
        f"a batch of {min(sizes)} cannot be cut into microbatches={microbatches}: leave it out, as "
        f"DataLoader(drop_last=True) does, or choose another batch size"
    )


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, pin_memory=tensor.is_pinned()).copy_(tensor)
