"""Where each rank checks whether a window ends before a batch.

The first rank of stage 0 decides that. The others check before they begin anything of the batch, once they
have received or reduced something that depends on an action begun after the decision. So no check waits. To
begin is to run, to post, to read inputs after those of the last forward, or to have room for a receive.

Without replicas each rank receives every microbatch. So the first stage's rank decides before a forward that
precedes the batch by one microbatch more than the receives posted ahead. The others check after they have
received that microbatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from pipetrain.schedule.actions import NO_PEER, RECEIVES, SENDS, UPDATE, Action, Edge, Op
from pipetrain.schedule.lower import Lowering
from pipetrain.schedule.posting_order import Posts, Sum
from pipetrain.schedule.timeline import Timeline

StopPoints = list[tuple[int, int]]
"""(position, n): before this action a rank checks whether the window ends after n batches."""


def stop_points_in(actions: Sequence[Action], microbatches: int, ahead: int) -> StopPoints:
    """Return the stop points of a rank without replicas, which posts so many receives ahead on an edge."""
    first = min((action.stage for action in actions), default=0)
    peers = [a.peer for a in actions if (a.stage, a.op) == (first, Op.RECV_F)]
    asking = (first, Op.RECV_F, min(peers)) if peers else (first, Op.F, NO_PEER)
    points = StopPoints()
    for position, action in enumerate(actions):
        if (action.stage, action.op, action.peer) == asking:
            batches, rest = divmod(action.mb + ahead + 1, microbatches)
            points += [] if rest else [(position + bool(peers), batches)]
    return points


def stop_points_of(run: Timeline, posts: Posts, silent: Collection[Edge | int]) -> list[StopPoints]:
    """Return the stop points by rank, in a training with replicas.

    `silent`: edges with empty messages, and stages without weights, which have nothing to reduce.
    """
    lowering, clocks = Lowering.for_program([row.actions for row in run.rows]), _known(run, silent)
    leader, stop_points = lowering.ranks[0][0], list[StopPoints]([] for _ in run.rows)
    begins = [_begins(run, rank, posts, lowering) for rank in range(len(run.rows))]
    for batch, at in enumerate(map(list, zip(*begins, strict=True))):
        at[leader] = min(clocks[rank][position] for rank, position in enumerate(at)) - 1
        for rank, position in enumerate(at if at[leader] >= 0 else ()):
            stop_points[rank].append((position, batch))
    return stop_points


def _known(run: Timeline, silent: Collection[Edge | int]) -> list[list[int]]:
    """Return, by rank and position, how many actions of the first rank have surely begun by then.

    A vector clock of one entry: a message or a REDUCE carries its sender's count.
    """
    program = [row.actions for row in run.rows]
    ranks, clocks, by_position = (
        Lowering.for_program(program).ranks,
        [0] * len(program),
        [[0] for _ in program],
    )
    sent = dict[tuple[Edge | int, int], int]()  # by message, and by update of a stage
    for rank in run.order:
        action = program[rank][len(by_position[rank]) - 1]
        key = (action.stage, action.version) if action.op in UPDATE else (action.edge, action.mb)
        clocks[rank] += rank == ranks[0][0]
        if action.op in SENDS:
            sent[key] = clocks[rank]
        elif action.op is Op.REDUCE:  # the first one: all replicas have arrived
            sent.setdefault(key, max(clocks[replica] for replica in ranks[action.stage]))
        elif (action.op in RECEIVES or action.op in UPDATE) and key[0] not in silent:
            clocks[rank] = max(clocks[rank], sent[key])
        by_position[rank].append(clocks[rank])
    return by_position


def _begins(run: Timeline, rank: int, posts: Posts, lowering: Lowering) -> list[int]:
    """Return, by batch, the position where a rank begins that batch or a later one."""

    def batch(item: Action | Sum) -> int:
        updates = isinstance(item, Sum) or item.op in UPDATE
        return item.version - 1 if updates else item.mb // run.microbatches  # type: ignore[union-attr]

    actions, positions, before = run.rows[rank].actions, list[int](), defaultdict[object, list[int]](list)
    begins = [(at, batch(item)) for at, item in (*posts.on(rank), *enumerate(actions))]
    for at, action in enumerate(actions):
        if action.op in RECEIVES or action.op is Op.F:
            link = action.edge, action.op is Op.F or lowering.rank(action.peer, action.mb)
            ahead = 1 if action.op is Op.F else posts.ahead
            begins.append((before[link][-ahead] if len(before[link]) >= ahead else 0, batch(action)))
            before[link].append(at)
    for at, number in sorted(begins):
        positions += [at] * (number + 1 - len(positions))
    return positions
