"""Where receives and sums are posted, so that a program ends where computing waits for all its rank posted.

What is posted may be a kernel, and a kernel that computes may have to wait for all of them: while it is
loaded, or allocates. So a receive is posted where, in one global order, its send is made; and a sum over
ranks where the last of them tells its share: of gradients of shared weights (TIE), of norms (NORM), and of
gradients of replicas (REDUCE). Then none hangs: whatever an action waits for comes before it in that order,
so the first action that has not ended can end. It can even if posting waits too, as where memory for a
message is allocated near the end of memory. And ranks that share sums post them in one order.

The order gives each rank one computation in turn, and shows by ending that there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pipetrain.schedule.actions import (
    ALL,
    COMMUNICATION,
    COMPUTE,
    SENDS,
    UPDATE,
    Action,
    Edge,
    Op,
    Program,
    ScheduleError,
    Tie,
    Ties,
    has_norms,
    ranks_of,
)
from pipetrain.schedule.waits import Told


class Sum(NamedTuple):
    """A sum over the ranks of a tie, or of one stage (its replicas), before the update to a version."""

    tie: Tie
    version: int


_UPDATE = (Op.REDUCE, Op.TIE, Op.NORM, Op.STEP)  # in this order

Post = tuple[int, Action | Sum]
"""(position, RECV or Sum): it is posted before the action at this position of its rank's list."""


@dataclass(frozen=True, slots=True)
class Posts:
    """Where the ranks post. `ahead`: the most receives of an edge that are posted and not received."""

    of: list[list[Post]]  # by rank, ascending
    ahead: int


def make_posts(program: Program, bounds: Mapping[Edge, int], ties: Ties = ()) -> Posts:
    """Return where each rank of a lowered program posts, in the order of each edge and each sum.

    At most `bounds` of an edge are posted and not received, or twice as many where the program needs the room
    that both ends have together. Raises ScheduleError for a program that hangs even so.
    """
    most = max(bounds.values(), default=0)
    play = _Play(program, bounds, ties)
    if not play.ends():
        most, play = 2 * most, _Play(program, {edge: 2 * bound for edge, bound in bounds.items()}, ties)
        if not play.ends():
            stuck = "; ".join(f"rank {rank} stays at {action}" for rank, action in play.left())
            raise ScheduleError(
                f"where computing waits for all that its rank posted the program hangs: {stuck}"
            )
    return Posts(play.posts, most)


class _Play:
    """A program that is played in one order of all its actions. `posts`: by rank, of what others begin."""

    def __init__(self, program: Program, room: Mapping[Edge, int], ties: Ties) -> None:
        self._program, self._room, self._ranks = program, room, ranks_of(program)
        self._done = [0] * len(program)
        self._under_way: Counter[tuple[Edge, int, int]] = Counter()  # messages, by edge and ranks
        self.posts: list[list[Post]] = [[] for _ in program]
        stages = range(len(self._ranks))
        spread = [stage for stage, ranks in enumerate(self._ranks) if len(ranks) > 1]
        groups: list[tuple[Op, Tie]] = [(Op.REDUCE, (stage,)) for stage in spread]
        groups += [(Op.TIE, tuple(sorted(tie))) for tie in ties]
        groups += [(Op.NORM, ALL)] if has_norms(program) else []
        self._sums = [(op, tie, Told("", tie or stages, self._ranks)) for op, tie in dict.fromkeys(groups)]

    def ends(self) -> bool:
        """Play as far as it goes; return whether that is to the end."""
        while sum(self._turn(rank) for rank in range(len(self._program))):
            pass
        return not any(self.left())

    def left(self) -> Iterator[tuple[int, Action]]:
        """Yield the ranks that have not ended, and where they are."""
        for rank, (at, actions) in enumerate(zip(self._done, self._program, strict=True)):
            if at < len(actions):
                yield rank, actions[at]

    def _turn(self, rank: int) -> bool:
        """Let a rank go on until it has computed once, or must wait; return whether it did anything."""
        actions, start = self._program[rank], self._done[rank]
        while self._done[rank] < len(actions) and self._do(rank, action := actions[self._done[rank]]):
            self._done[rank] += 1
            if action.op in COMPUTE:
                break
        return self._done[rank] > start

    def _do(self, rank: int, action: Action) -> bool:
        """Do an action; return False where it must wait."""
        if action.op in COMMUNICATION:
            return self._exchange(rank, action)
        return action.op not in UPDATE or self._update(rank, action)

    def _exchange(self, rank: int, action: Action) -> bool:
        others = self._ranks[action.peer]
        other, sends = others[action.mb % len(others)], action.op in SENDS
        way = (action.edge, rank, other) if sends else (action.edge, other, rank)
        if self._under_way[way] >= self._room[action.edge] if sends else not self._under_way[way]:
            return False
        self._under_way[way] += 1 if sends else -1
        if sends:
            self.posts[other].append((self._done[other], _receive(action)))
        return True

    def _update(self, rank: int, action: Action) -> bool:
        """Tell an action's shares; the last one of a sum posts it. What is told earlier is waited for."""
        sums = [one for one in self._sums if not one[1] or action.stage in one[1]]
        earlier = _UPDATE[: _UPDATE.index(action.op)]
        if any(op in earlier and told.heard(action.version, 0.0) is None for op, _, told in sums):
            return False
        for op, tie, told in sums:
            if op is action.op and told.tell(action, rank, 0.0):
                ranks = {of for stage in tie or range(len(self._ranks)) for of in self._ranks[stage]}
                for of in ranks if len(ranks) > 1 else ():
                    self.posts[of].append((self._done[of] + (of == rank), Sum(tie, action.version)))
        return True


def _receive(send: Action) -> Action:
    op = Op.RECV_F if send.op is Op.SEND_F else Op.RECV_B
    return Action(send.peer, op, send.mb, peer=send.stage)
