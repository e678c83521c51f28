"""The batches of one pass, window by window: of a loader that rank 0 reads, or of a data set by number.

The ranks of a program each have a loader, and a shuffling one gives each rank other batches. So rank 0 alone
reads it: it tells the others how many samples the batches of a window have, feeds the inputs to the first
stage, and sends the targets to the last one. Samples by number have the same order on every rank: the first
stage's rank reads inputs and the last one's targets, and nothing travels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, tee
from typing import Any

import torch
from torch import Tensor

from pipetrain.data.loader import Sampled, loaded
from pipetrain.data.loading import Form, Reader
from pipetrain.data.sets import Draw, Split
from pipetrain.errors import TrainingStopped
from pipetrain.network.values import Value, as_tuple
from pipetrain.runtime.feed import cut
from pipetrain.runtime.mesh import Mesh
from pipetrain.tasks import Task, counted_for

log = logging.getLogger("pipetrain")

Sizes = Sequence[Sequence[int]]  # the samples of each microbatch of each batch
Told = Callable[[Callable[[Reader], Any]], Any]
"""Returns on every rank what a function of rank 0's reader returns there."""


@dataclass(slots=True)
class WindowSource:
    """The inputs of one window's microbatches and the targets of its batches, each where they are needed."""

    inputs: Iterator[Value] | None = None
    targets: Iterator[Value] | None = None
    sent: list[tuple[Any, Tensor]] = field(default_factory=list)

    def close(self) -> None:
        """Wait until what was sent has arrived."""
        for work, _ in self.sent:
            work.wait()


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

    The rank of the first stage reads inputs, that of the last one targets. `total`: of the epoch.
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
        split, draw = samples.split, samples.draw(epoch)
        assert split is not None or rank not in (placement[0], placement[-1]), "this rank needs the samples"
        self._window = WindowSource()
        if split is not None and rank == placement[0]:
            ids, read = [ids for batch in batches for ids in batch], partial(split.inputs, draw=draw)
            self._window.inputs = loaded(read, ids, samples.workers, samples.timeout)
        if split is not None and rank == placement[-1]:
            self._window.targets = (split.targets(torch.cat([*batch]), draw) for batch in batches)

    def next(self, window: int | None) -> list[int]:
        """Return the samples of each of the next `window` batches (None: of all that are left)."""
        sizes = self._sizes[self._given :][:window]
        self._given += len(sizes)
        return sizes

    def open(self, sizes: Sizes, last: int | None) -> WindowSource:
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
        """Return the samples of each of the next `window` batches (None: of all that are left).

        At the end that is empty; for a loader that never had a batch it is None. All ranks call it.
        """
        sizes: list[int] | None = self._told(lambda reader: reader.window(window))
        return sizes

    def skip(self, batches: int, window: int | None) -> None:
        """Leave out the first batches, which windows of so many have trained on. All ranks call it."""
        if batches:
            self._told(lambda reader: reader.skip(batches, window))

    def open(self, sizes: Sizes, last: int | None) -> WindowSource:
        """Return the next window's samples; `last`: the last stage's rank, None where no targets are read."""
        source, rank = WindowSource(), self._mesh.world.rank
        if self._reader is not None:
            read: Iterator[tuple[Value, Value]] = map(self._reader.take, map(sum, sizes))
            if last == rank:
                read, again = tee(read)
                source.targets = (targets for _, targets in again)
            elif last is not None:
                read = self._sending(read, last, source.sent)
            pieces = (cut(inputs, mbs) for (inputs, _), mbs in zip(read, sizes, strict=True))
            source.inputs = chain.from_iterable(pieces)
        elif last == rank:
            source.targets = (self._received(sum(mbs)) for mbs in sizes)
        return source

    def _sending(
        self, batches: Iterator[tuple[Value, Value]], last: int, sent: list[tuple[Any, Tensor]]
    ) -> Iterator[tuple[Value, Value]]:
        """Yield batches whose targets are on their way to the last stage."""
        for inputs, targets in batches:
            sent[:] = [one for one in sent if not one[0].is_completed()]
            for tensor in map(Tensor.contiguous, as_tuple(targets)):
                sent.append((self._mesh.post_tensor(tensor, last), tensor))
            yield inputs, targets

    def _received(self, size: int) -> Value:
        specs = self._form.targets.of(size).specs
        tensors = tuple(self._mesh.take_tensor("the targets of a batch", spec, 0) for spec in specs)
        value: Value = self._form.targets.pack(tensors)
        return value


Batches = ByNumber | OfLoader
"""The batches of one pass."""
