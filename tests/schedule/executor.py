"""Runs a lowered program in any order that its waits allow: a second judge of what `simulate` says.

It has no times. Each turn does one thing that can be done, chosen at random: the next action of a rank, or
the transfer of a message for which a receive is posted. Channels keep to the words of runtime/channel.py,
and every value that an action uses must be there and be the right one. Stages have no replicas.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipetrain.schedule.actions import RECEIVES, SENDS, Action, Edge, Op, Program, Ties, ranks_of


@dataclass
class Pipe:
    """One direction between two stages."""

    bound: int
    expected: list[int]  # the microbatches of the receives, in order
    sent: list[int] = field(default_factory=list)
    transferred: int = 0
    received: int = 0

    def may_send(self) -> bool:
        return len(self.sent) - self.transferred < self.bound

    def may_transfer(self) -> bool:
        posted = min(self.received + self.bound, len(self.expected))
        return self.transferred < min(len(self.sent), posted)

    def may_receive(self) -> bool:
        return self.received < self.transferred

    def transfer(self) -> None:
        made, wanted = self.sent[self.transferred], self.expected[self.transferred]
        assert made == wanted, f"microbatch {made} arrives in the place of {wanted}"
        self.transferred += 1


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
        self.program = program
        self.chance = random.Random(seed)
        stages = range(len(ranks_of(program)))
        self.sources = {stage: [a for a, b in routes if b == stage] for stage in stages}
        self.targets = {stage: [b for a, b in routes if a == stage] for stage in stages}
        self.position = [0] * len(program)
        every = [action for actions in program for action in actions]
        self.pipes = {
            edge: Pipe(bound, [a.mb for a in every if a.op in RECEIVES and a.edge == edge])
            for edge, bound in bounds.items()
        }
        self.rank = {
            stage: rank for rank, actions in enumerate(program) for stage in {a.stage for a in actions}
        }
        self.told: set[tuple[Op, int, int]] = set()  # (TIE or NORM, of stage, version)
        norms = stages if any(action.op is Op.NORM for action in every) else ()
        self.awaited = {stage: [(Op.NORM, of) for of in norms] for stage in stages}
        self.shared = {
            stage: [(Op.TIE, of) for tie in ties if stage in tie for of in tie] for stage in stages
        }
        self.there: set[tuple[int, Op, int, int]] = set()  # (at stage, F or B, of stage, microbatch)
        self.open: Counter[int] = Counter()
        self.activations = dict.fromkeys(stages, 0)
        self.sends: Counter[Edge] = Counter()

    def run(self) -> bool:
        """Return whether it ends, rather than blocks."""
        while True:
            ranks = [rank for rank in range(len(self.program)) if self._may(rank)]
            pipes = [pipe for pipe in self.pipes.values() if pipe.may_transfer()]
            if not ranks and not pipes:
                break
            chosen = self.chance.choice([*ranks, *pipes])
            if isinstance(chosen, Pipe):
                chosen.transfer()
            else:
                self._do(self.program[chosen][self.position[chosen]])
                self.position[chosen] += 1
        return all(at == len(todo) for at, todo in zip(self.position, self.program, strict=True))

    def _may(self, rank: int) -> bool:
        if self.position[rank] == len(self.program[rank]):
            return False
        action = self.program[rank][self.position[rank]]
        if action.op in SENDS:
            return self.pipes[action.edge].may_send()
        if action.op in RECEIVES:
            return self.pipes[action.edge].may_receive()
        if action.op in (Op.NORM, Op.STEP):
            awaited = self.shared[action.stage] + (self.awaited[action.stage] if action.op is Op.STEP else [])
            return all((op, stage, action.version) in self.told for op, stage in awaited)
        alike = [of for of in self._needs(action) if self.rank[of[2]] == rank]
        return self.there.issuperset(alike)  # another stage of the rank, which may be later in the list

    def _needs(self, action: Action) -> list[tuple[int, Op, int, int]]:
        stage, mb = action.stage, action.mb
        if action.op is Op.F:
            return [(stage, Op.F, source, mb) for source in self.sources[stage]]
        if action.op in (Op.B, Op.I):
            return [(stage, Op.B, target, mb) for target in self.targets[stage]]
        return []

    def _do(self, action: Action) -> None:
        stage, mb = action.stage, action.mb
        if action.op in SENDS:
            kind = Op.F if action.op is Op.SEND_F else Op.B
            assert (stage, kind, stage, mb) in self.there, f"{action} has nothing to send"
            self.pipes[action.edge].sent.append(mb)
            self.sends[action.edge] += 1
        elif action.op in RECEIVES:
            pipe = self.pipes[action.edge]
            assert pipe.expected[pipe.received] == mb, f"{action} is not the next of its edge"
            pipe.received += 1
            self.there.add((stage, Op.F if action.op is Op.RECV_F else Op.B, action.peer, mb))
        else:
            assert self.there.issuperset(self._needs(action)), f"{action} lacks an input"
            self._compute(action)

    def _compute(self, action: Action) -> None:
        stage, mb = action.stage, action.mb
        if action.op is Op.F:
            self.there |= {(at, Op.F, stage, mb) for at in (stage, *self._beside(stage, self.targets))}
            self.open[stage] += 1
            self.activations[stage] = max(self.activations[stage], self.open[stage])
        elif action.op in (Op.B, Op.I):
            self.there |= {(at, Op.B, stage, mb) for at in (stage, *self._beside(stage, self.sources))}
        elif action.op in (Op.TIE, Op.NORM):
            self.told.add((action.op, stage, action.version))
        if action.op in (Op.B, Op.W):
            self.open[stage] -= 1

    def _beside(self, stage: int, others: Mapping[int, list[int]]) -> list[int]:
        """Return the stages on the same rank that use what this one makes."""
        return [other for other in others[stage] if self.rank[other] == self.rank[stage]]
