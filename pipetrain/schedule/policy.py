"""Schedules whose order is decided while the pipeline runs: a policy, beside the static programs.

A policy is asked by each rank, again and again, what to do next, and sees no more than that rank does: which
messages have arrived, and where there is room for another. What messages travel, and in which order on each
edge, is fixed all the same, so the channels need to know nothing of it.

A policy is a `Schedule` too: called like one, it is played through on paper, at the costs that `simulate`
takes. That program is checked and drawn like every other, as an example of what may happen. What is held
against the run are the policy's bounds, which no timing can exceed; and what ran is a program again, which
must pass `check`.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from pipetrain.schedule.actions import COMMUNICATION, Action, Op, Program, Schedule
from pipetrain.schedule.simulate import Cost, unit_cost

MESSAGE = {Op.SEND_F: (Op.SEND_F, 0), Op.RECV_F: (Op.SEND_F, -1), Op.SEND_B: (Op.SEND_B, 0)}
MESSAGE |= {Op.RECV_B: (Op.SEND_B, 1)}  # an edge as its SEND's op and stage: that op, and the stage from here


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be done before one of these has its message, or room for it."""

    receives: tuple[Action, ...] = ()
    sends: tuple[Action, ...] = ()

    @property
    def stage(self) -> int:
        """The stage that waits."""
        return (self.receives + self.sends)[0].stage

    def __str__(self) -> str:
        return " or ".join(map(str, self.receives + self.sends))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a stage holds at most, whatever the timing: in microbatches, weight versions, and updates."""

    activations: int
    versions: int
    staleness: int


class View(Protocol):
    """What a rank sees of its edges without waiting."""

    def arrived(self, receive: Action) -> bool:
        """Whether the next message of an edge, which this RECV would take, is here."""

    def room(self, send: Action) -> bool:
        """Whether this SEND would not have to wait."""


class Policy(ABC):
    """Decides what a rank does next. One stage a rank."""

    @abstractmethod
    def decide(
        self, stage: int, stages: int, batches: Callable[[], int], microbatches: int, view: View
    ) -> Iterator[Action | Wait]:
        """Give a stage's actions in one window, communication too, one by one; or what to wait for.

        An action has been done when the next one is asked for. `batches()` may fall meanwhile, though never
        to a batch that any stage has begun: the window then ends earlier.
        """

    @abstractmethod
    def bounds(self, stage: int, stages: int, batches: int, microbatches: int) -> Bounds:
        """Return what a stage holds at most in such a window."""

    @abstractmethod
    def refuse(self, ranks: int, batches: int, microbatches: int) -> None:
        """Raise ScheduleError for settings that cannot work."""

    def __call__(self, ranks: int, batches: int, microbatches: int) -> Program:
        """Play a window on paper: the compute-only program that the policy decides on at unit costs."""
        return play(self, ranks, batches, microbatches)


def play(
    policy: Policy,
    ranks: int,
    batches: int,
    microbatches: int,
    *,
    buffer_size: int = 2,
    cost: Cost = unit_cost,
) -> Program:
    """Return the compute-only program that a policy decides on if actions take what `cost` says.

    `buffer_size` bounds each edge as in `simulate`; messages travel in no time. Raises ScheduleError.
    """
    policy.refuse(ranks, batches, microbatches)
    return _Play(policy, ranks, batches, microbatches, buffer_size, cost).run()


def compute_program(
    schedule: Schedule, ranks: int, batches: int, microbatches: int, buffer_size: int
) -> Program:
    """Return what a schedule computes; of a policy, as it decides at even times over so large buffers."""
    if isinstance(schedule, Policy):
        return play(schedule, ranks, batches, microbatches, buffer_size=buffer_size)
    return [list(actions) for actions in schedule(ranks, batches, microbatches)]


class _Play:
    """The ranks in a time of their own, the earliest first."""

    def __init__(
        self, policy: Policy, ranks: int, batches: int, microbatches: int, buffer_size: int, cost: Cost
    ) -> None:
        self._bound = buffer_size
        self._cost = cost
        self._sent: Counter[tuple[Op, int]] = Counter()
        self._taken: Counter[tuple[Op, int]] = Counter()
        self._deciding = [
            policy.decide(rank, ranks, lambda: batches, microbatches, self) for rank in range(ranks)
        ]
        self._asleep: dict[int, Action | None] = {}  # and the SEND that waits for room, if that is why
        self._clock = [(0.0, rank) for rank in range(ranks)]
        self._program: Program = [[] for _ in range(ranks)]

    def arrived(self, receive: Action) -> bool:
        """See View."""
        return self._sent[_edge(receive)] > self._taken[_edge(receive)]

    def room(self, send: Action) -> bool:
        """See View: so many may be left unfinished here, and so many receives are posted there."""
        return self._sent[_edge(send)] - self._taken[_edge(send)] < 2 * self._bound

    def run(self) -> Program:
        """Return each rank's computing actions."""
        while self._clock:
            now, rank = heapq.heappop(self._clock)
            left_over = self._asleep.pop(rank, None)
            action = left_over or next(self._deciding[rank], None)
            if action is None:
                continue
            if isinstance(action, Wait):
                self._asleep[rank] = None
            elif action.op in (Op.SEND_F, Op.SEND_B) and not self.room(action):
                self._asleep[rank] = action
            else:
                heapq.heappush(self._clock, (now + self._cost(action), rank))
                self._do(action, rank, now)
        return self._program

    def _do(self, action: Action, rank: int, now: float) -> None:
        if action.op not in COMMUNICATION:
            if action.op is not Op.REDUCE:
                self._program[rank].append(action)
            return
        counts = self._sent if action.op in (Op.SEND_F, Op.SEND_B) else self._taken
        counts[_edge(action)] += 1
        for neighbour in (rank - 1, rank + 1):
            if neighbour in self._asleep and (now, neighbour) not in self._clock:
                heapq.heappush(self._clock, (now, neighbour))


def _edge(action: Action) -> tuple[Op, int]:
    op, offset = MESSAGE[action.op]
    return op, action.stage + offset
