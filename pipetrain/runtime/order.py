"""The actions of one rank in one window: a list made in advance, or the decisions of a policy.

The engine takes one action after the other, and asks whether a weight version is still needed. A list knows
its later actions; under a policy, forwards read only the newest weights, so an older version is needed while
a microbatch that read it is open.

A window may end early, where the run is asked to stop: before a batch of which no rank has posted a receive.
Receives are posted so far ahead, so the first stage's rank decides one microbatch more before that batch,
before its forward; the others look after they have received that microbatch, and so after the decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from pipetrain.plan.plan import Plan
from pipetrain.runtime.microbatch import Saving
from pipetrain.schedule.actions import NO_PEER, RECEIVES, Action, Edge, Op, last_uses, shortened
from pipetrain.schedule.policy import ForwardBackward, View, Wait

SHORT = 2  # batches in which a window does all that it ever does, such as keeping an old version

Ends = Callable[[int, int], bool]
"""(batches, begun) -> whether the window, `begun` of whose batches have begun, ends after `batches`.

Every rank calls it with the same numbers of batches, in order."""


class Receiving(View, Protocol):
    """What an order sees of the channel."""

    def forget(self, mb: int) -> None:
        """Cancel the receives of microbatches from `mb` on, none of which may have been posted."""


class Order:
    """A program's list of actions of one rank in one window, of `batches` batches. For single use.

    `ends` may end the window early; at most `ahead` receives are posted ahead on an edge.
    """

    decided = False
    """Whether it looks at the channel to decide, so that messages must be watched."""

    def __init__(
        self,
        actions: Sequence[Action],
        batches: int = 1,
        microbatches: int = 1,
        ends: Ends | None = None,
        ahead: int = 0,
    ) -> None:
        self.batches, self._microbatches = batches, microbatches
        self._ends, self._ahead = ends, ahead
        self._list = list(actions)
        self._last_uses = last_uses(self._list)
        self._split = {(a.stage, a.mb) for a in actions if a.op is Op.I}
        self._recomputed = {(a.stage, a.mb) for a in actions if a.op is Op.R}
        self._first = min((a.stage for a in actions), default=0)
        self._position = -1

    def short(self) -> Order:
        """Return an order of few batches that has each kind of action of this one; before it is used."""
        batches = min(SHORT, self.batches)
        return self._like(shortened(self._list, batches, self._microbatches), batches, self._microbatches)

    def _like(self, *order: Any) -> Order:
        return Order(*order)

    def receives(self) -> list[Action]:
        return [action for action in self._list if action.op in RECEIVES]

    def needed(self, stage: int, version: int) -> bool:
        """Return whether an action after the current one reads a version of a stage's weights."""
        return self._last_uses.get((stage, version), -1) > self._position

    def saving(self, stage: int, mb: int) -> Saving:
        return Saving((stage, mb) in self._split, (stage, mb) in self._recomputed)

    def actions(self, view: Receiving) -> Iterator[Action | Wait]:
        """Yield the actions; each is done when the next one is requested."""
        peers = [a.peer for a in self.receives() if (a.stage, a.op) == (self._first, Op.RECV_F)]
        asking = (self._first, Op.RECV_F if peers else Op.F, min(peers, default=NO_PEER))
        for action in self._actions(view):
            asks = isinstance(action, Action) and (action.stage, action.op, action.peer) == asking
            if asks and not peers:
                self._ask(action, view)
            yield action
            if asks and peers:
                self._ask(action, view)

    def _ask(self, action: Action | Wait, view: Receiving) -> None:
        """Ask whether the window ends after the batches of which receives may be posted by now."""
        assert isinstance(action, Action)
        batches, rest = divmod(action.mb + self._ahead + 1, self._microbatches)
        begun = action.mb // self._microbatches + 1
        if self._ends is not None and not rest and batches < self.batches and self._ends(batches, begun):
            self.batches = batches
            self._list = shortened(self._list, batches, self._microbatches)
            self._last_uses = last_uses(self._list)
            view.forget(batches * self._microbatches)

    def _actions(self, view: View) -> Iterator[Action | Wait]:
        while self._position + 1 < len(self._list):
            self._position += 1
            yield self._list[self._position]


class Decided(Order):
    """A policy's decisions for one stage. The list is an example of them, with the same messages."""

    decided = True

    def __init__(
        self, policy: ForwardBackward, stages: int, routes: Sequence[Edge] | None, *order: Any
    ) -> None:
        super().__init__(*order)
        self._policy, self._stages, self._routes = policy, stages, routes
        self._reads: dict[int, int] = {}  # open microbatch -> weight version

    def _like(self, *order: Any) -> Order:
        return Decided(self._policy, self._stages, self._routes, *order)

    def needed(self, stage: int, version: int) -> bool:
        return version in self._reads.values()

    def _actions(self, view: View) -> Iterator[Action | Wait]:
        size = self._first, self._stages, lambda: self.batches, self._microbatches
        for action in self._policy.lowered(*size, view, self._routes, bool(self._recomputed)):
            if isinstance(action, Action) and action.op is Op.F:
                self._reads[action.mb] = action.version
            elif isinstance(action, Action) and action.op in (Op.B, Op.W):
                del self._reads[action.mb]
            yield action


def order_of(plan: Plan, batches: int, rank: int, ends: Ends | None = None) -> Order:
    """Return the actions of a rank in a window of `batches` batches."""
    actions, ahead = plan.windows[batches].program[rank], max(plan.cut.bounds.values(), default=0)
    order = actions, batches, plan.settings.microbatches, ends, ahead
    return Order(*order) if plan.policy is None else Decided(plan.policy, plan.stages, plan.cut.edges, *order)
