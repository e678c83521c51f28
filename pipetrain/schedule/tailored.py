"""Schedules whose order is made for the costs of their stages."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from pipetrain.schedule.actions import Op, Program, Schedule
from pipetrain.schedule.simulate import Cost


@runtime_checkable
class Tailored(Protocol):
    """A schedule that can be made again for other costs; called as it is, F = I = W."""

    def __call__(self, ranks: int, batches: int, microbatches: int) -> Program: ...

    def made_for(self, cost: Cost, buffer_size: int) -> Schedule:
        """Return the schedule for these costs and this bound of the channel, with the same placement."""


def v_placement(ranks: int) -> list[int]:
    """Return the rank of each of 2S stages: rank r of S holds stages r and 2S-1-r."""
    return [*range(ranks), *reversed(range(ranks))]


def most_open(program: Program) -> int:
    """Return the most microbatches that a rank holds at once, over all its stages, from F to B or W."""
    most = 0
    for actions in program:
        held = 0
        for action in actions:
            held += (action.op is Op.F) - (action.op in (Op.B, Op.W))
            most = max(most, held)
    return most
