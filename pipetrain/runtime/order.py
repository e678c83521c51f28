"""The actions of one rank in one window: a list made in advance, or the decisions of a policy.

The engine takes one action after the other, and asks whether a weight version is still needed. A list knows
its later actions; under a policy, forwards read only the newest weights, so an older version is needed while
a microbatch that read it is open.

A window may end early, if the run is asked to stop: before a batch of which no rank has posted a receive. So
the first stage's rank decides as many microbatches before that batch as receives are posted ahead, and one
more, before its forward. The others look after they have received that microbatch, so after the decision.
With replicas, of which some receive nothing of that rank, see schedule.looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate

from pipetrain.plan.plan import Plan
from pipetrain.runtime.mailbox import Mailbox
from pipetrain.runtime.stage.microbatch import Saving
from pipetrain.schedule.actions import (
    NO_PEER,
    RECEIVES,
    Action,
    Op,
    Predicted,
    Read,
    last_backwards,
    last_uses,
    predictions,
    shortened,
)
from pipetrain.schedule.policy import Wait
from pipetrain.schedule.posting_order import Post, Sum

SHORT = 2  # batches in which a window does all that it ever does, such as keeping an old version

StopCheck = Callable[[int, int], bool]
"""(batches, begun) -> whether the window, `begun` of whose batches have begun, ends after `batches`.

Every rank calls it with the same numbers of batches, in order."""
Decide = Callable[["Order", Mailbox], Iterator[Action | Wait]]
"""Yields a policy's actions for the stage and the size of an order."""


class Order:
    """A program's list of actions of one rank in one window, of `batches` batches. For single use.

    `home`: returns the rank that runs a (stage, microbatch). `stop_check` may end the window early; at most
    `ahead` receives are posted ahead on an edge. With `decide` the list is an example of the decisions, with
    the same messages. `posts`: where receives and sums are posted, see `make_posts`; without, where they are
    waited for. `stop_points`: where it asks `stop_check`, with replicas.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        home: Callable[[int, int], int],
        batches: int = 1,
        microbatches: int = 1,
        stop_check: StopCheck | None = None,
        ahead: int = 0,
        decide: Decide | None = None,
        posts: Sequence[Post] = (),
        stop_points: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.home, self.batches, self.microbatches = home, batches, microbatches
        self.decide = decide
        self._stop_check, self._ahead = stop_check, ahead
        self._list, self._posts = list(actions), list(posts)
        self._stop_points = None if stop_points is None else deque(stop_points)
        self._last_uses = last_uses(self._list)
        self._predicted = predictions(self._last_uses)
        self._split = {(a.stage, a.mb) for a in actions if a.op is Op.I}
        self._ending = {last for last, _ in last_backwards(self._list)}
        self.recomputed = {(a.stage, a.mb) for a in actions if a.op is Op.R}
        self.first = min((a.stage for a in actions), default=0)
        self._position, self._posted = -1, 0
        self._reads: dict[int, int] = {}  # under a policy: open microbatch -> weight version

    def short(self) -> Order:
        """Return an order of few batches that has each kind of action of this one; before it is used."""
        batches = min(SHORT, self.batches)
        actions = shortened(self._list, batches, self.microbatches)
        return Order(actions, self.home, batches, self.microbatches, decide=self.decide)

    def forwards(self, stages: Collection[int]) -> list[tuple[int, int]]:
        """Return the (stage, microbatch) of all forwards of some stages."""
        if not stages:
            return []
        return [(a.stage, a.mb) for a in self._list if a.op is Op.F and a.stage in stages]

    def receives(self) -> list[Action]:
        return [action for action in self._list if action.op in RECEIVES]

    def needed(self, stage: int, read: Read) -> bool:
        """Return whether an action after the current one reads these weights of a stage."""
        if self.decide:
            return read in self._reads.values()
        return self._last_uses.get((stage, read), -1) > self._position

    def predicted(self, stage: int, version: int) -> list[Predicted]:
        """Return what is to be predicted by a version of a stage's weights."""
        return [read for read in self._predicted.get((stage, version), ()) if self.needed(stage, read)]

    def ends_batch(self, backward: Action) -> bool:
        """Return whether a B or W is the last one of its batch on this rank."""
        return backward in self._ending

    def saving(self, stage: int, mb: int) -> Saving:
        return Saving((stage, mb) in self._split, (stage, mb) in self.recomputed)

    def actions(self, mail: Mailbox) -> Iterator[Action | Wait]:
        """Yield the actions; each is done when the next one is requested."""
        peers = [a.peer for a in self.receives() if (a.stage, a.op) == (self.first, Op.RECV_F)]
        asking = (self.first, Op.RECV_F if peers else Op.F, min(peers, default=NO_PEER))
        actions = self._decided(self.decide(self, mail)) if self.decide else self._listed(mail)
        asks = self._stop_check is not None and self._stop_points is None
        for action in actions:
            if not (asks and isinstance(action, Action) and (action.stage, action.op, action.peer) == asking):
                yield action
            elif peers:
                yield action
                self._ask(action.mb, mail)
            else:
                self._ask(action.mb, mail)
                yield action

    def _ask(self, mb: int, mail: Mailbox) -> None:
        """Ask whether the window ends after the batches of which receives may be posted by now."""
        batches, rest = divmod(mb + self._ahead + 1, self.microbatches)
        if not rest:
            self._look(batches, mb // self.microbatches + 1, mail)

    def _look(self, batches: int, begun: int, mail: Mailbox) -> None:
        if self._stop_check is not None and batches < self.batches and self._stop_check(batches, begun):
            self.batches = batches
            kept = shortened(self._list, batches, self.microbatches)
            stays = set(kept)
            left = [0, *accumulate(action in stays for action in self._list)]
            self._posts = [
                (left[at], one)
                for at, one in self._posts
                if (one.version <= batches if isinstance(one, Sum) else one.mb < batches * self.microbatches)
            ]
            self._list, self._last_uses = kept, last_uses(kept)
            mail.forget(batches * self.microbatches)

    def _listed(self, mail: Mailbox) -> Iterator[Action]:
        while self._position + 1 < len(self._list):
            self._position += 1
            while self._stop_points and self._stop_points[0][0] <= self._position < len(self._list):
                begun = 1 + self._position * self.batches // len(self._list)  # about
                self._look(self._stop_points.popleft()[1], begun, mail)
            while self._posted < len(self._posts) and self._posts[self._posted][0] <= self._position:
                mail.post(self._posts[self._posted][1])
                self._posted += 1
            if self._position < len(self._list):  # else the window has just ended
                yield self._list[self._position]

    def _decided(self, actions: Iterator[Action | Wait]) -> Iterator[Action | Wait]:
        for action in actions:
            if isinstance(action, Action) and action.op is Op.F:
                self._reads[action.mb] = action.version
            elif isinstance(action, Action) and action.op in (Op.B, Op.W):
                del self._reads[action.mb]
            yield action


def order_of(
    plan: Plan, batches: int, rank: int, stop_check: StopCheck | None = None, trains: bool = True
) -> Order:
    """Return the actions of a rank in a window of `batches` batches, of training or else of evaluation."""
    window = plan.training(batches) if trains else plan.evaluation(batches)
    actions, size = window.program[rank], (batches, plan.settings.microbatches if trains else 1)
    policy, stages, routes = plan.draft.policy, plan.stages, plan.cut.edges

    def decide(order: Order, mail: Mailbox) -> Iterator[Action | Wait]:
        assert policy is not None
        size = order.first, stages, lambda: order.batches, order.microbatches
        return policy.lowered(*size, mail, routes, bool(order.recomputed))

    if window.posts is None:
        return Order(
            actions, window.home, *size, stop_check, max(plan.cut.bounds.values(), default=0), decide
        )
    stop_points = None
    if stop_check is not None and plan.replicated:  # in an evaluation no rank is ahead of all others
        stop_points = plan.stop_points(batches)[rank] if trains else []
    return Order(
        actions, window.home, *size, stop_check, window.posts.ahead, None, window.posts.on(rank), stop_points
    )
