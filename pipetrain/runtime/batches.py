"""The batches of one pass, window by window: of a loader that rank 0 reads, or of a data set by number.

The ranks of a program each have a loader, and a shuffling one gives each rank other batches. So rank 0 alone
reads it: it tells the others how many samples the batches of a window have, feeds the inputs to the first
stage, and sends the targets to the last one. Samples by number have the same order on every rank: the first
stage's rank reads inputs and the last one's targets, and nothing travels.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from pipetrain.data.batch import Form
from pipetrain.data.loader import Sampled, loaded
from pipetrain.data.loading import Reader
from pipetrain.data.sets import Draw, Split
from pipetrain.errors import TrainingStopped
from pipetrain.network.values import Value, ValueSpec, as_tuple
from pipetrain.runtime.mesh import Mesh
from pipetrain.tasks import Task, counted_for

log = logging.getLogger("pipetrain")

Sizes = Sequence[Sequence[int]]  # the samples of each microbatch of each batch
Told = Callable[[Callable[[Reader], Any]], Any]
"""Returns on every rank what a function of rank 0's reader returns there."""


class Batches(Protocol):
    """The batches of one pass. `total`: how many it has, those done before too; None if unknown."""

    total: int | None

    def next(self, window: int | None) -> list[int] | None:
        """Return the samples of each of the next `window` batches (None: of all that are left).

        At the end that is empty; for a loader that never had a batch it is None. All ranks call it.
        """

    def open(self, sizes: Sizes, last: int) -> WindowSource:
        """Return the next window's samples; `last`: the last stage's rank."""


class WindowSource:
    """The inputs and targets of one window's microbatches, each on the rank that needs them, else None."""

    inputs: Iterator[Value] | None = None
    targets: Iterator[Value] | None = None

    def close(self) -> None:
        """Wait until what was sent has arrived."""


def counting(
    batches: Sequence[list[Tensor]],
    split: Split | None,
    draw: Draw,
    task: Task,
    mesh: Mesh,
    last: int,
) -> list[list[Tensor]]:
    """Return the batches of an epoch in which something counts, alike on all ranks.

    `batches`: the sample ids of the microbatches of each; `last`: the rank of the last stage, whose `split`
    says; it reads samples of a batch until one counts. Raises TrainingStopped if nothing does.
    """
    if task.counts_samples:
        return [*batches]
    left: list[int] = []
    if mesh.world.rank == last:
        assert split is not None, "the rank of the last stage needs the samples"
        for number, batch in enumerate(batches):
            targets = (split.targets(one, draw) for one in torch.split(torch.cat(batch), 1))
            if any(counted_for(task.weight, some) for some in targets):
                left.append(number)
    left = mesh.tell("the batches in which something counts", left, last)
    skipped = len(batches) - len(left)
    what = f"epoch {draw.epoch + 1}: none of the targets counts in {skipped} of {len(batches)} batches"
    if not left:
        raise TrainingStopped(f"{what}: there is nothing to learn")
    if skipped and mesh.world.rank == 0:
        log.warning("pipetrain: %s, which are skipped", what)
    return [batches[number] for number in left]


class ByNumber:
    """The `batches` of an epoch of samples by number (the ids of each microbatch), after the first `done`.

    The rank of the first stage reads inputs, that of the last one targets.
    """

    def __init__(
        self,
        samples: Sampled,
        epoch: int,
        batches: Sequence[Sequence[Tensor]],
        placement: Sequence[int],
        rank: int,
        done: int = 0,
    ) -> None:
        self.total: int | None = len(batches)
        batches = batches[done:]
        self._sizes = [sum(map(len, batch)) for batch in batches]
        self._given = 0
        ids, split, draw = [ids for batch in batches for ids in batch], samples.split, samples.draw(epoch)
        self._window = WindowSource()
        if rank == placement[0]:
            assert split is not None, "the rank of the first stage needs the samples"
            self._window.inputs = loaded(
                partial(split.inputs, draw=draw), ids, samples.workers, samples.timeout
            )
        if rank == placement[-1]:
            assert split is not None, "the rank of the last stage needs the samples"
            self._window.targets = loaded(partial(split.targets, draw=draw), ids)

    def next(self, window: int | None) -> list[int]:
        sizes = self._sizes[self._given :][:window]
        self._given += len(sizes)
        return sizes

    def open(self, sizes: Sizes, last: int) -> WindowSource:
        return self._window


class OfLoader:
    """The batches of a loader; `reader`: on rank 0."""

    total: int | None = None

    def __init__(self, mesh: Mesh, reader: Reader | None, told: Told, form: Form) -> None:
        self._mesh = mesh
        self._reader = reader
        self._told = told
        self._form = form

    def next(self, window: int | None) -> list[int] | None:
        sizes: list[int] | None = self._told(lambda reader: reader.window(window))
        return sizes

    def skip(self, batches: int, window: int | None) -> None:
        """Leave out the first batches, which windows of so many have trained on. All ranks call it."""
        if batches:
            self._told(lambda reader: reader.skip(batches, window))

    def open(self, sizes: Sizes, last: int) -> WindowSource:
        return _Sent(self._mesh, last, sizes, self._form, self._reader)


class _Sent(WindowSource):
    """A window of a loader: rank 0 reads it, and sends the targets to the last stage."""

    def __init__(self, mesh: Mesh, last: int, sizes: Sizes, form: Form, reader: Reader | None) -> None:
        self._mesh = mesh
        self._last = last
        self._sizes = sizes
        self._form = form
        self._reader = reader
        self._to_read = iter(sizes)
        self._read_inputs: deque[Value] = deque()
        self._read_targets: deque[Value] = deque()
        self._posted: list[tuple[Any, Tensor]] = []
        if reader is not None:
            self.inputs = self._given(self._read_inputs)
        if mesh.world.rank == last:
            self.targets = self._given(self._read_targets) if reader is not None else self._received()

    def _given(self, ready: deque[Value]) -> Iterator[Value]:
        for _ in range(sum(map(len, self._sizes))):
            if not ready:
                self._read()
            yield ready.popleft()

    def _read(self) -> None:
        assert self._reader is not None
        sizes = next(self._to_read)
        inputs, targets = self._reader.take(sum(sizes))
        self._read_inputs += _pieces(inputs, sizes)
        if self._last == self._mesh.world.rank:
            self._read_targets += _pieces(targets, sizes)
            return
        self._posted = [sent for sent in self._posted if not sent[0].is_completed()]
        for tensor in as_tuple(targets):
            tensor = tensor.contiguous()
            self._posted.append((self._mesh.post_tensor(tensor, self._last), tensor))

    def _received(self) -> Iterator[Value]:
        for sizes in self._sizes:
            specs = self._form.targets.of(sum(sizes)).specs
            made = tuple(self._mesh.take_tensor("the targets of a batch", spec, 0) for spec in specs)
            yield from _pieces(self._form.targets.pack(made), sizes)

    def close(self) -> None:
        for work, _ in self._posted:
            work.wait()


def _pieces(value: Value, sizes: Sequence[int]) -> list[Value]:
    """Cut a batch's tensors into microbatches."""
    form = ValueSpec.in_batch(value)
    pieces = zip(*(torch.split(t, list(sizes)) for t in as_tuple(value)), strict=True)
    return [form.pack(piece) for piece in pieces]
