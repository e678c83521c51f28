"""The actions of one rank in one window: a list made in advance, or the decisions of a policy.

The engine takes one action after the other, and asks whether a weight version is still needed. A list knows
its later actions; under a policy, forwards read only the newest weights, so an older version is needed while
a microbatch that read it is open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pipetrain.plan.blueprint import Plan
from pipetrain.runtime.stage import Saving
from pipetrain.schedule.actions import RECEIVES, Action, Op, last_uses, shortened
from pipetrain.schedule.lower import Route, Wiring
from pipetrain.schedule.policy import Policy, View, Wait

SHORT = 2  # batches in which a window does all that it ever does, such as keeping an old version


class Order(Protocol):
    """The actions of one rank in one window. For single use."""

    decided: bool  # whether it looks at the channel to decide, so that messages must be watched
    batches: int  # the number of batches in the window

    def receives(self) -> list[Action]:
        """Return all RECVs, in order on each edge."""

    def actions(self, view: View) -> Iterator[Action | Wait]:
        """Yield the actions; each is done when the next one is requested."""

    def needed(self, stage: int, version: int) -> bool:
        """Return whether an action after the current one reads a version of a stage's weights."""

    def saving(self, stage: int, mb: int) -> Saving:
        """Return what the forward of a microbatch is to save."""

    def short(self) -> Order:
        """Return an order of few batches that has each kind of action of this one; before it is used."""

    def shorten(self, batches: int) -> None:
        """End the window after `batches` batches; no later one may have begun."""


class Listed:
    """A program's list of actions, for `batches` batches of `microbatches` microbatches each."""

    decided = False

    def __init__(self, actions: Sequence[Action], batches: int = 1, microbatches: int = 1) -> None:
        self.batches = batches
        self._microbatches = microbatches
        self._actions = list(actions)
        self._last_uses = last_uses(self._actions)
        self._split = {(a.stage, a.mb) for a in actions if a.op is Op.I}
        self._recomputed = {(a.stage, a.mb) for a in actions if a.op is Op.R}
        self._position = -1

    def receives(self) -> list[Action]:
        return [action for action in self._actions if action.op in RECEIVES]

    def actions(self, view: View) -> Iterator[Action | Wait]:
        while self._position + 1 < len(self._actions):
            self._position += 1
            yield self._actions[self._position]

    def needed(self, stage: int, version: int) -> bool:
        return self._last_uses.get((stage, version), -1) > self._position

    def saving(self, stage: int, mb: int) -> Saving:
        return Saving((stage, mb) in self._split, (stage, mb) in self._recomputed)

    def short(self) -> Order:
        batches = min(SHORT, self.batches)
        actions = shortened(self._actions, batches, self._microbatches)
        return Listed(actions, batches, self._microbatches)

    def shorten(self, batches: int) -> None:
        self.batches = batches
        self._actions = shortened(self._actions, batches, self._microbatches)
        self._last_uses = last_uses(self._actions)


@dataclass(slots=True)
class Decided:
    """A policy's decisions for one stage."""

    policy: Policy
    stage: int
    stages: int
    batches: int
    microbatches: int
    routes: Sequence[Route] | None = None
    decided: bool = True
    _reads: dict[int, int] = field(default_factory=dict)  # open microbatch -> weight version
    _recomputes: bool = False

    def __post_init__(self) -> None:
        size = self.stages, self.batches, self.microbatches
        self._recomputes = self.policy.recomputes(self.stage, *size)

    def receives(self) -> list[Action]:
        wiring = Wiring([(rank,) for rank in range(self.stages)], self.routes)
        mbs = range(self.batches * self.microbatches)
        compute = [Action(self.stage, op, mb) for op in (Op.F, Op.B) for mb in mbs]
        return [receive for action in compute for receive in wiring.receives(action)]

    def actions(self, view: View) -> Iterator[Action | Wait]:
        size = self.stage, self.stages, lambda: self.batches, self.microbatches
        for action in self.policy.lowered(*size, view, self.routes):
            if isinstance(action, Action) and action.op is Op.F:
                self._reads[action.mb] = action.version
            elif isinstance(action, Action) and action.op in (Op.B, Op.W):
                del self._reads[action.mb]
            yield action

    def needed(self, stage: int, version: int) -> bool:
        return version in self._reads.values()

    def saving(self, stage: int, mb: int) -> Saving:
        return Saving(recomputed=self._recomputes)

    def short(self) -> Order:
        return replace(self, batches=min(SHORT, self.batches), _reads={})

    def shorten(self, batches: int) -> None:
        self.batches = batches


def order_of(plan: Plan, batches: int, rank: int) -> Order:
    """Return the actions of a rank in a window of `batches` batches, for single use."""
    m = plan.settings.microbatches
    if plan.policy is None:
        return Listed(plan.windows[batches].program[rank], batches, m)
    return Decided(plan.policy, rank, plan.stages, batches, m, plan.routes)
