"""Where receives and sums are posted, so that a program ends where computing waits for all its rank posted.

What is posted may be a kernel, and a kernel that computes may have to wait for all of them: while it is
loaded, or allocates. So a receive is posted where, in one order of all actions, its send is made; and a sum
over ranks where the last of them tells its share: of gradients of shared weights (TIE), of norms (NORM), and
of gradients of replicas (REDUCE). The order is that of the simulation, which shows by ending that there is
one. Then none hangs: whatever an action waits for comes before it in that order, so the first action that has
not ended can end. It can even if posting waits too, as where a message's memory is allocated near the end of
memory. And ranks that share sums post them in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipetrain.schedule.actions import ALL, RECEIVES, SENDS, Action, Edge, Op, Tie, Ties, ranks_of
from pipetrain.schedule.timeline import Timeline


class Sum(NamedTuple):
    """A sum over the ranks of a tie, or of one stage (its replicas), before the update to a version."""

    tie: Tie
    version: int


Post = tuple[int, Action | Sum]
"""(position, RECV or Sum): it is posted before the action at this position of its rank's list."""


@dataclass(frozen=True, slots=True)
class Posts:
    """Where the ranks post. `ahead`: the most receives of an edge that are posted and not received."""

    of: list[list[Post]]  # by rank, ascending
    ahead: int


def make_posts(run: Timeline, bounds: Mapping[Edge, int], ties: Ties = ()) -> Posts:
    """Return where each rank of a simulated program posts, in the order of each edge and each sum.

    `bounds`: those of the channel that posts all ahead; the room of both ends together is twice as much.
    """
    program = [row.actions for row in run.rows]
    ranks, done = ranks_of(program), [0] * len(program)
    tied = [tuple(sorted(tie)) for tie in ties]
    posts: list[list[Post]] = [[] for _ in program]
    open_, ahead = Counter[tuple[Edge, int]](), max(bounds.values(), default=0)
    told = Counter[Sum]()
    for rank in run.order:
        action = program[rank][done[rank]]
        if action.op in SENDS:
            to = ranks[action.peer][action.mb % len(ranks[action.peer])]
            posts[to].append((done[to], _receive(action)))
            open_[action.edge, to] += 1
            ahead = max(ahead, open_[action.edge, to])
        elif action.op in RECEIVES:
            open_[action.edge, rank] -= 1
        done[rank] += 1
        for tie in _told_by(action, tied):
            shares = [of for stage in tie or range(len(ranks)) for of in ranks[stage]]
            one, together = Sum(tie, action.version), action.op is Op.REDUCE  # which ends on all at once
            told[one] += 1
            if told[one] == (1 if together else len(shares)):
                for of in set(shares) if len(set(shares)) > 1 else ():
                    posts[of].append((done[of] + (together and of != rank), one))
    return Posts(posts, ahead)


def _told_by(action: Action, ties: list[Tie]) -> list[Tie]:
    """Return the sums of which an action tells a share."""
    if action.op is Op.TIE:
        return [tie for tie in ties if action.stage in tie]
    return [ALL] if action.op is Op.NORM else [(action.stage,)] if action.op is Op.REDUCE else []


def _receive(send: Action) -> Action:
    op = Op.RECV_F if send.op is Op.SEND_F else Op.RECV_B
    return Action(send.peer, op, send.mb, peer=send.stage)
