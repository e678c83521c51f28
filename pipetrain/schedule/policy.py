"""fbp: a schedule whose order is decided while the pipeline runs.

Each rank chooses its next computation by the messages that have arrived and the room that sends have.
`lower` determines the messages and their order on each edge, as for every program.

It is a `Schedule` too: called as one, it is simulated at unit costs. The result is an example, to be checked
and drawn. A run is checked against the bounds, which hold for any timing, and the actions that ran must pass
`check`.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from pipetrain.schedule.actions import COMMUNICATION, SENDS, Action, Edge, Op, Program
from pipetrain.schedule.buffer_bounds import free_skips
from pipetrain.schedule.lower import Lowering
from pipetrain.schedule.programs.order import require
from pipetrain.schedule.simulate import BufferSize, Cost, unit_cost
from pipetrain.schedule.timeline import Bounds


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


class View(Protocol):
    """A rank's view of its edges, without waiting."""

    def arrived(self, receive: Action) -> bool:
        """Return whether the message of this RECV, the next of its edge, has arrived."""

    def room(self, send: Action) -> bool:
        """Return whether this SEND would not wait."""


@dataclass(frozen=True)
class ForwardBackward:
    """fbp, forward-backward parallelism: each stage runs what is ready, a backward first.

    Unlike PipeDream's fixed order, a stage runs a forward while a gradient is late, and catches up on
    backwards later, so stages with varying times do not wait for each other unless the queue between them is
    full or empty. The price is staleness and activations, both bounded by `in_flight`, the number of open
    microbatches per stage; with 1, or on one rank, this is layer_dist. One stage per rank; each steps after
    the last backward of a batch. A stage that recomputes does so while it waits for the gradient of the
    oldest microbatch; if that has arrived already, directly before its backward.
    """

    in_flight: int

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
        """Return the compute-only program of a window at unit costs, where no skip waits for room."""
        pairs = pairwise(range(ranks)) if routes is None else routes
        both = [edge for source, to in pairs for edge in ((source, to), (to, source))]
        bounds = free_skips(both, (buffer_size, buffer_size), batches * microbatches)
        size = ranks, batches, microbatches
        return play(self, *size, buffer_size=bounds, routes=routes, recompute=recompute)

    def bounds(self, stage: int, stages: int, batches: int, microbatches: int) -> Bounds:
        """Return the bounds: a forward comes after all but `in_flight - 1` of the earlier backwards."""
        ahead = min(self.in_flight, batches * microbatches) - 1 if stage < stages - 1 else 0
        staleness = min(-(-ahead // microbatches), batches - 1)
        return Bounds(ahead + 1, staleness + 1, staleness)

    def lowered(
        self,
        stage: int,
        stages: int,
        batches: Callable[[], int],
        microbatches: int,
        view: View,
        routes: Sequence[Edge] | None = None,
        recomputed: Collection[int] = (),
    ) -> Iterator[Action | Wait]:
        """Yield a stage's actions in one window with their messages, or Waits.

        An action is done when the next one is requested. `batches()` may decrease, but not below a batch that
        any stage has begun: the window then ends early. `recomputed`: the microbatches whose forward is run
        again.
        """
        lowering = Lowering([(rank,) for rank in range(stages)], routes)
        opened: deque[Action] = deque()  # forwards without a backward
        forwards, newest, latest = 0, 0, -1  # forwards, weight version, last microbatch with an R
        while opened or forwards < batches() * microbatches:
            backward = replace(opened[0], op=Op.B) if opened else None
            more = len(opened) < self.in_flight and forwards < batches() * microbatches
            forward = Action(stage, Op.F, forwards, newest) if more else None
            chosen = _first(lowering, view, backward, forward)
            if backward and latest < backward.mb in recomputed and _goes_back(chosen):
                latest = backward.mb
                yield replace(backward, op=Op.R)
                continue
            if isinstance(chosen, Wait):
                yield chosen
                continue
            yield from lowering.lowered(chosen)
            if chosen.op is Op.F:
                opened.append(chosen)
                forwards += 1
                continue
            opened.popleft()
            if (chosen.mb + 1) % microbatches == 0:
                newest += 1
                yield from lowering.lowered(Action(stage, Op.STEP, version=newest))


def _first(lowering: Lowering, view: View, *actions: Action | None) -> Action | Wait:
    """Return the first action that need not wait: F for room for its sends, F and B for their input.

    If all must wait, return a Wait until that may have changed.
    """
    receives: list[Action] = []
    sends: list[Action] = []
    for action in filter(None, actions):
        missing = [receive for receive in lowering.receives(action) if not view.arrived(receive)]
        full: list[Action] = []
        if action.op is Op.F and not missing:
            full = [send for send in lowering.sends(action) if not view.room(send)]
        if not missing and not full:
            return action
        receives += missing
        sends += full
    return Wait(tuple(receives), tuple(sends))


def _goes_back(chosen: Action | Wait) -> bool:
    """Return whether the next action is a backward, or a wait for a gradient."""
    next_ones = chosen.receives if isinstance(chosen, Wait) else (chosen,)
    return any(action.op in (Op.B, Op.RECV_B) for action in next_ones)


def play(
    policy: ForwardBackward,
    ranks: int,
    batches: int,
    microbatches: int,
    *,
    buffer_size: BufferSize = 2,
    cost: Cost = unit_cost,
    routes: Sequence[Edge] | None = None,
    recompute: Collection[int] = (),
) -> Program:
    """Return the compute-only program at these costs; messages take no time. Raises ScheduleError.

    `recompute`: the stages that recompute their forwards, if they may hold more than one microbatch open.
    """
    require("fbp", ranks=ranks, batches=batches, microbatches=microbatches, in_flight=policy.in_flight)
    edges = _Edges(buffer_size)
    deciding = []
    for rank in range(ranks):
        pipelines = policy.bounds(rank, ranks, batches, microbatches).activations > 1
        recomputed = range(batches * microbatches if rank in recompute and pipelines else 0)
        deciding.append(policy.lowered(rank, ranks, lambda: batches, microbatches, edges, routes, recomputed))
    program: Program = [[] for _ in range(ranks)]
    asleep: dict[int, Action | None] = {}  # waiting rank -> the SEND that needs room, if any
    woken: set[int] = set()  # sleeping ranks that are queued again
    clock = [(0.0, rank) for rank in range(ranks)]  # the earliest rank continues
    while clock:
        now, rank = heapq.heappop(clock)
        woken.discard(rank)
        action = asleep.pop(rank, None) or next(deciding[rank], None)
        if isinstance(action, Wait):
            asleep[rank] = None
        elif action is not None and action.op in SENDS and not edges.room(action):
            asleep[rank] = action
        elif action is not None:
            heapq.heappush(clock, (now + cost(action), rank))
            if action.op in COMMUNICATION:
                (edges.sent if action.op in SENDS else edges.received)[action.edge] += 1
                if action.peer in asleep and action.peer not in woken:
                    woken.add(action.peer)
                    heapq.heappush(clock, (now, action.peer))
            elif action.op is not Op.REDUCE:
                program[rank].append(action)
    return program


@dataclass(frozen=True, slots=True)
class _Edges:
    """What has been sent and received on each edge."""

    buffer_size: BufferSize
    sent: Counter[Edge] = field(default_factory=Counter)
    received: Counter[Edge] = field(default_factory=Counter)

    def arrived(self, receive: Action) -> bool:
        return self.sent[receive.edge] > self.received[receive.edge]

    def room(self, send: Action) -> bool:
        """Return whether unfinished sends and posted receives leave room."""
        size = self.buffer_size
        bound = size if isinstance(size, int) else size[send.edge]
        return self.sent[send.edge] - self.received[send.edge] < 2 * bound
