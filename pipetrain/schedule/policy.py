"""Policies: schedules whose order is decided while the pipeline runs.

Each rank asks the policy for its next computation; the policy sees which messages have arrived and where
there is room for a send. `lower` determines the messages and their order on each edge, as for every program,
so channels need no changes.

A policy is a `Schedule` too: called like one, it is simulated at the costs of `simulate`. That program is
checked and drawn as an example. A run is checked against the policy's bounds, which hold for any timing, and
the actions that ran must pass `check`.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

from pipetrain.schedule.actions import (
    COMMUNICATION,
    SENDS,
    Action,
    Edge,
    Op,
    Program,
)
from pipetrain.schedule.bounds import free_skips
from pipetrain.schedule.lower import Lowering
from pipetrain.schedule.programs.order import require
from pipetrain.schedule.simulate import BufferSize, Cost, unit_cost


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until one of these messages has arrived, or there is room for one of these sends."""

    receives: tuple[Action, ...] = ()
    sends: tuple[Action, ...] = ()

    @property
    def stage(self) -> int:
        return (self.receives + self.sends)[0].stage

    def __str__(self) -> str:
        return " or ".join(map(str, self.receives + self.sends))


class Bounds(NamedTuple):
    """The most that a stage holds with any timing: microbatches, weight versions, staleness in updates."""

    activations: int
    versions: int
    staleness: int


class View(Protocol):
    """A rank's view of its edges, without waiting."""

    def arrived(self, receive: Action) -> bool:
        """Return whether the message of this RECV, the next one of its edge, has arrived."""

    def room(self, send: Action) -> bool:
        """Return whether this SEND would not wait."""


class Ready:
    """What one stage could compute next, and which of it need not wait. It keeps account of the window."""

    def __init__(
        self, stage: int, batches: Callable[[], int], microbatches: int, lowering: Lowering, view: View
    ) -> None:
        self._stage = stage
        self._batches = batches
        self._microbatches = microbatches
        self._lowering = lowering
        self._view = view
        self._newest = 0
        self._forwards = 0
        self._opened: deque[Action] = deque()  # forwards without a backward

    @property
    def ended(self) -> bool:
        """Whether all backwards are done."""
        return self._forwards - self.open >= self._total

    @property
    def open(self) -> int:
        """The number of microbatches between their forward and their backward."""
        return len(self._opened)

    @property
    def forward(self) -> Action | None:
        """The next forward, which reads the newest weights."""
        if self._forwards >= self._total:
            return None
        return Action(self._stage, Op.F, self._forwards, self._newest)

    @property
    def backward(self) -> Action | None:
        """The next backward; None if its forward is still to come."""
        return replace(self._opened[0], op=Op.B) if self._opened else None

    def first(self, *actions: Action | None) -> Action | Wait:
        """Return the first of these that need not wait: an F for room for what it makes, F and B for input.

        If all must wait, return a Wait until that may have changed.
        """
        receives: list[Action] = []
        sends: list[Action] = []
        for action in filter(None, actions):
            missing = [
                receive for receive in self._lowering.receives(action) if not self._view.arrived(receive)
            ]
            full: list[Action] = []
            if action.op is Op.F and not missing:
                full = [send for send in self._lowering.sends(action) if not self._view.room(send)]
            if not missing and not full:
                return action
            receives += missing
            sends += full
        return Wait(tuple(receives), tuple(sends))

    def done(self, action: Action) -> Action | None:
        """Note that a forward or backward is done; return the STEP after the last backward of a batch."""
        if action.op is Op.F:
            self._opened.append(action)
            self._forwards += 1
            return None
        self._opened.popleft()
        if (action.mb + 1) % self._microbatches:
            return None
        self._newest += 1
        return Action(self._stage, Op.STEP, version=self._newest)

    @property
    def _total(self) -> int:
        return self._batches() * self._microbatches


class Policy(ABC):
    """Decides the next computation of a rank. One stage per rank.

    Each stage steps after the last backward of a batch. One that recomputes its forwards does so while it
    waits for the gradient of the oldest; if that is there already, directly before its backward.
    """

    @abstractmethod
    def decide(self, ready: Ready) -> Action | Wait:
        """Return the next forward or backward of a stage, or a Wait."""

    @abstractmethod
    def bounds(self, stage: int, stages: int, batches: int, microbatches: int) -> Bounds:
        """Return the bounds of a stage in such a window."""

    @abstractmethod
    def refuse(self, ranks: int, batches: int, microbatches: int) -> None:
        """Refuse a window that it cannot order. Raises ScheduleError."""

    def __call__(
        self,
        ranks: int,
        batches: int,
        microbatches: int,
        *,
        buffer_size: int = 2,
        routes: Sequence[Edge] | None = None,
        recompute: Collection[int] = (),
    ) -> Program:
        """Return the compute-only program of a window at unit costs, in which no skip waits for room."""
        pairs = pairwise(range(ranks)) if routes is None else routes
        both = [edge for source, to in pairs for edge in ((source, to), (to, source))]
        bounds = free_skips(both, buffer_size, batches * microbatches)
        size = ranks, batches, microbatches
        return play(self, *size, buffer_size=bounds, routes=routes, recompute=recompute)

    def lowered(
        self,
        stage: int,
        stages: int,
        batches: Callable[[], int],
        microbatches: int,
        view: View,
        routes: Sequence[Edge] | None = None,
        recomputes: bool = False,
    ) -> Iterator[Action | Wait]:
        """Yield a stage's actions in one window with their messages, or Waits.

        An action is done when the next one is requested. `batches()` may become smaller, but never excludes a
        batch that any stage has begun: the window then ends early.
        """
        lowering = Lowering([(rank,) for rank in range(stages)], routes)
        ready = Ready(stage, batches, microbatches, lowering, view)
        recomputed = -1  # the last microbatch with an R
        while not ready.ended:
            chosen, oldest = self.decide(ready), ready.backward
            if recomputes and oldest and recomputed < oldest.mb and _goes_back(chosen):
                recomputed = oldest.mb
                yield replace(oldest, op=Op.R)
            elif isinstance(chosen, Wait):
                yield chosen
            else:
                yield from lowering.lowered(chosen)
                if step := ready.done(chosen):
                    yield from lowering.lowered(step)


def _goes_back(chosen: Action | Wait) -> bool:
    """Return whether a stage does a backward next, or waits for a gradient."""
    if isinstance(chosen, Wait):
        return any(receive.op is Op.RECV_B for receive in chosen.receives)
    return chosen.op is Op.B


@dataclass(frozen=True)
class ForwardBackward(Policy):
    """fbp, forward-backward parallelism: each stage takes what is ready, a backward first.

    Unlike PipeDream's fixed order, a stage does a forward while a gradient is late, and catches up with
    backwards later, so stages of varying times do not wait for each other unless the queue between them is
    full or empty. The price is staleness and activations, both bounded by `in_flight`, the number of open
    microbatches per stage; with 1, or on one rank, this is layer_dist.
    """

    in_flight: int

    def decide(self, ready: Ready) -> Action | Wait:
        """Return the next backward, or else a forward where fewer than `in_flight` microbatches are open."""
        return ready.first(ready.backward, ready.forward if ready.open < self.in_flight else None)

    def bounds(self, stage: int, stages: int, batches: int, microbatches: int) -> Bounds:
        """Return the bounds: a forward comes after all but `in_flight - 1` of the backwards before it."""
        ahead = min(self.in_flight, batches * microbatches) - 1 if stage < stages - 1 else 0
        staleness = min(-(-ahead // microbatches), batches - 1)
        return Bounds(ahead + 1, staleness + 1, staleness)

    def refuse(self, ranks: int, batches: int, microbatches: int) -> None:
        require("fbp", ranks=ranks, batches=batches, microbatches=microbatches, in_flight=self.in_flight)


def play(
    policy: Policy,
    ranks: int,
    batches: int,
    microbatches: int,
    *,
    buffer_size: BufferSize = 2,
    cost: Cost = unit_cost,
    routes: Sequence[Edge] | None = None,
    recompute: Collection[int] = (),
) -> Program:
    """Return a policy's compute-only program at these costs; messages take no time. Raises ScheduleError.

    `recompute`: the stages that are to recompute their forwards, if they may hold several microbatches open.
    """
    policy.refuse(ranks, batches, microbatches)
    size = ranks, batches, microbatches
    bounds = [policy.bounds(stage, *size) for stage in range(ranks)]
    recomputing = [stage for stage in recompute if bounds[stage].activations > 1]
    return _Play(policy, *size, buffer_size, cost, routes, recomputing).run()


class _Play:
    """A simulation of the ranks, the earliest first."""

    def __init__(
        self,
        policy: Policy,
        ranks: int,
        batches: int,
        microbatches: int,
        buffer_size: BufferSize,
        cost: Cost,
        routes: Sequence[Edge] | None,
        recompute: Collection[int],
    ) -> None:
        self._buffer_size = buffer_size
        self._cost = cost
        self._sent: Counter[tuple[int, int]] = Counter()  # messages by edge
        self._taken: Counter[tuple[int, int]] = Counter()
        self._deciding = [
            policy.lowered(rank, ranks, lambda: batches, microbatches, self, routes, rank in recompute)
            for rank in range(ranks)
        ]
        self._asleep: dict[int, Action | None] = {}  # waiting rank -> the SEND that needs room, if any
        self._clock = [(0.0, rank) for rank in range(ranks)]
        self._program: Program = [[] for _ in range(ranks)]

    def arrived(self, receive: Action) -> bool:
        return self._sent[receive.edge] > self._taken[receive.edge]

    def room(self, send: Action) -> bool:
        """Return whether unfinished sends here and posted receives there leave room."""
        size = self._buffer_size
        bound = size if isinstance(size, int) else size[send.edge]
        return self._sent[send.edge] - self._taken[send.edge] < 2 * bound

    def run(self) -> Program:
        while self._clock:
            now, rank = heapq.heappop(self._clock)
            left_over = self._asleep.pop(rank, None)
            action = left_over or next(self._deciding[rank], None)
            if action is None:
                continue
            if isinstance(action, Wait):
                self._asleep[rank] = None
            elif action.op in SENDS and not self.room(action):
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
        counts = self._sent if action.op in SENDS else self._taken
        counts[action.edge] += 1
        if action.peer in self._asleep and (now, action.peer) not in self._clock:
            heapq.heappush(self._clock, (now, action.peer))
