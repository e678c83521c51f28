"""Runs a lowered program in any order that its waits allow: a second judge of what `simulate` says.

It has no times. Each turn does one thing that can be done, chosen at random: the next action of a rank, or
the transfer of a message for which a receive is posted. Channels keep to the words of
runtime/comm/channel.py, and every value that an action uses must be there and be the right one. Stages have
no replicas.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from pipetrain.schedule.actions import RECEIVES, SENDS, Action, Edge, Op, Program, Ties, ranks_of

Value = tuple[int, Op, int, int]  # (at stage, F or B, of stage, microbatch)


class Executor:
    """One run of a program; the same whatever the seed, if simulate is right."""

    def __init__(
        self,
        program: Program,
        bounds: Mapping[Edge, int],
        routes: Sequence[Edge],
        seed: int,
        ties: Ties = (),
    ) -> None:
        self.program, self.bounds, self.chance = program, bounds, random.Random(seed)
        stages = range(len(ranks_of(program)))
        every = [action for actions in program for action in actions]
        self.sources = {stage: [a for a, b in routes if b == stage] for stage in stages}
        self.targets = {stage: [b for a, b in routes if a == stage] for stage in stages}
        held = [{action.stage for action in actions} for actions in program]
        self.beside = {stage: of_rank for of_rank in held for stage in of_rank}  # the stages of its rank
        self.expected = {e: [a.mb for a in every if a.op in RECEIVES and a.edge == e] for e in bounds}
        self.sent: dict[Edge, list[int]] = {edge: [] for edge in bounds}
        self.transferred: Counter[Edge] = Counter()
        self.received: Counter[Edge] = Counter()
        norms = [(Op.NORM, of) for of in stages if any(action.op is Op.NORM for action in every)]
        tied = {stage: [(Op.TIE, of) for tie in ties if stage in tie for of in tie] for stage in stages}
        self.awaited = {(stage, Op.NORM): tied[stage] for stage in stages}
        self.awaited |= {(stage, Op.STEP): tied[stage] + norms for stage in stages}
        self.told: set[tuple[Op, int, int]] = set()  # (TIE or NORM, of stage, version)
        self.there: set[Value] = set()
        self.position = [0] * len(program)
        self.open: Counter[int] = Counter()
        self.activations = dict.fromkeys(stages, 0)

    @property
    def sends(self) -> Counter[Edge]:
        return Counter({edge: len(sent) for edge, sent in self.sent.items()})

    def run(self) -> bool:
        """Return whether it ends, rather than blocks."""
        while True:
            ranks = [rank for rank in range(len(self.program)) if self._may(rank)]
            ways = [edge for edge in self.bounds if self._may_transfer(edge)]
            if not ranks and not ways:
                return all(at == len(todo) for at, todo in zip(self.position, self.program, strict=True))
            chosen = self.chance.choice([*ranks, *ways])
            if isinstance(chosen, tuple):
                made, wanted = (of[chosen][self.transferred[chosen]] for of in (self.sent, self.expected))
                assert made == wanted, f"microbatch {made} arrives in the place of {wanted}"
                self.transferred[chosen] += 1
            else:
                self._do(self.program[chosen][self.position[chosen]])
                self.position[chosen] += 1

    def _may_transfer(self, edge: Edge) -> bool:
        posted = min(self.received[edge] + self.bounds[edge], len(self.expected[edge]))
        return self.transferred[edge] < min(len(self.sent[edge]), posted)

    def _may(self, rank: int) -> bool:
        if self.position[rank] == len(self.program[rank]):
            return False
        action = self.program[rank][self.position[rank]]
        if action.op in SENDS:
            return len(self.sent[action.edge]) - self.transferred[action.edge] < self.bounds[action.edge]
        if action.op in RECEIVES:
            return self.received[action.edge] < self.transferred[action.edge]
        told = ((op, of, action.version) for op, of in self.awaited.get((action.stage, action.op), ()))
        # What another stage of the rank makes may be later in the list; messages have been received.
        alike = (value for value in self._needs(action) if value[2] in self.beside[action.stage])
        return self.told.issuperset(told) and self.there.issuperset(alike)

    def _needs(self, action: Action) -> list[Value]:
        stage, mb = action.stage, action.mb
        if action.op is Op.F:
            return [(stage, Op.F, source, mb) for source in self.sources[stage]]
        if action.op in (Op.B, Op.I):
            return [(stage, Op.B, target, mb) for target in self.targets[stage]]
        return []

    def _do(self, action: Action) -> None:
        stage, op, mb = action.stage, action.op, action.mb
        kind = Op.F if op in (Op.F, Op.SEND_F, Op.RECV_F) else Op.B
        if op in SENDS:
            assert (stage, kind, stage, mb) in self.there, f"{action} has nothing to send"
            self.sent[action.edge].append(mb)
        elif op in RECEIVES:
            assert self.expected[action.edge][self.received[action.edge]] == mb
            self.received[action.edge] += 1
            self.there.add((stage, kind, action.peer, mb))
        else:
            assert self.there.issuperset(self._needs(action)), f"{action} lacks an input"
            if op in (Op.F, Op.B, Op.I):
                self.there |= {(at, kind, stage, mb) for at in self.beside[stage]}
            elif op in (Op.TIE, Op.NORM):
                self.told.add((op, stage, action.version))
            self.open[stage] += (op is Op.F) - (op in (Op.B, Op.W))
            self.activations[stage] = max(self.activations[stage], self.open[stage])
