"""The actions of one rank in one window: a list made in advance, or what a policy decides.

The engine takes one action after the other, and asks whether a weight version is still needed. A list knows
its later actions. Of a policy the engine, and the messages, know nothing.

A window may end early, if the run is asked to stop: before a batch of which no rank has posted a receive.
Where a rank looks for that, its stop points, schedule/early_stop_points.py says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate

from pipetrain.plan.plan import Plan
from pipetrain.runtime.mailbox import Mailbox
from pipetrain.runtime.microbatch_feed import Feed
from pipetrain.runtime.stage.microbatch import Saving
from pipetrain.schedule.actions import (
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
from pipetrain.schedule.early_stop_points import StopPoints, stop_points_in
from pipetrain.schedule.policy import Wait
from pipetrain.schedule.posting_order import Post, Sum

SHORT = 2  # batches in which a window does all that it ever does, such as keeping an old version


class Order:
    """A program's list of actions of one rank in one window, of `batches` batches. For single use.

    `rank_of`: returns the rank that runs a (stage, microbatch). `stop_check` may end the window early: at
    `stop_points` every rank calls it, in order, with the same batches after which it might end, and with how
    many have started. `posts`: where receives and sums are posted, see `make_posts`; without, where they
    are waited for.
    """

    waiting: Wait | None = None
    """What is waited for between two actions."""
    _watched = False  # whether it looks at what has arrived

    def __init__(
        self,
        actions: Sequence[Action],
        rank_of: Callable[[int, int], int],
        batches: int = 1,
        microbatches: int = 1,
        stop_check: Callable[[int, int], bool] | None = None,
        stop_points: StopPoints | None = None,
        posts: Sequence[Post] = (),
    ) -> None:
        self.rank_of, self.batches, self.microbatches = rank_of, batches, microbatches
        self._stop_check, self._stop_points = stop_check, deque(stop_points or ())
        self._list, self._posts = list(actions), list(posts)
        self._last_uses = last_uses(self._list)
        self._predicted = predictions(self._last_uses)
        self._split = {(a.stage, a.mb) for a in actions if a.op is Op.I}
        self._ending = {last for last, _ in last_backwards(self._list)}
        self._recomputed = {(a.stage, a.mb) for a in actions if a.op is Op.R}
        self._position, self._posted = -1, 0

    def short(self) -> Order:
        """Return an order of few batches that has each kind of action of this one; before it is used."""
        batches = min(SHORT, self.batches)
        return self._with_actions(shortened(self._list, batches, self.microbatches), batches)

    def _with_actions(self, actions: Sequence[Action], batches: int) -> Order:
        return Order(actions, self.rank_of, batches, self.microbatches)

    def forwards(self, stages: Collection[int]) -> list[tuple[int, int]]:
        """Return the (stage, microbatch) of all forwards of some stages."""
        if not stages:
            return []
        return [(a.stage, a.mb) for a in self._list if a.op is Op.F and a.stage in stages]

    def begin(self, mail: Mailbox, feed: Feed) -> None:
        """Begin the window, with all its receives, in order on each edge."""
        receives = [action for action in self._list if action.op in RECEIVES]
        mail.begin(feed, receives, self.rank_of, watched=self._watched)

    def needed(self, stage: int, read: Read) -> bool:
        """Return whether an action after the current one reads these weights of a stage."""
        return self._last_uses.get((stage, read), -1) > self._position

    def predicted(self, stage: int, version: int) -> list[Predicted]:
        """Return what is to be predicted by a version of a stage's weights."""
        return [read for read in self._predicted.get((stage, version), ()) if self.needed(stage, read)]

    def ends_batch(self, backward: Action) -> bool:
        """Return whether a B or W is the last one of its batch on this rank."""
        return backward in self._ending

    def saving(self, stage: int, mb: int) -> Saving:
        return Saving((stage, mb) in self._split, (stage, mb) in self._recomputed)

    def actions(self, mail: Mailbox, before_wait: Callable[[], None]) -> Iterator[Action]:
        """Yield the actions; each is done when the next is requested. `before_wait`: called before a wait."""
        while self._position + 1 < len(self._list):
            self._position += 1
            while self._stop_points and self._stop_points[0][0] <= self._position < len(self._list):
                started = 1 + self._position * self.batches // len(self._list)  # about
                self._check_stop(self._stop_points.popleft()[1], started, mail)
            while self._posted < len(self._posts) and self._posts[self._posted][0] <= self._position:
                mail.post(self._posts[self._posted][1])
                self._posted += 1
            if self._position < len(self._list):  # else the window has just ended
                yield self._list[self._position]

    def _check_stop(self, batches: int, started: int, mail: Mailbox) -> None:
        if self._stop_check is not None and batches < self.batches and self._stop_check(batches, started):
            self.batches = batches
            remaining = shortened(self._list, batches, self.microbatches)
            remaining_set = set(remaining)
            new_positions = [0, *accumulate(action in remaining_set for action in self._list)]
            self._posts = [
                (new_positions[position], post)
                for position, post in self._posts
                if (
                    post.version <= batches
                    if isinstance(post, Sum)
                    else post.mb < batches * self.microbatches
                )
            ]
            self._list, self._last_uses = remaining, last_uses(remaining)
            mail.truncate(batches * self.microbatches)


class DecidedOrder(Order):
    """What a policy decides for the only stage of a rank, whose list is an example with the same messages.

    Forwards read only the newest weights, so an older version is needed while a microbatch that read it is
    open.
    """

    _watched = True

    def __init__(
        self,
        actions: Sequence[Action],
        rank_of: Callable[[int, int], int],
        batches: int,
        microbatches: int,
        stop_check: Callable[[int, int], bool] | None,
        plan: Plan,
    ) -> None:
        super().__init__(actions, rank_of, batches, microbatches, stop_check)
        self._plan = plan
        self._ahead = max(plan.cut.bounds.values(), default=0)  # receives posted ahead on an edge, at most
        self._reads: dict[int, int] = {}  # open microbatch -> weight version

    def _with_actions(self, actions: Sequence[Action], batches: int) -> Order:
        return DecidedOrder(actions, self.rank_of, batches, self.microbatches, None, self._plan)

    def needed(self, stage: int, read: Read) -> bool:
        return read in self._reads.values()

    def actions(self, mail: Mailbox, before_wait: Callable[[], None]) -> Iterator[Action]:
        plan, policy, recomputed = self._plan, self._plan.draft.policy, {mb for _, mb in self._recomputed}
        assert policy is not None
        window = self._list[0].stage, plan.stages, lambda: self.batches, self.microbatches
        for action in policy.lowered(*window, mail, plan.cut.edges, recomputed):
            if isinstance(action, Wait):
                before_wait()
                self.waiting = action
                mail.wait(action.receives, action.sends)
                self.waiting = None
                continue
            if action.op is Op.F:
                self._check_stop_before(action.mb, mail)
                self._reads[action.mb] = action.version
            elif action.op in (Op.B, Op.W):
                del self._reads[action.mb]
            yield action

    def _check_stop_before(self, mb: int, mail: Mailbox) -> None:
        """Before a forward, look whether the window ends after batches that may have been begun."""
        batches, rest = divmod(mb + self._ahead + 1, self.microbatches)
        if not rest:
            self._check_stop(batches, mb // self.microbatches + 1, mail)


def order_of(
    plan: Plan,
    batches: int,
    rank: int,
    stop_check: Callable[[int, int], bool] | None = None,
    trains: bool = True,
) -> Order:
    """Return the actions of a rank in a window of `batches` batches, of training or else of evaluation."""
    window = plan.training(batches) if trains else plan.evaluation(batches)
    m, points = plan.settings.microbatches if trains else 1, StopPoints()
    common = window.program[rank], window.home, batches, m, stop_check
    if window.posts is None:
        return DecidedOrder(*common, plan)
    if stop_check is not None and not plan.replicated:
        points = stop_points_in(window.program[rank], m, window.posts.ahead)
    elif stop_check is not None and trains:  # in an evaluation no rank is ahead of all others
        points = plan.stop_points(batches)[rank]
    return Order(*common, points, window.posts.on(rank))
