"""Where each receive is posted, so that a program ends where computing waits for the transfers of its rank.

A posted transfer may be a kernel, and a kernel that computes may have to wait for all of them: while it is
loaded, or allocates. So a receive is posted where, in one global order, its send is made. Then none hangs:
whatever an action waits for comes before it in that order, so the first action that has not ended can end.
The order gives each rank one computation in turn, and shows by ending that there is one. It says nothing of
TIE and NORM, the collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pipetrain.schedule.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    Edge,
    Op,
    Program,
    ScheduleError,
    placement,
)

Post = tuple[int, Action]
"""(position, RECV): the receive is posted before the action at this position of its rank's list."""


@dataclass(frozen=True, slots=True)
class Posts:
    """Where the ranks post their receives. `ahead`: the most of an edge that are posted and not received."""

    of: list[list[Post]]  # by rank, ascending
    ahead: int


def make_posts(program: Program, bounds: Mapping[Edge, int]) -> Posts:
    """Return where each rank of a lowered program posts its receives, in the order of each edge.

    At most `bounds` of an edge are posted and not received, or twice as many where the program needs the room
    that both ends have together. Raises ScheduleError for a program that hangs even so.
    """
    most = max(bounds.values(), default=0)
    made, _ = _ordered(program, bounds)
    if made is not None:
        return Posts(made, most)
    made, where = _ordered(program, {edge: 2 * bound for edge, bound in bounds.items()})
    if made is None:
        raise ScheduleError(f"where computing waits for all transfers of its rank the program hangs: {where}")
    return Posts(made, 2 * most)


def _ordered(program: Program, room: Mapping[Edge, int]) -> tuple[list[list[Post]] | None, str]:
    """Return the posts of each rank; None for a program that never ends, and where it stands."""
    ranks = placement(program)
    made: list[list[Post]] = [[] for _ in program]
    done, under_way = [0] * len(program), Counter[Edge]()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(program):
            computed = False
            while not computed and done[rank] < len(actions):
                action = actions[done[rank]]
                if action.op in SENDS and under_way[action.edge] >= room[action.edge]:
                    break
                if action.op in RECEIVES and not under_way[action.edge]:
                    break
                if action.op in SENDS:
                    under_way[action.edge] += 1
                    to = ranks[action.peer]
                    made[to].append((done[to], _receive(action)))
                elif action.op in RECEIVES:
                    under_way[action.edge] -= 1
                done[rank] += 1
                computed, moved = action.op in COMPUTE, True
    stuck = [
        (rank, actions[at])
        for rank, (at, actions) in enumerate(zip(done, program, strict=True))
        if at < len(actions)
    ]
    return None if stuck else made, "; ".join(f"rank {rank} stays at {action}" for rank, action in stuck)


def _receive(send: Action) -> Action:
    op = Op.RECV_F if send.op is Op.SEND_F else Op.RECV_B
    return Action(send.peer, op, send.mb, peer=send.stage)
