"""Where each rank posts its receives and sums, so that no program hangs on a GPU.

On a GPU a posted transfer is a kernel, and loading another kernel or allocating memory may wait for all
posted ones. So a receive is posted when its send is made, in one order of the actions of all ranks. A sum
over ranks is posted where the last rank contributes: of gradients of shared weights (TIE), of norms (NORM),
or of gradients of replicas (REDUCE). What replicas finish earlier, during their last backwards of a batch, is
posted when the last of these begins, and that backward posts it as it runs; if a replica has no such
backward, it is posted with the rest. The order is the simulation's. Everything that an action waits for comes
before it in this order, so the first unfinished action can always end, even if posting itself waits, as when
a message is allocated near the end of memory. Ranks that share sums post them in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import merge
from operator import itemgetter
from typing import NamedTuple

from pipetrain.schedule.actions import ALL, RECEIVES, SENDS, Action, Edge, Op, Tie, Ties, last_backwards
from pipetrain.schedule.lower import Lowering
from pipetrain.schedule.timeline import Timeline


class Sum(NamedTuple):
    """A sum over the ranks of a tie, or of one stage (its replicas), before the update to a version.

    `early`: of what is finished during the replicas' last backwards; the last of these begins the sum.
    """

    tie: Tie
    version: int
    early: bool = False


Post = tuple[int, Action | Sum]
"""(position, RECV or Sum): posted before the action at this position of its rank's list.

On rank 0 also (position, F) of another rank, to which rank 0 has sent the inputs before."""


@dataclass(frozen=True, slots=True)
class Posts:
    """Where the ranks post. `ahead`: the most receives of an edge that are posted and not yet done."""

    by_rank: list[list[Post]]  # ascending
    ahead: int
    deals: list[Post]  # of rank 0, the forwards of others

    def on(self, rank: int) -> list[Post]:
        return [*merge(self.by_rank[rank], [] if rank else self.deals, key=itemgetter(0))]


def make_posts(run: Timeline, bounds: Mapping[Edge, int], ties: Ties = ()) -> Posts:
    """Return where each rank of a simulated program posts, in the order of each edge and each sum.

    `bounds`: of a channel that posts receives ahead; both ends together have room for twice as many.
    """
    program = [row.actions for row in run.rows]
    lowering, done = Lowering.for_program(program), [0] * len(program)
    ranks = lowering.ranks
    tied = [tuple(sorted(tie)) for tie in ties]
    posts: list[list[Post]] = [[] for _ in program]
    deals = list[Post]()
    open_, ahead = Counter[tuple[Edge, int, int]](), max(bounds.values(), default=0)
    shares, early = Counter[Sum](), [dict(last_backwards(actions)) for actions in program]
    # This goes through all actions in the simulation's order. `done[rank]` is a rank's position meanwhile, so
    # what is posted before it is posted no later than the action that runs now.
    for rank in run.order:
        action = program[rank][done[rank]]
        if action.op in SENDS:
            to = lowering.rank(action.peer, action.mb)
            op = Op.RECV_F if action.op is Op.SEND_F else Op.RECV_B
            posts[to].append((done[to], Action(action.peer, op, action.mb, peer=action.stage)))
            open_[action.edge, rank, to] += 1
            ahead = max(ahead, open_[action.edge, rank, to])
        elif action.op is Op.F and action.stage == 0 and rank != 0:
            deals.append((done[0], action))
        elif action.op in RECEIVES:
            open_[action.edge, lowering.rank(action.peer, action.mb), rank] -= 1
        if reduce := early[rank].get(action):
            shares[sum_ := Sum((action.stage,), reduce.version, early=True)] += 1
            if shares[sum_] == len(of_stage := ranks[action.stage]) > 1:
                for replica in of_stage:
                    posts[replica].append((done[replica], sum_))
        done[rank] += 1
        for tie in _summed_at(action, tied):
            sources = [source for stage in tie or range(len(ranks)) for source in ranks[stage]]
            # A REDUCE ends on all ranks at once in the simulation, so its first rank posts it for all.
            sum_, together = Sum(tie, action.version), action.op is Op.REDUCE
            shares[sum_] += 1
            if shares[sum_] == (1 if together else len(sources)):
                for replica in set(sources) if len(set(sources)) > 1 else ():
                    posts[replica].append((done[replica] + (together and replica != rank), sum_))
    return Posts(posts, ahead, deals)


def _summed_at(action: Action, ties: list[Tie]) -> list[Tie]:
    """Return the ties to whose sums an action contributes."""
    if action.op is Op.TIE:
        return [tie for tie in ties if action.stage in tie]
    return [ALL] if action.op is Op.NORM else [(action.stage,)] if action.op is Op.REDUCE else []
