"""From what a rank computes to all that it does: adds REDUCE, SEND and RECV to a compute-only program.

One pass, rank by rank, puts each message where its data is made or needed, so communication is a function of
the compute order. A schedule's author cannot forget a message, and `check` can prove the whole of a program's
communication by lowering it again. Overlap is not lost by this: receives are posted ahead by the channel, and
a SEND is not waited for.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipetrain.schedule.actions import COMMUNICATION, Action, Op, Program, ScheduleError, placement

_ADDED = COMMUNICATION | {Op.REDUCE}


def lower(program: Program) -> Program:
    """Add communication to a compute-only program.

    REDUCE stands just before each STEP, RECV just before and SEND just after the F, B or I that uses or makes
    the message. Neighbouring stages on one rank exchange nothing. Raises ScheduleError for a program that
    already communicates, or whose stages are not placed each on one rank.
    """
    rank_of = placement(program)
    for rank, actions in enumerate(program):
        for action in actions:
            if action.op in _ADDED:
                raise ScheduleError(f"rank {rank} has {action}: a schedule gives F, B, I, W and STEP alone")
    return [
        [lowered for action in actions for lowered in _with_messages(action, rank_of)] for actions in program
    ]


def compute_only(program: Program) -> Program:
    """Take out what `lower` adds."""
    return [[action for action in actions if action.op not in _ADDED] for actions in program]


def edges(program: Program) -> list[tuple[int, int]]:
    """List the (source stage, destination stage) pairs that carry messages, in one order for all ranks.

    Boundaries ascend, each with its forward edge before its backward edge; a program of forwards alone has no
    backward edges. Works on lowered and on compute-only programs.
    """
    rank_of = placement(program)
    backward = any(action.op in (Op.B, Op.I) for actions in program for action in actions)
    return [
        edge
        for stage in range(len(rank_of) - 1)
        if rank_of[stage] != rank_of[stage + 1]
        for edge in [(stage, stage + 1), (stage + 1, stage)][: 1 + backward]
    ]


def _with_messages(action: Action, rank_of: list[int]) -> Iterator[Action]:
    stage, op, mb = action.stage, action.op, action.mb
    after_elsewhere = stage + 1 < len(rank_of) and rank_of[stage + 1] != rank_of[stage]
    before_elsewhere = stage > 0 and rank_of[stage - 1] != rank_of[stage]
    if op is Op.F:
        if before_elsewhere:
            yield Action(stage, Op.RECV_F, mb)
        yield action
        if after_elsewhere:
            yield Action(stage, Op.SEND_F, mb)
    elif op is Op.B or op is Op.I:
        if after_elsewhere:
            yield Action(stage, Op.RECV_B, mb)
        yield action
        if before_elsewhere:
            yield Action(stage, Op.SEND_B, mb)
    else:
        if op is Op.STEP:
            yield Action(stage, Op.REDUCE, version=action.version)
        yield action
