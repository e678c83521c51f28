"""Adds REDUCE, SEND and RECV to a compute-only program.

Each message is placed where its data is made or needed, so communication is a function of the compute order:
no schedule can forget a message, and `check` verifies communication by lowering again. This does not prevent
overlap, as receives are posted ahead by the channel, and sends are asynchronous.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import lcm

from pipetrain.schedule.actions import (
    COMMUNICATION,
    UPDATE,
    Action,
    Edge,
    Op,
    Placement,
    Program,
    ScheduleError,
    homes,
    ranks_of,
)

ADDED = COMMUNICATION | {Op.REDUCE}

Link = tuple[Edge, tuple[int, int]]
"""An edge between two stages, and the ranks of its ends."""


class Lowering:
    """Computes the messages that an action needs and makes, for stages on these ranks.

    `routes`: the edges over which activations travel; None: from each stage to the next. A route that skips
    stages goes directly from the stage that makes the tensor to the stage that uses it. `homes`: the rank
    that runs each (stage, microbatch), for stages with replicas.
    """

    def __init__(
        self,
        ranks: Placement,
        routes: Sequence[Edge] | None = None,
        homes: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        self.ranks = ranks
        self._homes = homes or {}
        self.routes = sorted(pairwise(range(len(ranks))) if routes is None else routes)
        if wrong := [route for route in self.routes if not 0 <= route[0] < route[1] < len(ranks)]:
            raise ScheduleError(f"route {wrong[0]} must lead from a stage to a later one, of {len(ranks)}")
        stages = range(len(ranks))
        self.sources: list[list[int]] = [[] for _ in stages]
        self.targets: list[list[int]] = [[] for _ in stages]
        for source, to in self.routes:
            self.sources[to].append(source)
            self.targets[source].append(to)
        self._peers = {
            (op, stage): peers
            for stage in stages
            for op, peers in (
                (Op.RECV_F, self.sources[stage]),
                (Op.SEND_F, self.targets[stage]),
                (Op.RECV_B, self.targets[stage]),
                (Op.SEND_B, self.sources[stage][::-1]),
            )
        }

    @classmethod
    def for_program(cls, program: Program, routes: Sequence[Edge] | None = None) -> Lowering:
        """Return the lowering of a program, whose actions define the ranks. Raises ScheduleError."""
        ranks = ranks_of(program)
        return cls(ranks, routes, homes(program) if any(len(replicas) > 1 for replicas in ranks) else None)

    def rank(self, stage: int, mb: int) -> int:
        first, *replicas = self.ranks[stage]
        return self._homes[stage, mb] if replicas else first

    def apart(self, stage: int, other: int, mb: int) -> bool:
        """Return whether two stages run a microbatch on different ranks."""
        return self.rank(stage, mb) != self.rank(other, mb)

    def lowered(self, action: Action, reduced_for: Op | None = Op.STEP) -> list[Action]:
        """Return a compute action with the messages that it needs and makes."""
        if action.op in (Op.F, Op.B, Op.I):
            return [*self.receives(action), action, *self.sends(action)]
        if action.op is reduced_for:
            return [Action(action.stage, Op.REDUCE, version=action.version), action]
        return [action]

    def receives(self, action: Action) -> list[Action]:
        return self._messages(Op.RECV_F if action.op is Op.F else Op.RECV_B, action)

    def sends(self, action: Action) -> list[Action]:
        return self._messages(Op.SEND_F if action.op is Op.F else Op.SEND_B, action)

    def _messages(self, op: Op, action: Action) -> list[Action]:
        stage, mb = action.stage, action.mb
        peers = [peer for peer in self._peers[op, stage] if self.apart(stage, peer, mb)]
        return [Action(stage, op, mb, peer=peer) for peer in peers]


def lower(program: Program, routes: Sequence[Edge] | None = None) -> Program:
    """Add communication to a compute-only program.

    RECV comes just before and SEND just after the F, B or I that uses or makes the message; REDUCE just
    before the first of a stage's TIE, NORM and STEP. Stages on one rank exchange no messages. Raises
    ScheduleError for a program that already communicates, or that leaves out a stage.
    """
    for rank, actions in enumerate(program):
        for action in actions:
            if action.op in ADDED:
                raise ScheduleError(
                    f"rank {rank} has {action}: a schedule gives F, B, I, W, R and STEP alone"
                )
    lowering = Lowering.for_program(program, routes)
    # REDUCE must come before the gradient is read. That is the first kind of update action of a stage: TIE
    # where weights are shared, else NORM if there are norms, else STEP.
    reduced_for: dict[int, Op] = {}
    for actions in program:
        for action in actions:
            if action.op in UPDATE:
                reduced_for.setdefault(action.stage, action.op)
    return [
        [lowered for action in actions for lowered in lowering.lowered(action, reduced_for.get(action.stage))]
        for actions in program
    ]


def compute_only(program: Program) -> Program:
    """Remove what `lower` adds."""
    return [[action for action in actions if action.op not in ADDED] for actions in program]


def links(edges: Iterable[Edge], ranks: Placement) -> list[Link]:
    """Return the pairs of ranks that the microbatches of these edges may use; stages on these ranks."""
    return [
        (edge, (source, target))
        for edge in edges
        for source, target in dict.fromkeys(
            (ranks[edge[0]][mb % len(ranks[edge[0]])], ranks[edge[1]][mb % len(ranks[edge[1]])])
            for mb in range(lcm(len(ranks[edge[0]]), len(ranks[edge[1]])))
        )
        if source != target
    ]


def edges(program: Program, routes: Sequence[Edge] | None = None) -> list[Edge]:
    """Return the (source stage, destination stage) pairs that carry messages, in one order for all ranks.

    Routes ascend, each with its forward edge before its backward edge; a program of forwards has no backward
    edges. Works on lowered and on compute-only programs.
    """
    lowering = Lowering.for_program(program, routes)
    backward = any(action.op in (Op.B, Op.I) for actions in program for action in actions)
    return [
        edge
        for route in lowering.routes
        if links([route], lowering.ranks)
        for edge in ([route, route[::-1]] if backward else [route])
    ]
