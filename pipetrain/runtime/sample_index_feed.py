"""The feed of samples by number: each rank reads those of its own microbatches, and nothing travels.

The order of the samples depends on the seed and the epoch alone, so that all ranks know it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from pipetrain.data.batch import refuse_outside
from pipetrain.data.sampling import Sampled, loaded
from pipetrain.data.splits import Draw, Split
from pipetrain.errors import TrainingStopped
from pipetrain.model.network import Limits
from pipetrain.model.specs import Size, Value
from pipetrain.plan.plan import Plan
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.microbatch_feed import WindowFeed, WindowPart
from pipetrain.tasks import Task, counted_for

log = logging.getLogger("pipetrain")


def batches_that_count(
    samples: Sampled, epoch: int, task: Task, groups: ProcessGroups, last: int
) -> list[list[Tensor]]:
    """Return the batches of an epoch in which something counts, the same on all ranks: see Sampled.epoch.

    `last`: the rank of the last stage, which reads their targets. Raises TrainingStopped if nothing does.
    """
    batches = samples.epoch(epoch)
    if task.counts_samples or samples.draw(epoch) is None:
        return batches
    counting = samples.counting(epoch, task.weight) if groups.world.rank == last else []
    counting = groups.broadcast("the batches in which something counts", counting, last)
    skipped = len(batches) - len(counting)
    message = f"epoch {epoch + 1}: none of the targets counts in {skipped} of {len(batches)} batches"
    if not counting:
        raise TrainingStopped(f"{message}: there is nothing to learn")
    if skipped and groups.world.rank == 0:
        log.warning("pipetrain: %s, which are skipped", message)
    return [batches[number] for number in counting]


def turns(batches: Sequence[int], period: int | None, done: int = 0) -> list[int]:
    """Return the number of each microbatch of a pass by which replicas take turns, after `done` batches.

    `batches`: the microbatches of each. The numbers begin anew with every so many batches; None: never.
    """
    numbers: list[int] = []
    period_start = 0
    for batch, microbatches in enumerate(batches, start=done):
        if period and batch % period == 0:
            period_start = len(numbers)
        numbers += range(len(numbers) - period_start, len(numbers) - period_start + microbatches)
    return numbers


class SampleIndexBatches:
    """The batches of an epoch in which something counts, after the first `done`. All ranks make it.

    Each rank loads the inputs of all its microbatches ahead, and reads targets when they are needed.
    `limits`: of each length, that the model takes.
    """

    evaluated_at_once: int | None = None

    def __init__(
        self,
        samples: Sampled,
        task: Task,
        groups: ProcessGroups,
        plan: Plan,
        epoch: int = 0,
        done: int = 0,
        limits: Sequence[Limits] = (),
    ) -> None:
        self._batches = batches_that_count(samples, epoch, task, groups, plan.firsts[-1])[done:]
        self._samples, self._task, self._draw = samples, task, samples.draw(epoch)
        self._first, self._announced, self._opened, self._limits = done, 0, 0, limits
        window = plan.settings.window if plan.draft.reads_late else 1
        numbers = iter(turns([*map(len, self._batches)], window if samples.sampler else None, done))
        ranks, local_mbs = plan.placement[0], list[tuple[Split, Tensor]]()
        for batch in self._batches:
            local_ids = [ids for ids in batch if ranks[next(numbers) % len(ranks)] == groups.world.rank]
            if local_ids:
                split = samples.at(samples.size(batch))
                local_mbs += [(split, ids) for ids in local_ids]
        self._form = samples.form
        self._inputs: Iterator[Value] = iter(())
        if local_mbs:
            read = partial(_inputs, draw=self._draw)
            self._inputs = loaded(read, local_mbs, samples.workers, samples.timeout)

    def next(self, window: int | None) -> list[Size]:
        sizes = [*map(self._samples.size, self._batches[self._announced :][:window])]
        for number, size in enumerate(sizes, self._first + self._announced):
            refuse_outside(size, self._limits, f"batch {number}")
        self._announced += len(sizes)
        return sizes

    def open(self, part: WindowPart) -> WindowFeed:
        batches = self._batches[self._opened :][: len(part.sizes)]
        self._opened += len(batches)
        feed = SampleIndexFeed(part, self, batches)
        if self._form is not None:
            feed.forms = self._form.inputs, self._form.targets
        return feed

    def next_inputs(self) -> Value:
        """Return the inputs of this rank's next microbatch."""
        return next(self._inputs)

    def targets(self, ids: Tensor, size: Size) -> Value:
        """Return the targets of samples of a batch of this size."""
        return self._samples.at(size).targets(ids, self._draw)

    def weight(self, ids: Tensor, size: Size) -> float:
        """Return what the targets of samples count for."""
        task = self._task
        return float(len(ids)) if task.counts_samples else counted_for(task.weight, self.targets(ids, size))


def _inputs(microbatch: tuple[Split, Tensor], draw: Draw | None) -> Value:
    split, ids = microbatch
    return split.inputs(ids, draw)


class SampleIndexFeed(WindowFeed):
    """Reads a window's microbatches of a pass. `ids`: of the samples of each, by batch."""

    def __init__(self, part: WindowPart, source: SampleIndexBatches, ids: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(part)
        self._source, self._ids = source, ids

    def _read_inputs(self, mb: int) -> Value:
        return self._source.next_inputs()

    def _read_targets(self, batch: int) -> tuple[Value, list[float] | None]:
        ids, first = self._ids[batch], self._part.microbatches_of(batch).start
        local_ids, size = [ids[mb - first] for mb in self._part.local_targets(batch)], self._part.sizes[batch]
        weights = None if len(local_ids) == len(ids) else [self._source.weight(of, size) for of in ids]
        return self._source.targets(torch.cat(local_ids), size), weights
