"""Adds REDUCE, SEND and RECV to a compute-only program.

Each message is placed where its data is made or needed, so communication is a function of the compute order:
no schedule can forget a message, and `check` verifies communication by lowering again. This does not prevent
overlap, as receives are posted ahead by the channel, and sends are asynchronous.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    ranks_of,
)

ADDED = COMMUNICATION | {Op.REDUCE}


class Lowering:
    """Tells which messages an action needs and makes, for stages on these ranks.

    `routes`: the edges over which activations travel; None: from each stage to the next. One that skips
    stages goes directly from the stage that makes the tensor to the one that uses it.
    """

    def __init__(self, ranks: Placement, routes: Sequence[Edge] | None = None) -> None:
        self.ranks = ranks
        self.routes = sorted(pairwise(range(len(ranks))) if routes is None else routes)
        if wrong := [route for route in self.routes if not 0 <= route[0] < route[1] < len(ranks)]:
            raise ScheduleError(f"route {wrong[0]} must lead from a stage to a later one, of {len(ranks)}")
        stages = range(len(ranks))
        self.sources = [[source for source, to in self.routes if to == stage] for stage in stages]
        self.targets = [[to for source, to in self.routes if source == stage] for stage in stages]
        self.cycle = lcm(*map(len, ranks))  # the ranks of microbatch k are those of k + cycle
        self._peers = {
            (op, stage, mb): [peer for peer in peers if self.apart(stage, peer, mb)]
            for stage in stages
            for mb in range(self.cycle)
            for op, peers in (
                (Op.RECV_F, self.sources[stage]),
                (Op.SEND_F, self.targets[stage]),
                (Op.RECV_B, self.targets[stage]),
                (Op.SEND_B, self.sources[stage][::-1]),
            )
        }

    def rank(self, stage: int, mb: int) -> int:
        return self.ranks[stage][mb % len(self.ranks[stage])]

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
        """Return the RECVs of what an F, B or I needs."""
        return self._messages(Op.RECV_F if action.op is Op.F else Op.RECV_B, action)

    def sends(self, action: Action) -> list[Action]:
        """Return the SENDs of what an F, B or I makes."""
        return self._messages(Op.SEND_F if action.op is Op.F else Op.SEND_B, action)

    def _messages(self, op: Op, action: Action) -> list[Action]:
        peers = self._peers[op, action.stage, action.mb % self.cycle]
        return [Action(action.stage, op, action.mb, peer=peer) for peer in peers]


def lower(program: Program, routes: Sequence[Edge] | None = None) -> Program:
    """Add communication to a compute-only program.

    REDUCE comes just before the first of a stage's TIE, NORM and STEP, RECV just before and SEND just after
    the F, B or I that uses or makes the message. Stages on one rank exchange no messages. Raises
    ScheduleError for a program that already communicates, or that leaves out a stage.
    """
    for rank, actions in enumerate(program):
        for action in actions:
            if action.op in ADDED:
                raise ScheduleError(
                    f"rank {rank} has {action}: a schedule gives F, B, I, W, R and STEP alone"
                )
    lowering = Lowering(ranks_of(program), routes)
    reduced_for: dict[int, Op] = {}
    for actions in program:
        for action in actions:
            if action.op in UPDATE:
                reduced_for.setdefault(action.stage, action.op)
    return [
        [each for action in actions for each in lowering.lowered(action, reduced_for.get(action.stage))]
        for actions in program
    ]


def compute_only(program: Program) -> Program:
    """Remove what `lower` adds."""
    return [[action for action in actions if action.op not in ADDED] for actions in program]


def edges(program: Program, routes: Sequence[Edge] | None = None) -> list[Edge]:
    """Return the (source stage, destination stage) pairs that carry messages, in one order for all ranks.

    Routes ascend, each with its forward edge before its backward edge; a program of forwards has no backward
    edges. Works on lowered and on compute-only programs.
    """
    lowering = Lowering(ranks_of(program), routes)
    backward = any(action.op in (Op.B, Op.I) for actions in program for action in actions)
    return [
        edge
        for source, to in lowering.routes
        if any(lowering.apart(source, to, mb) for mb in range(lowering.cycle))
        for edge in ([(source, to), (to, source)] if backward else [(source, to)])
    ]
