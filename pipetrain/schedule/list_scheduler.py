"""A list scheduler: simulates all ranks in time, and gives each the best work that is ready.

Forwards, input gradients and weight gradients of a stage ascend; batches flush, so a forward waits for the
STEP of the batch before. A rank holds no more microbatches than its limit, and no rank sends more messages
than the channel has room for. Which ready work is best depends on the costs, so a rule decides, and several
rules may be tried: one pass takes a few microseconds per action.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from pipetrain.schedule.actions import Action, Op
from pipetrain.schedule.programs.order import Work
from pipetrain.schedule.simulate import Cost

ByStage = tuple[float, ...]  # by stage


@dataclass(frozen=True)
class WorkTimes:
    """The times of each stage; `ahead` and `back`: of a message to the next and to the previous stage.

    Stage 0 sends no input gradient, so its W, `w[0]`, is the whole backward.
    """

    f: ByStage
    i: ByStage
    w: ByStage
    step: ByStage
    ahead: ByStage
    back: ByStage

    @classmethod
    def from_cost(cls, cost: Cost, where: Sequence[int]) -> WorkTimes:
        """Return the times of stages on the ranks `where`; stages on one rank exchange no messages."""
        stages = range(len(where))
        f, i, w, step, ahead, back = (
            [cost(Action(stage, op)) for stage in stages]
            for op in (Op.F, Op.I, Op.W, Op.STEP, Op.SEND_F, Op.SEND_B)
        )
        for stage in stages:
            if not i[stage] and not w[stage]:  # where only whole backwards were measured
                i[stage] = w[stage] = cost(Action(stage, Op.B)) / 2
            if stage == 0 or where[stage - 1] == where[stage]:
                ahead[stage - 1] = back[stage] = 0.0
        i[0], w[0] = 0.0, i[0] + w[0]
        return cls(*map(tuple, (f, i, w, step, ahead, back)))

    def cost(self, action: Action) -> float:
        """Return the time of an action, for `simulate`."""
        times = {Op.F: self.f, Op.I: self.i, Op.W: self.w, Op.STEP: self.step}
        times |= {Op.SEND_F: self.ahead, Op.SEND_B: self.back}
        return times[action.op][action.stage] if action.op in times else 0.0

    def busy(self, where: Sequence[int]) -> list[float]:
        """Return the time that each rank works on a microbatch."""
        sums = [0.0] * (max(where) + 1)
        for rank, *parts in zip(where, self.f, self.i, self.w, strict=True):
            sums[rank] += sum(parts)
        return sums


@dataclass(frozen=True)
class Preference:
    """Which ready work a rank chooses.

    `order`: (op, position) by preference, where position 0 is the rank's first stage; W comes after these.
    `patience`: a rank waits for an F or I instead of starting a W, if it comes within this part of the W.
    `depth`: limits the microbatches between F and I of a stage, as a multiple of those that an unblocked way
    through the later stages and back needs when all ranks are as busy as the busiest; None: no limit.
    """

    order: tuple[tuple[Op, int], ...]
    patience: float = 0.0
    depth: float | None = None


@dataclass
class ListScheduler:
    """Simulates the ranks.

    `where`: the rank of each stage; `total`: microbatches of the window; `limit`: those that a rank may hold
    over all its stages, more than its stages less one; `room`: unreceived messages that each edge may have.
    """

    where: Sequence[int]
    total: int
    microbatches: int
    times: WorkTimes
    limit: float
    rule: Preference
    room: int

    def __post_init__(self) -> None:
        stages, ranks = range(len(self.where)), range(max(self.where) + 1)
        self.stages_of = [[stage for stage in stages if self.where[stage] == rank] for rank in ranks]
        self.preferred = [
            [(op, stages_of_rank[at]) for op, at in self.rule.order if at < len(stages_of_rank)]
            for stages_of_rank in self.stages_of
        ]
        self.most = self._depths()
        self.done = {op: [0 for _ in stages] for op in (Op.F, Op.I, Op.W)}
        # When each input arrives, as far as it is known.
        self.comes = {op: [[inf] * self.total for _ in stages] for op in (Op.F, Op.I)}
        self.comes[Op.F][0] = [0.0] * self.total
        self.free = [0.0 for _ in ranks]
        self.open = [0 for _ in ranks]
        self.orders: list[list[Work]] = [[] for _ in ranks]
        self.events = [(0.0, rank) for rank in ranks]

    def _depths(self) -> list[float]:
        """Return, by stage, the most microbatches between their F and I."""
        times, where = self.times, self.where
        if self.rule.depth is None:
            return [inf for _ in where]
        busy = max(times.busy(where)) or 1.0
        most: list[float] = []
        way = 0.0
        for stage in reversed(range(len(where))):
            way += times.f[stage] + (times.i[stage] if stage else times.w[stage])
            most.append(max(1.0, ceil(self.rule.depth * way / busy - 1e-9)))
            way += times.ahead[stage - 1] + times.back[stage] if stage else 0.0
        return most[::-1]

    def run(self) -> tuple[list[list[Work]], float]:
        """Return the order of each rank's work, and the makespan."""
        while self.events:
            now, rank = heapq.heappop(self.events)
            if now < self.free[rank]:
                continue
            chosen = self._chosen(rank, now + 1e-9 * now)
            if isinstance(chosen, tuple):
                self._do(rank, now, *chosen)
            elif chosen < inf:
                heapq.heappush(self.events, (chosen, rank))
        return self.orders, max(self.free)

    def _chosen(self, rank: int, now: float) -> tuple[Op, int] | float:
        """Return what the rank does now, or else until when it waits."""
        soonest = inf
        for op, stage in self.preferred[rank]:
            comes = self._forward(rank, stage) if op is Op.F else self._input_gradient(stage)
            if comes <= now:
                return op, stage
            soonest = min(soonest, comes)
        ready = [stage for stage in self.stages_of[rank] if self._weights(stage) <= now]
        if ready:
            stage = min(ready, key=lambda stage: (self.done[Op.W][stage], -stage))
            if soonest - now >= self.rule.patience * self.times.w[stage]:
                return Op.W, stage
        return soonest

    # These return when the next work of a stage could begin, as far as it is known.

    def _forward(self, rank: int, stage: int) -> float:
        mb = self.done[Op.F][stage]
        if mb == self.total or mb - self.done[Op.I][stage] >= self.most[stage]:
            return inf
        if self.done[Op.W][stage] < mb - mb % self.microbatches:  # the batch before has not made its step
            return inf
        above = sum(mb >= self.done[Op.F][other] for other in self.stages_of[rank] if other > stage)
        if self.open[rank] + above >= self.limit:  # those stages need a place for this microbatch too
            return inf
        apart = stage + 1 < len(self.where) and self.where[stage + 1] != rank
        if apart and mb - self.done[Op.F][stage + 1] >= self.room:
            return inf
        return self.comes[Op.F][stage][mb]

    def _input_gradient(self, stage: int) -> float:
        mb = self.done[Op.I][stage]
        return self.comes[Op.I][stage][mb] if stage and mb < self.done[Op.F][stage] else inf

    def _weights(self, stage: int) -> float:
        """Of stage 0: when the whole backward could begin."""
        mb = self.done[Op.W][stage]
        if stage:
            return 0.0 if mb < self.done[Op.I][stage] else inf
        return self.comes[Op.I][0][mb] if mb < self.done[Op.F][0] else inf

    def _do(self, rank: int, now: float, op: Op, stage: int) -> None:
        mb, times = self.done[op][stage], self.times
        self.done[op][stage] += 1
        if op is Op.W and stage == 0:
            self.done[Op.I][stage] += 1
            self.orders[rank].append((Op.I, stage, mb))
        self.orders[rank].append((op, stage, mb))
        if op is Op.F:
            end = now + times.f[stage]
            self.open[rank] += 1
            if stage + 1 < len(self.where):
                self._send(Op.F, stage + 1, mb, end + times.ahead[stage])
            else:
                self.comes[Op.I][stage][mb] = end
            if stage:  # there is room for another message
                heapq.heappush(self.events, (now, self.where[stage - 1]))
        elif op is Op.I:
            end = now + times.i[stage]
            self._send(Op.I, stage - 1, mb, end + times.back[stage])
        else:
            end = now + times.w[stage]
            self.open[rank] -= 1
            end += 0.0 if (mb + 1) % self.microbatches else times.step[stage]
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))

    def _send(self, op: Op, stage: int, mb: int, at: float) -> None:
        self.comes[op][stage][mb] = at
        heapq.heappush(self.events, (at, self.where[stage]))
