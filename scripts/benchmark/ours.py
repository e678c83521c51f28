"""pipetrain as a contestant: the real engine over the real channel, driven as the trainer drives it.

What is left out is what the others have not either: reading and augmenting images, evaluation, records.
"""

from __future__ import annotations

import time

from torch import Tensor

from benchmark.tasks import Job
from pipetrain.runtime.channel import Channel
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.stage import Target
from pipetrain.schedule.timeline import StageStats
from pipetrain.training.assembly import make_engine, make_stages


class BatchFeed:
    """The same batch again and again, from memory."""

    def __init__(self, samples: Tensor, labels: Tensor, microbatches: int) -> None:
        self._inputs = samples.chunk(microbatches)
        self._labels = labels.chunk(microbatches)

    def size(self, mb: int) -> int:
        """See engine.Feed."""
        return len(self._inputs[mb % len(self._inputs)])

    def input(self, mb: int) -> Tensor:
        """See engine.Feed."""
        return self._inputs[mb % len(self._inputs)]

    def target(self, mb: int) -> Target:
        """See engine.Feed."""
        return Target(self._labels[mb % len(self._labels)], 1 / len(self._labels))

    def prepare(self) -> None:
        """There is nothing to make."""


class Ours:
    """A schedule of pipetrain's. A turn is so many batches, in whole windows, and one window at least."""

    def __init__(
        self,
        name: str,
        job: Job,
        mesh: Mesh,
        batches: int = 1,
        channel: Channel | None = None,
        clock: Clock | None = None,
    ) -> None:
        plan = job.plan
        window = max(plan.windows)
        self.name = name
        self.microbatches = job.microbatches
        self._windows = max(1, batches // window)
        self.batches = self._windows * window
        self.plan = plan
        self.actions = plan.windows[window].program[mesh.world.rank]  # where a policy decides: as many
        place = mesh.device
        self._feed = BatchFeed(job.samples.to(place), job.labels.to(place), job.microbatches)
        self._full_after = plan.stages if window > 2 * plan.stages else None  # updates; None: never full
        self._updates: list[float] = []
        self._rank = mesh.world.rank
        self._last = plan.placement[-1] == self._rank
        stages = make_stages(plan, job.model, job.optimizer, plan.settings.rate(1), mesh)
        self._engine = make_engine(plan, stages, mesh, channel, clock)

    @property
    def records(self) -> dict[int, StageStats]:
        """What each stage of this rank has done."""
        return self._engine.stats

    def run(self) -> float | None:
        """See Contestant.run."""
        self._updates.clear()
        for _ in range(self._windows):
            order = self.plan.order(max(self.plan.windows), self._rank)
            self._engine.train(order, self._feed, self.microbatches, self._count)
        if not self._last or self._full_after is None:
            return None
        full = self._updates[self._full_after :]
        return (full[-1] - full[0]) / (len(full) - 1)

    def _count(self, stage: int) -> None:
        if stage == self.plan.stages - 1:
            self._updates.append(time.perf_counter())
