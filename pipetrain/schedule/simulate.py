"""What a lowered program takes: time, bubble, activations and weight versions held, staleness; or deadlock.

The channels here are those that the runtime enforces, bound for bound, so a program that ends here cannot
hang there for want of buffers. Every start is a maximum of times already known, so ranks may be advanced in
any order: each runs until it must wait, and only the message it waits for wakes it. That is linear in the
number of actions, where stepping all ranks through time is not.

What is held (activations, versions) depends on each rank's own order alone, not on time, and is counted
apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from pipetrain.schedule.actions import COMMUNICATION, Action, Op, Program, ScheduleError, last_uses, placement
from pipetrain.schedule.lower import edges

Cost = Callable[[Action], float]
Span = tuple[Action, float, float]

_UNITS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}
_SENDS = frozenset({Op.SEND_F, Op.SEND_B})


class Deadlock(ScheduleError):
    """Ranks wait for each other for good. The message names each, its action and what it waits for."""


def unit_cost(action: Action) -> float:
    """Price a forward at 1, a backward at 2 (its halves at 1), all else at nothing."""
    return _UNITS.get(action.op, 0.0)


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a program takes. Lists are by rank, or by stage where a stage holds it; times in units of cost."""

    makespan: float
    spans: list[list[Span]]  # by rank: (action, start, end); a SEND's or RECV's is the time it held its rank
    busy: list[float]  # by rank: time in actions other than communication
    activations: list[int]  # by stage: peak of microbatches between their F and the end of their B or W
    versions: list[int]  # by stage: peak of weight versions held: the newest, and older ones still to be read
    staleness: list[int]  # by stage: updates that the most late gradient is late by

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute."""
        return 1 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    @property
    def bubble_per_rank(self) -> list[float]:
        """The same of each rank."""
        return [1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy]


def simulate(
    program: Program, microbatches: int, *, buffer_size: int = 2, cost: Cost = unit_cost
) -> Simulation:
    """Run a lowered, checked program (or lowered `forward_only`) on paper.

    `buffer_size` bounds each edge at both ends: receives posted ahead, and sends not yet arrived. `cost`
    gives the time an action takes its rank; of a SEND, the time its message travels while the sender goes on.
    Raises Deadlock.
    """
    if buffer_size < 1:
        raise ScheduleError(f"simulate needs buffer_size >= 1; got buffer_size={buffer_size}")
    spans = _Timeline(program, buffer_size, cost).run()
    held: dict[int, _Holding] = {}
    for actions in program:
        held |= _holdings(actions, microbatches)
    return Simulation(
        makespan=max((rank[-1][2] for rank in spans if rank), default=0.0),
        spans=spans,
        busy=[sum(end - start for a, start, end in rank if a.op not in COMMUNICATION) for rank in spans],
        activations=[held[stage].activations for stage in range(len(held))],
        versions=[held[stage].versions for stage in range(len(held))],
        staleness=[held[stage].staleness for stage in range(len(held))],
    )


@dataclass(slots=True)
class _Edge:
    """A bounded, ordered channel. Message k leaves when SEND k is issued and receive k is posted.

    Receive k is posted at the start for k < bound, else when RECV k - bound is done. SEND k holds its rank
    until message k - bound has arrived.
    """

    sender: int
    receiver: int
    bound: int
    issued: list[float] = field(default_factory=list)
    travel: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)

    def send_free(self, now: float) -> float | None:
        """Return when the next SEND may be issued; None while that is not known."""
        index = len(self.issued) - self.bound
        if index < 0:
            return now
        return max(now, self.arrived[index]) if index < len(self.arrived) else None

    def next_arrival(self, now: float) -> float | None:
        """Return when the next RECV has its message; None while that is not known."""
        index = len(self.received)
        return max(now, self.arrived[index]) if index < len(self.arrived) else None

    def settle(self) -> bool:
        """Let the next message go if it can; one event frees one message at most."""
        index = len(self.arrived)
        posted_by = index - self.bound
        if index >= len(self.issued) or posted_by >= len(self.received):
            return False
        posted = self.received[posted_by] if posted_by >= 0 else 0.0
        self.arrived.append(max(self.issued[index], posted) + self.travel[index])
        return True


class _Timeline:
    """When each action starts and ends."""

    def __init__(self, program: Program, buffer_size: int, cost: Cost) -> None:
        rank_of = placement(program)
        self._program = program
        self._bound = buffer_size
        self._cost = cost
        self._edges: dict[tuple[int, Op], _Edge] = {}  # by the stage and the op that use it
        for source, target in edges(program):
            send, recv = (Op.SEND_F, Op.RECV_F) if source < target else (Op.SEND_B, Op.RECV_B)
            edge = _Edge(rank_of[source], rank_of[target], buffer_size)
            self._edges[source, send] = self._edges[target, recv] = edge
        # What an action needs of a neighbour stage on its own rank: the op and the stage to count.
        self._local: dict[tuple[int, Op], tuple[int, Op]] = {}
        for stage, (rank, next_rank) in enumerate(pairwise(rank_of)):
            if rank == next_rank:
                self._local[stage + 1, Op.F] = (stage, Op.F)
                self._local[stage, Op.B] = self._local[stage, Op.I] = (stage + 1, Op.B)
        self._done: dict[tuple[int, Op], int] = defaultdict(int)
        self._waiting: list[_Edge | None] = [None] * len(program)
        self._ready = list(range(len(program)))
        self.spans: list[list[Span]] = [[] for _ in program]

    def run(self) -> list[list[Span]]:
        while self._ready:
            self._advance(self._ready.pop())
        if any(len(spans) < len(actions) for spans, actions in zip(self.spans, self._program, strict=True)):
            blocked = "; ".join(self._blocked())
            raise Deadlock(f"deadlock with buffer_size={self._bound}: {blocked}")
        return self.spans

    def _advance(self, rank: int) -> None:
        """Run a rank until it ends or must wait."""
        actions, spans = self._program[rank], self.spans[rank]
        now = spans[-1][2] if spans else 0.0
        for position in range(len(spans), len(actions)):
            action = actions[position]
            exchanging = action.op in COMMUNICATION
            end = self._exchange(rank, action, now) if exchanging else self._compute(action, now)
            if end is None:
                return
            spans.append((action, now, end))
            now = end

    def _compute(self, action: Action, now: float) -> float | None:
        if self._local:
            needed = self._local.get((action.stage, action.op))
            if needed is not None and self._done[needed] <= action.mb:
                return None
            self._done[action.stage, Op.B if action.op is Op.I else action.op] += 1
        return now + self._cost(action)

    def _exchange(self, rank: int, action: Action, now: float) -> float | None:
        edge = self._edges[action.stage, action.op]
        if action.op in _SENDS:
            other, end = edge.receiver, edge.send_free(now)
            if end is not None:
                edge.issued.append(end)
                edge.travel.append(self._cost(action))
        else:
            other, end = edge.sender, edge.next_arrival(now)
            if end is not None:
                end += self._cost(action)
                edge.received.append(end)
        if end is None:
            self._waiting[rank] = edge
        elif edge.settle() and self._waiting[other] is edge:
            self._waiting[other] = None
            self._ready.append(other)
        return end

    def _blocked(self) -> Iterator[str]:
        for rank, (actions, spans) in enumerate(zip(self._program, self.spans, strict=True)):
            if len(spans) < len(actions):
                action = actions[len(spans)]
                yield f"rank {rank} at {action} waits for {self._awaited(rank, action)}"

    def _awaited(self, rank: int, action: Action) -> str:
        edge = self._waiting[rank]
        if edge is None:
            stage, op = self._local[action.stage, action.op]
            return f"{op} of microbatch {action.mb} at stage {stage}, which its own list has not done"
        if action.op in _SENDS:
            other, index = edge.receiver, len(edge.received)
        else:
            other, index = edge.sender, len(edge.issued)
        uses = [a for a in self._program[other] if self._edges.get((a.stage, a.op)) is edge]
        if index >= len(uses):
            return f"rank {other}, which does nothing more on that edge"
        return f"rank {other} to do {uses[index]}"


@dataclass(slots=True)
class _Holding:
    trains: bool = False
    open: int = 0
    activations: int = 0
    held: list[int] = field(default_factory=lambda: [0])
    versions: int = 1
    staleness: int = 0


def _holdings(actions: list[Action], microbatches: int) -> dict[int, _Holding]:
    """Count what each stage of one rank holds, at its peak."""
    needed_until = last_uses(actions)
    stages: dict[int, _Holding] = defaultdict(_Holding)
    for position, action in enumerate(actions):
        stage, op = stages[action.stage], action.op
        if op is Op.F:
            stage.open += 1
            stage.activations = max(stage.activations, stage.open)
        elif op is Op.B or op is Op.W:
            stage.trains = True
            stage.open -= 1
            stage.staleness = max(stage.staleness, action.mb // microbatches - action.version)
        elif op is Op.STEP:
            kept = [v for v in stage.held if needed_until.get((action.stage, v), -1) > position]
            stage.held = [*kept, action.version]
            stage.versions = max(stage.versions, len(stage.held))
    for stage in stages.values():
        if not stage.trains:  # evaluation saves nothing for a backward
            stage.activations = 0
    return stages
