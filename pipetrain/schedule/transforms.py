"""Transforms: program -> program, both without communication."""

from __future__ import annotations

from collections.abc import Sequence

from pipetrain.schedule.actions import Action, Op, Program


def with_norms(program: Program) -> Program:
    """Let every update wait for the gradient norm of all stages, as clipping by the norm of a model needs.

    A NORM follows the last backward of each batch, and its STEP comes as late as it may: before the first
    forward that reads what it makes, or the next batch's first backward. So the norms travel meanwhile, and a
    rank with several stages has a NORM of each before it waits.
    """
    return [_of_rank(actions) for actions in without_norms(program)]


def without_norms(program: Program) -> Program:
    """Remove the NORMs; the STEPs stay where they are."""
    return [[action for action in actions if action.op is not Op.NORM] for actions in program]


def _of_rank(actions: Sequence[Action]) -> list[Action]:
    last: dict[int, int] = {}  # stage -> the position of its last backward so far
    norms: dict[int, Action] = {}  # by the position that each follows
    for position, action in enumerate(actions):
        if action.op in (Op.B, Op.W):
            last[action.stage] = position
        elif action.op is Op.STEP:
            after = last.get(action.stage, position)
            norms[after] = Action(action.stage, Op.NORM, version=action.version)
    made: list[Action] = []
    waiting: dict[int, Action] = {}  # stage -> its STEP
    for position, action in enumerate(actions):
        if action.op is Op.STEP:
            waiting[action.stage] = action
        else:
            step = waiting.get(action.stage)
            reads = action.op is Op.F and step is not None and action.version >= step.version
            if step is not None and (reads or action.op in (Op.B, Op.W)):
                made.append(waiting.pop(action.stage))
            made.append(action)
        if position in norms:
            made.append(norms[position])
    return made + sorted(waiting.values(), key=lambda step: step.stage)
