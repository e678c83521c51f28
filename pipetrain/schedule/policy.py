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
    Schedule,
    ScheduleError,
    ranks_of,
)
from pipetrain.schedule.bounds import free_skips
from pipetrain.schedule.lower import Lowering
from pipetrain.schedule.simulate import BufferSize, Cost, unit_cost
from pipetrain.schedule.transforms import recomputing


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


@dataclass(frozen=True, slots=True)
class Outlook:
    """Tells a policy which computations of its stage would have to wait, over all its routes."""

    lowering: Lowering
    view: View

    def first_ready(self, actions: Sequence[Action]) -> Action | Wait:
        """Return the first of these that need not wait: an F for room for what it makes, F and B for input.

        If all must wait, return a Wait until that may have changed.
        """
        receives: list[Action] = []
        sends: list[Action] = []
        for action in actions:
            needed = self.lowering.receives(action)
            missing = [receive for receive in needed if not self.view.arrived(receive)]
            full: list[Action] = []
            if action.op is Op.F and not missing:
                full = [send for send in self.lowering.sends(action) if not self.view.room(send)]
            if not missing and not full:
                return action
            receives += missing
            sends += full
        return Wait(tuple(receives), tuple(sends))


class Policy(ABC):
    """Decides the next computation of a rank. One stage per rank."""

    @abstractmethod
    def decide(
        self, stage: int, stages: int, batches: Callable[[], int], microbatches: int, outlook: Outlook
    ) -> Iterator[Action | Wait]:
        """Yield a stage's compute actions and STEPs in one window, or Waits.

        An action and its messages are done when the next one is requested. `batches()` may become smaller,
        but never excludes a batch that any stage has begun: the window then ends early.
        """

    @abstractmethod
    def bounds(self, stage: int, stages: int, batches: int, microbatches: int) -> Bounds:
        """Return the bounds of a stage in such a window."""

    @abstractmethod
    def refuse(self, ranks: int, batches: int, microbatches: int) -> None: ...

    def recomputes(self, stage: int, stages: int, batches: int, microbatches: int) -> bool:
        """Return whether each microbatch of a stage has an R in a window that begins with so many batches."""
        return False

    def __call__(self, ranks: int, batches: int, microbatches: int) -> Program:
        """Return the compute-only program of a window at unit costs."""
        return play(self, ranks, batches, microbatches)

    def lowered(
        self,
        stage: int,
        stages: int,
        batches: Callable[[], int],
        microbatches: int,
        view: View,
        routes: Sequence[Edge] | None = None,
    ) -> Iterator[Action | Wait]:
        """Yield the actions of `decide` with their messages."""
        lowering = Lowering([(rank,) for rank in range(stages)], routes)
        for decided in self.decide(stage, stages, batches, microbatches, Outlook(lowering, view)):
            if isinstance(decided, Wait):
                yield decided
            else:
                yield from lowering.lowered(decided)


@dataclass(frozen=True)
class ForwardBackward(Policy):
    """fbp, forward-backward parallelism: each stage takes what is ready, a backward first.

    Unlike PipeDream's fixed order, a stage does a forward while a gradient is late, and catches up with
    backwards later, so stages of varying times do not wait for each other unless the queue between them is
    full or empty. The price is staleness and activations, both bounded by `in_flight`, the number of open
    microbatches per stage; with 1, or on one rank, this is layer_dist.
    """

    in_flight: int

    def decide(
        self, stage: int, stages: int, batches: Callable[[], int], microbatches: int, outlook: Outlook
    ) -> Iterator[Action | Wait]:
        """Yield actions; a forward reads the newest weights, and its backward the same."""
        forwards, backwards, newest = 0, 0, 0
        reads: deque[int] = deque()  # versions read by the open microbatches
        while backwards < (total := batches() * microbatches):
            backward = [Action(stage, Op.B, backwards, reads[0])] if reads else []
            may_go_ahead = forwards < total and len(reads) < self.in_flight
            forward = [Action(stage, Op.F, forwards, newest)] if may_go_ahead else []
            chosen = outlook.first_ready(backward + forward)
            yield chosen
            if chosen in backward:
                reads.popleft()
                backwards += 1
                if backwards % microbatches == 0:
                    newest += 1
                    yield Action(stage, Op.STEP, version=newest)
            elif chosen in forward:
                reads.append(newest)
                forwards += 1

    def bounds(self, stage: int, stages: int, batches: int, microbatches: int) -> Bounds:
        """Return the bounds: a forward comes after all but `in_flight - 1` of the backwards before it."""
        ahead = min(self.in_flight, batches * microbatches) - 1 if stage < stages - 1 else 0
        staleness = min(-(-ahead // microbatches), batches - 1)
        return Bounds(ahead + 1, staleness + 1, staleness)

    def refuse(self, ranks: int, batches: int, microbatches: int) -> None:
        counts = {"ranks": ranks, "batches": batches, "microbatches": microbatches}
        for name, count in {**counts, "in_flight": self.in_flight}.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ScheduleError(f"schedule fbp needs {name} >= 1; got {name}={count}")


@dataclass(frozen=True)
class Recomputing(Policy):
    """A policy some of whose stages recompute their forwards, see transforms.recomputing.

    `chosen`: number of stages -> those that do, if they may hold more than one microbatch open. The oldest is
    recomputed while its gradient is awaited; if that is there already, directly before its backward.
    """

    policy: Policy
    chosen: Callable[[int], Collection[int]]

    def decide(
        self, stage: int, stages: int, batches: Callable[[], int], microbatches: int, outlook: Outlook
    ) -> Iterator[Action | Wait]:
        recomputes = self.recomputes(stage, stages, batches(), microbatches)
        opened: deque[Action] = deque()  # forwards without a backward
        done = -1  # the last microbatch that was recomputed
        for decided in self.policy.decide(stage, stages, batches, microbatches, outlook):
            if isinstance(decided, Wait):
                awaits = any(receive.op is Op.RECV_B for receive in decided.receives)
                if recomputes and awaits and opened and done < opened[0].mb:
                    done = opened[0].mb
                    yield replace(opened[0], op=Op.R)
                    continue  # decide anew
            elif decided.op is Op.F:
                opened.append(decided)
            elif decided.op in (Op.B, Op.I):
                forward = opened.popleft()
                if recomputes and done < forward.mb:
                    done = forward.mb
                    yield replace(forward, op=Op.R)
            yield decided

    def bounds(self, stage: int, stages: int, batches: int, microbatches: int) -> Bounds:
        return self.policy.bounds(stage, stages, batches, microbatches)

    def refuse(self, ranks: int, batches: int, microbatches: int) -> None:
        self.policy.refuse(ranks, batches, microbatches)

    def recomputes(self, stage: int, stages: int, batches: int, microbatches: int) -> bool:
        several = self.bounds(stage, stages, batches, microbatches).activations > 1
        return several and stage in self.chosen(stages)


def with_recomputation(schedule: Schedule, chosen: Callable[[int], Collection[int]]) -> Schedule:
    """Return a schedule whose `chosen`(number of stages) stages recompute their forwards."""
    return Recomputing(schedule, chosen) if isinstance(schedule, Policy) else Recomputed(schedule, chosen)


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A schedule with a fixed order, some of whose stages recompute their forwards."""

    schedule: Schedule
    chosen: Callable[[int], Collection[int]]

    def __call__(self, ranks: int, batches: int, microbatches: int) -> Program:
        program = self.schedule(ranks, batches, microbatches)
        return recomputing(program, self.chosen(len(ranks_of(program))))


def play(
    policy: Policy,
    ranks: int,
    batches: int,
    microbatches: int,
    *,
    buffer_size: BufferSize = 2,
    cost: Cost = unit_cost,
    routes: Sequence[Edge] | None = None,
) -> Program:
    """Return a policy's compute-only program at these costs; messages take no time. Raises ScheduleError."""
    policy.refuse(ranks, batches, microbatches)
    return _Play(policy, ranks, batches, microbatches, buffer_size, cost, routes).run()


def compute_program(
    schedule: Schedule,
    ranks: int,
    batches: int,
    microbatches: int,
    buffer_size: int,
    routes: Sequence[Edge] | None = None,
) -> Program:
    """Return a schedule's compute-only program; for a policy the one at unit costs and with free skips."""
    if isinstance(schedule, Policy):
        pairs = pairwise(range(ranks)) if routes is None else routes
        both = [edge for source, to in pairs for edge in ((source, to), (to, source))]
        bounds = free_skips(both, buffer_size, batches * microbatches)
        return play(schedule, ranks, batches, microbatches, buffer_size=bounds, routes=routes)
    return [list(actions) for actions in schedule(ranks, batches, microbatches)]


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
    ) -> None:
        self._buffer_size = buffer_size
        self._cost = cost
        self._sent: Counter[tuple[int, int]] = Counter()  # messages by edge
        self._taken: Counter[tuple[int, int]] = Counter()
        self._deciding = [
            policy.lowered(rank, ranks, lambda: batches, microbatches, self, routes) for rank in range(ranks)
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
