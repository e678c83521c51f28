"""Schedules whose order is decided while the pipeline runs: a policy, beside the static programs.

A policy is asked by each rank, again and again, what to compute next, and sees no more than that rank does:
which messages have arrived, and where there is room for another. What messages travel is `lower`'s matter, as
for every program, and so is their order on each edge: the channels need to know nothing of a policy.

A policy is a `Schedule` too: called like one, it is played on paper, at the costs that `simulate` takes. That
program is checked and drawn like every other, as an example of what may happen. What is held against the run
are the policy's bounds, which no timing can exceed; and what ran is a program again, which must pass `check`.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pipetrain.schedule.actions import (
    COMMUNICATION,
    SENDS,
    Action,
    Op,
    Program,
    Schedule,
    ScheduleError,
)
from pipetrain.schedule.lower import Wiring
from pipetrain.schedule.simulate import Cost, unit_cost


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


class Bounds(NamedTuple):
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
    """Decides what a rank computes next. One stage a rank."""

    @abstractmethod
    def decide(
        self, stage: int, stages: int, batches: Callable[[], int], microbatches: int, view: View
    ) -> Iterator[Action | Wait]:
        """Give a stage's computing actions and STEPs in one window, one by one; or what to wait for.

        An action has been done, with its messages, when the next one is asked for. `batches()` may fall
        meanwhile, though never to a batch that any stage has begun: the window then ends earlier.
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

    def lowered(
        self, stage: int, stages: int, batches: Callable[[], int], microbatches: int, view: View
    ) -> Iterator[Action | Wait]:
        """Give what `decide` does, with the messages that belong to it."""
        wiring = Wiring([(rank,) for rank in range(stages)])
        for decided in self.decide(stage, stages, batches, microbatches, view):
            if isinstance(decided, Wait):
                yield decided
            else:
                yield from wiring.lowered(decided)


@dataclass(frozen=True)
class ForwardBackward(Policy):
    """fbp, forward-backward parallelism: each stage takes what is ready, a backward first.

    What PipeDream's order fixes ahead is here left to the timing: a stage goes on with a forward while a
    gradient is late, and catches up with backwards when they come, so stages whose times vary do not wait for
    each other as long as the queue between them is neither full nor empty. The price is staleness and
    activations held. `in_flight`, the microbatches that a stage holds open, bounds both; with 1, or on one
    rank, this is layer_dist.
    """

    in_flight: int

    def decide(
        self, stage: int, stages: int, batches: Callable[[], int], microbatches: int, view: View
    ) -> Iterator[Action | Wait]:
        """Let a forward read the newest weights, and its backward the same."""
        first, last = stage == 0, stage == stages - 1
        forwards, backwards, newest = 0, 0, 0
        reads: deque[int] = deque()  # of the open microbatches
        while backwards < (total := batches() * microbatches):
            gradient = Action(stage, Op.RECV_B, backwards)
            activation, onward = Action(stage, Op.RECV_F, forwards), Action(stage, Op.SEND_F, forwards)
            may_go_ahead = forwards < total and len(reads) < self.in_flight
            here = may_go_ahead and (first or view.arrived(activation))  # asked once: it may change
            if reads and (last or view.arrived(gradient)):
                yield Action(stage, Op.B, backwards, reads.popleft())
                backwards += 1
                if backwards % microbatches == 0:
                    newest += 1
                    yield Action(stage, Op.STEP, version=newest)
            elif here and (last or view.room(onward)):
                reads.append(newest)
                yield Action(stage, Op.F, forwards, newest)
                forwards += 1
            else:
                receives = [gradient] if reads else []
                if may_go_ahead and not here:
                    receives.append(activation)
                yield Wait(tuple(receives), (onward,) if here else ())

    def bounds(self, stage: int, stages: int, batches: int, microbatches: int) -> Bounds:
        """Return what follows from it: a forward follows all but `in_flight - 1` of the backwards before."""
        ahead = min(self.in_flight, batches * microbatches) - 1 if stage < stages - 1 else 0
        staleness = min(-(-ahead // microbatches), batches - 1)
        return Bounds(ahead + 1, staleness + 1, staleness)

    def refuse(self, ranks: int, batches: int, microbatches: int) -> None:
        """Raise ScheduleError for a count below 1."""
        counts = {"ranks": ranks, "batches": batches, "microbatches": microbatches}
        for name, count in {**counts, "in_flight": self.in_flight}.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ScheduleError(f"schedule fbp needs {name} >= 1; got {name}={count}")


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
        self._sent: Counter[tuple[int, int]] = Counter()  # by edge
        self._taken: Counter[tuple[int, int]] = Counter()
        self._deciding = [
            policy.lowered(rank, ranks, lambda: batches, microbatches, self) for rank in range(ranks)
        ]
        self._asleep: dict[int, Action | None] = {}  # and the SEND that waits for room, if that is why
        self._clock = [(0.0, rank) for rank in range(ranks)]
        self._program: Program = [[] for _ in range(ranks)]

    def arrived(self, receive: Action) -> bool:
        return self._sent[receive.edge] > self._taken[receive.edge]

    def room(self, send: Action) -> bool:
        """So many may be left unfinished here, and so many receives are posted there."""
        return self._sent[send.edge] - self._taken[send.edge] < 2 * self._bound

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
        for beside in (rank - 1, rank + 1):
            if beside in self._asleep and (now, beside) not in self._clock:
                heapq.heappush(self._clock, (now, beside))
