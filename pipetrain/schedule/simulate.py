"""Simulates a lowered program at given costs and buffer sizes: a timeline, or a deadlock.

The simulated channels have the bounds of the real ones, so a program that ends here cannot deadlock there.
Every start is a maximum of known times, so ranks may advance in any order: each runs until it must wait for a
message, and the sender wakes it. The time is linear in the number of actions. There are three collectives:
the REDUCE of a stage with replicas ends on all of them when the last one has started it; stages that share
weights wait for each other's TIE before their NORM or STEP; in a program with NORMs, the STEPs of a batch
wait until the norms of all stages have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from pipetrain.schedule.actions import (
    COMMUNICATION,
    SENDS,
    UPDATE,
    Action,
    Edge,
    Op,
    Program,
    ScheduleError,
    Ties,
    has_norms,
    tied_stages,
)
from pipetrain.schedule.lower import Lowering
from pipetrain.schedule.timeline import Row, Span, Timeline
from pipetrain.schedule.waits import BoundedEdge, Collective

Cost = Callable[[Action], float]
BufferSize = int | Mapping[Edge, int]  # one bound for all edges, or one for each
SHOWN = 16  # batches to show of a window that is a whole epoch: enough to see the full pipeline

_TRAVEL = SENDS | {Op.TIE, Op.NORM}  # the rank goes on while the message travels

_UNITS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0, Op.R: 1.0}


class Deadlock(ScheduleError):
    """A circular wait between ranks. The message names each rank, its action and what it waits for."""


def unit_cost(action: Action) -> float:
    """Return the cost 1 for a forward or R, 2 for a backward (1 for each half), and 0 for all else."""
    return _UNITS.get(action.op, 0.0)


def simulate(
    program: Program,
    microbatches: int,
    *,
    buffer_size: BufferSize = 2,
    cost: Cost = unit_cost,
    routes: Sequence[Edge] | None = None,
    ties: Ties = (),
) -> Timeline:
    """Simulate a lowered, checked program (or lowered `forward_only`). Raises Deadlock.

    `buffer_size` bounds each edge at both ends: receives posted ahead, and sends not yet arrived; one number
    for all edges, or one for each, see `edge_bounds`. `cost` is the time of an action on its rank; for a
    SEND, a TIE or a NORM, the travel time of its message, while the sender goes on. `ties`: as given to
    `with_ties`, if the program has any.
    """
    least = buffer_size if isinstance(buffer_size, int) else min(buffer_size.values(), default=1)
    if least < 1:
        raise ScheduleError(f"simulate needs buffer_size >= 1; got buffer_size={_named(buffer_size)}")
    if unknown := tied_stages(program) - set().union(*ties):
        raise ScheduleError(
            f"stages {sorted(unknown)} have a TIE, and simulate was not told with which stages"
        )
    simulation = _Simulation(program, buffer_size, cost, routes, ties)
    rows = simulation.run()
    return Timeline(rows, microbatches, [rank for _, rank in sorted(simulation.began, key=itemgetter(0))])


def _named(buffer_size: BufferSize) -> str:
    if isinstance(buffer_size, int):
        return str(buffer_size)
    if len(bounds := set(buffer_size.values())) == 1:
        return str(bounds.pop())
    return ", ".join(f"{bound} from {source} to {to}" for (source, to), bound in buffer_size.items())


class _Simulation:
    def __init__(
        self, program: Program, buffer_size: BufferSize, cost: Cost, routes: Sequence[Edge] | None, ties: Ties
    ) -> None:
        self._program = program
        self._buffer_size = buffer_size
        self._cost = cost
        self._lowering = Lowering.for_program(program, routes)
        self._edges: dict[tuple[int, ...], BoundedEdge] = {}  # by its stages and ranks
        self._shares = len(set().union(*self._lowering.ranks)) < sum(map(len, self._lowering.ranks))
        self._done: set[tuple[int, Op, int]] = set()  # (stage, F or B, microbatch), where ranks have several
        stages, ranks = range(len(self._lowering.ranks)), self._lowering.ranks
        self._reduces = [Collective("REDUCE", [stage], ranks) for stage in stages]
        self._norms = Collective("norm", stages if has_norms(program) else (), ranks)
        self._ties = {
            stage: Collective("tied gradient", set().union(*tied), ranks)
            for stage in stages
            if (tied := [tie for tie in ties if stage in tie])
        }
        self._waiting: list[BoundedEdge | None] = [None] * len(program)
        self._ready = list(range(len(program)))
        self._rows = [Row(0.0, 0.0, []) for _ in program]
        self.began: list[tuple[float, int]] = []
        """When each action began, and its rank; no action is before one that it waits for."""

    def run(self) -> list[Row]:
        # Ready ranks run in any order. A rank that must wait leaves the list; the rank at the other end of a
        # message, or the last one of its collective, puts it back. None ready: all have ended, or a deadlock.
        while self._ready:
            self._advance(self._ready.pop())
        if any(len(row.spans) < len(todo) for row, todo in zip(self._rows, self._program, strict=True)):
            blocked = "; ".join(self._blocked())
            raise Deadlock(f"deadlock with buffer_size={_named(self._buffer_size)}: {blocked}")
        return self._rows

    def _advance(self, rank: int) -> None:
        """Run a rank until it ends or must wait."""
        actions, row = self._program[rank], self._rows[rank]
        for position in range(len(row.spans), len(actions)):
            action, now = actions[position], row.ended
            # `freed`: when nothing blocks the action any more, so that it begins; None: not known yet.
            if action.op in COMMUNICATION:
                freed = self._exchange(rank, action, now)
            elif action.op in UPDATE:
                freed = self._update(rank, action, now)
            else:
                freed = self._compute(action, now)
            if freed is None:
                return
            end = freed if action.op in _TRAVEL else freed + self._cost(action)
            row.spans.append(Span(action, now, end, freed - now))
            self.began.append((freed, rank))
            row.ended = end

    # These return until when the rank is blocked: `now` if it is not, None if unknown.

    def _compute(self, action: Action, now: float) -> float | None:
        if self._shares:
            if any(needed not in self._done for needed in self._needs(action)):
                return None
            if action.op not in (Op.W, Op.R):
                self._done.add((action.stage, Op.F if action.op is Op.F else Op.B, action.mb))
        return now

    def _update(self, rank: int, action: Action, now: float) -> float | None:
        if action.op is Op.REDUCE:
            self._join([self._reduces[action.stage]], rank, action, now)
        for collective in self._collectives_before(action):
            if (complete := collective.complete(action.version, now)) is None:
                return None
            now = complete
        if action.op in (Op.TIE, Op.NORM):
            joined = self._ties.values() if action.op is Op.TIE else [self._norms]
            self._join(joined, rank, action, now + self._cost(action))
        return now

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
        elif edge.deliver() and self._waiting[other] is edge:
            self._waiting[other] = None
            self._ready.append(other)
        return freed

    def _join(self, collectives: Iterable[Collective], rank: int, action: Action, arrives: float) -> None:
        """Add an action to these collectives, and wake the ranks of each that is now complete."""
        for collective in collectives:
            if collective.send(action, rank, arrives):
                self._ready += collective.ranks - {rank}

    def _collectives_before(self, action: Action) -> list[Collective]:
        """Return the collectives that an action of an update waits for."""
        if action.op is Op.REDUCE:
            return [self._reduces[action.stage]]
        tied = [self._ties[action.stage]] if action.stage in self._ties and action.op is not Op.TIE else []
        return [*tied, self._norms] if action.op is Op.STEP else tied

    def _edge(self, rank: int, action: Action) -> BoundedEdge:
        other = self._lowering.rank(action.peer, action.mb)
        ranks = (rank, other) if action.op in SENDS else (other, rank)
        key = (*action.edge, *ranks)
        if key not in self._edges:
            size = self._buffer_size
            bound = size if isinstance(size, int) else size.get(action.edge)
            if bound is None:
                raise ScheduleError(f"rank {rank} has {action}, and its edge has no buffer_size")
            self._edges[key] = BoundedEdge(*ranks, bound)
        return self._edges[key]

    def _needs(self, action: Action) -> Iterator[tuple[int, Op, int]]:
        """Return what an action needs from other stages on its own rank."""
        stage, mb = action.stage, action.mb
        if action.op is Op.F:
            needed = [(source, Op.F, mb) for source in self._lowering.sources[stage]]
        elif action.op in (Op.B, Op.I):
            needed = [(target, Op.B, mb) for target in self._lowering.targets[stage]]
        else:
            needed = []
        return (need for need in needed if not self._lowering.apart(stage, need[0], mb))

    def _blocked(self) -> Iterator[str]:
        for rank, (actions, row) in enumerate(zip(self._program, self._rows, strict=True)):
            if len(row.spans) < len(actions):
                action = actions[len(row.spans)]
                yield f"rank {rank} at {action} waits for {self._awaited(rank, action)}"

    def _awaited(self, rank: int, action: Action) -> str:
        if action.op in UPDATE:
            late = next(
                collective
                for collective in self._collectives_before(action)
                if collective.missing(action.version)
            )
            missing = late.missing(action.version)
            if action.op is Op.REDUCE:
                return f"rank {' and '.join(str(other) for _, other in missing)} to do {action}"
            stages = sorted({stage for stage, _ in missing})
            return f"the {late.name} of stage {' and '.join(map(str, stages))}"
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
