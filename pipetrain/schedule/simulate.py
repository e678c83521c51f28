"""Simulates a lowered program at given costs and buffer sizes: a timeline, or a deadlock.

The simulated channels have the bounds of the real ones, so a program that ends here cannot deadlock there.
Every start is a maximum of known times, so ranks may be advanced in any order: each runs until it must wait
for a message, which then wakes it. This is linear in the number of actions. There are three collectives: the
REDUCE of a stage with replicas ends on all of them when the last has started it, stages that share weights
wait for each other's TIE before their NORM or STEP, and in a program with NORMs the STEPs of a batch wait
until the norms of all stages have arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pipetrain.schedule.actions import (
    COMMUNICATION,
    SENDS,
    UPDATE,
    Action,
    Op,
    Placement,
    Program,
    ScheduleError,
    Ties,
    has_norms,
    ranks_of,
    tied_stages,
)
from pipetrain.schedule.lower import Route, Wiring
from pipetrain.schedule.timeline import Row, Span, Timeline

Cost = Callable[[Action], float]

_TRAVEL = SENDS | {Op.TIE, Op.NORM}  # whose rank goes on while the message travels

_UNITS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}


class Deadlock(ScheduleError):
    """A circular wait between ranks. The message names each rank, its action and what it waits for."""


def unit_cost(action: Action) -> float:
    """Return the cost 1 for a forward, 2 for a backward (1 for each half), and 0 for all else."""
    return _UNITS.get(action.op, 0.0)


def simulate(
    program: Program,
    microbatches: int,
    *,
    buffer_size: int = 2,
    cost: Cost = unit_cost,
    routes: Sequence[Route] | None = None,
    ties: Ties = (),
) -> Timeline:
    """Simulate a lowered, checked program (or lowered `forward_only`). Raises Deadlock.

    `buffer_size` bounds each edge at both ends: receives posted ahead, and sends not yet arrived. `cost` is
    the time of an action on its rank; for a SEND, a TIE or a NORM, the travel time of its message, during
    which the sender goes on. `ties`: those that `with_ties` was given, if the program has any.
    """
    if buffer_size < 1:
        raise ScheduleError(f"simulate needs buffer_size >= 1; got buffer_size={buffer_size}")
    if unknown := tied_stages(program) - set().union(*ties):
        raise ScheduleError(
            f"stages {sorted(unknown)} have a TIE, and simulate was not told with which stages"
        )
    return Timeline(_Simulation(program, buffer_size, cost, routes, ties).run(), microbatches)


@dataclass(slots=True)
class _Edge:
    """A bounded, ordered channel. Message k leaves when SEND k is issued and receive k is posted.

    Receive k is posted at the start for k < bound, else when RECV k - bound is done. SEND k blocks its rank
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
        """Return when the next SEND may be issued; None if unknown yet."""
        index = len(self.issued) - self.bound
        if index < 0:
            return now
        return max(now, self.arrived[index]) if index < len(self.arrived) else None

    def next_arrival(self, now: float) -> float | None:
        """Return when the next RECV has its message; None if unknown yet."""
        index = len(self.received)
        return max(now, self.arrived[index]) if index < len(self.arrived) else None

    def settle(self) -> bool:
        """Let the next message leave if it can; one event releases at most one message."""
        index = len(self.arrived)
        posted_by = index - self.bound
        if index >= len(self.issued) or posted_by >= len(self.received):
            return False
        posted = self.received[posted_by] if posted_by >= 0 else 0.0
        self.arrived.append(max(self.issued[index], posted) + self.travel[index])
        return True


class _Told:
    """What some stages tell of each update, and each of their replicas; others wait until all of it came."""

    def __init__(self, name: str, stages: Iterable[int], ranks: Placement) -> None:
        self.name = name
        self._from = {(stage, rank) for stage in stages for rank in ranks[stage]}
        self._came: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)  # by version

    def tell(self, action: Action, rank: int, at: float) -> bool:
        """Return whether this is the last that was missing."""
        came = self._came[action.version]
        if (action.stage, rank) not in self._from:
            return False
        came[action.stage, rank] = at
        return len(came) == len(self._from)

    def heard(self, version: int, now: float) -> float | None:
        """Return when all has come; None if unknown yet."""
        came = self._came[version]
        return max([now, *came.values()]) if len(came) == len(self._from) else None

    def missing(self, version: int) -> str:
        """Return what has not come, in words; "" if all has."""
        stages = sorted({stage for stage, _ in self._from - self._came[version].keys()})
        return f"the {self.name} of stage {' and '.join(map(str, stages))}" if stages else ""


class _Simulation:
    def __init__(
        self, program: Program, buffer_size: int, cost: Cost, routes: Sequence[Route] | None, ties: Ties
    ) -> None:
        self._program = program
        self._bound = buffer_size
        self._cost = cost
        self._wiring = Wiring(ranks_of(program), routes)
        self._edges: dict[tuple[int, int, int, int], _Edge] = {}  # by (source, destination) stages and ranks
        self._shares = len(set().union(*self._wiring.ranks)) < sum(map(len, self._wiring.ranks))
        self._done: set[tuple[int, Op, int]] = set()  # (stage, F or B, microbatch), where ranks have several
        self._reduced: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # each replica's REDUCE
        stages = range(len(self._wiring.ranks))
        self._norms = _Told("norm", stages if has_norms(program) else (), self._wiring.ranks)
        self._ties = {
            stage: _Told("tied gradient", set().union(*tied), self._wiring.ranks)
            for stage in stages
            if (tied := [tie for tie in ties if stage in tie])
        }
        self._waiting: list[_Edge | None] = [None] * len(program)
        self._ready = list(range(len(program)))
        self._rows = [Row(0.0, 0.0, []) for _ in program]

    def run(self) -> list[Row]:
        while self._ready:
            self._advance(self._ready.pop())
        if any(len(row.spans) < len(todo) for row, todo in zip(self._rows, self._program, strict=True)):
            blocked = "; ".join(self._blocked())
            raise Deadlock(f"deadlock with buffer_size={self._bound}: {blocked}")
        return self._rows

    def _advance(self, rank: int) -> None:
        """Run a rank until it ends or must wait."""
        actions, row = self._program[rank], self._rows[rank]
        for position in range(len(row.spans), len(actions)):
            action, now = actions[position], row.ended
            if action.op in COMMUNICATION:
                freed = self._exchange(rank, action, now)
            elif action.op is Op.REDUCE:
                freed = self._reduce(rank, action, now)
            elif action.op is Op.TIE:
                freed = self._tell(self._ties.values(), rank, action, now)
            elif action.op is Op.NORM:
                freed = self._summed(action, now)
                freed = freed if freed is None else self._tell([self._norms], rank, action, freed)
            elif action.op is Op.STEP:
                freed = self._step(action, now)
            else:
                freed = self._compute(action, now)
            if freed is None:
                return
            end = freed if action.op in _TRAVEL else freed + self._cost(action)
            row.spans.append(Span(action, now, end, freed - now))
            row.ended = end

    # These return until when the rank is blocked: `now` if it is not, None if unknown.

    def _compute(self, action: Action, now: float) -> float | None:
        if self._shares:
            if any(needed not in self._done for needed in self._needs(action)):
                return None
            if action.op is not Op.W:
                self._done.add((action.stage, Op.F if action.op is Op.F else Op.B, action.mb))
        return now

    def _reduce(self, rank: int, action: Action, now: float) -> float | None:
        replicas, came = self._wiring.ranks[action.stage], self._reduced[action.stage, action.version]
        last = rank not in came and len(came) + 1 == len(replicas)
        came[rank] = now
        if len(came) < len(replicas):
            return None
        if last:
            self._ready += [other for other in replicas if other != rank]
        return max(came.values())

    def _tell(self, whom: Iterable[_Told], rank: int, action: Action, now: float) -> float:
        arrives = now + self._cost(action)
        complete = [told.tell(action, rank, arrives) for told in whom]
        if any(complete):
            self._ready += [other for other in range(len(self._rows)) if other != rank]
        return now

    def _summed(self, action: Action, now: float) -> float | None:
        tied = self._ties.get(action.stage)
        return tied.heard(action.version, now) if tied else now

    def _step(self, action: Action, now: float) -> float | None:
        freed = self._summed(action, now)
        return freed if freed is None else self._norms.heard(action.version, freed)

    def _exchange(self, rank: int, action: Action, now: float) -> float | None:
        edge = self._edge(rank, action)
        if action.op in SENDS:
            other, freed = edge.receiver, edge.send_free(now)
            if freed is not None:
                edge.issued.append(freed)
                edge.travel.append(self._cost(action))
        else:
            other, freed = edge.sender, edge.next_arrival(now)
            if freed is not None:
                edge.received.append(freed + self._cost(action))
        if freed is None:
            self._waiting[rank] = edge
        elif edge.settle() and self._waiting[other] is edge:
            self._waiting[other] = None
            self._ready.append(other)
        return freed

    def _edge(self, rank: int, action: Action) -> _Edge:
        other = self._wiring.rank(action.peer, action.mb)
        ranks = (rank, other) if action.op in SENDS else (other, rank)
        key = (*action.edge, *ranks)
        if key not in self._edges:
            self._edges[key] = _Edge(*ranks, self._bound)
        return self._edges[key]

    def _needs(self, action: Action) -> Iterator[tuple[int, Op, int]]:
        """Return what an action needs from other stages on its own rank."""
        stage, mb = action.stage, action.mb
        if action.op is Op.F:
            needed = [(source, Op.F, mb) for source in self._wiring.sources[stage]]
        elif action.op in (Op.B, Op.I):
            needed = [(target, Op.B, mb) for target in self._wiring.targets[stage]]
        else:
            needed = []
        return (of for of in needed if not self._wiring.apart(stage, of[0], mb))

    def _blocked(self) -> Iterator[str]:
        for rank, (actions, row) in enumerate(zip(self._program, self._rows, strict=True)):
            if len(row.spans) < len(actions):
                action = actions[len(row.spans)]
                yield f"rank {rank} at {action} waits for {self._awaited(rank, action)}"

    def _awaited(self, rank: int, action: Action) -> str:
        if action.op is Op.REDUCE:
            came = self._reduced[action.stage, action.version]
            missing = [str(other) for other in self._wiring.ranks[action.stage] if other not in came]
            return f"rank {' and '.join(missing)} to do {action}"
        if action.op in UPDATE:
            tied = self._ties.get(action.stage)
            untold = tied.missing(action.version) if tied else ""
            return untold or self._norms.missing(action.version)
        if action.op not in COMMUNICATION:
            source, op, mb = next(needed for needed in self._needs(action) if needed not in self._done)
            return f"{op} of microbatch {mb} at stage {source}, which its own list has not done"
        edge = self._edge(rank, action)
        if action.op in SENDS:
            other, index = edge.receiver, len(edge.received)
        else:
            other, index = edge.sender, len(edge.issued)
        uses = [a for a in self._program[other] if a.op in COMMUNICATION and self._edge(other, a) is edge]
        if index >= len(uses):
            return f"rank {other}, which does nothing more on that edge"
        return f"rank {other} to do {uses[index]}"
