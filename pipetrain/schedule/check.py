"""Checks that a lowered program is sound, before a process group exists.

One rule covers most of it: forwards, input gradients and weight gradients of a stage each come in ascending
order 0, 1, 2, ..., so nothing is missing or done twice (of r replicas, each has every r-th). Every schedule
must keep it, because running statistics (BatchNorm) and sums of gradients depend on the order: with one
order, runs with one seed are equal to the last bit, and equal the plain training loop. It also gives both
ends of every edge the same order of messages. `simulate` finds deadlocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from pipetrain.schedule.actions import (
    COMMUNICATION,
    COMPUTE,
    UPDATE,
    Action,
    Edge,
    Op,
    Predicted,
    Program,
    Read,
    ScheduleError,
    Ties,
    ranks_of,
    rounds,
)
from pipetrain.schedule.lower import compute_only, lower
from pipetrain.schedule.transforms import with_delays, with_norms, with_ties, without_norms

_COUNTED = {
    Op.F: ("forwards",),
    Op.B: ("input gradients", "weight gradients"),
    Op.I: ("input gradients",),
    Op.W: ("weight gradients",),
}
_NEEDS = {Op.B: "forwards", Op.I: "forwards", Op.W: "input gradients"}


def check(
    program: Program,
    batches: int,
    microbatches: int,
    routes: Sequence[Edge] | None = None,
    norms: bool = False,
    ties: Ties = (),
) -> None:
    """Refuse an unsound lowered program: raises ScheduleError, naming rank and action.

    Every stage has each microbatch's F once, then its B (or I, then W) once, each kind ascending. A backward
    reads its forward's version. A version is read only after the STEP that makes it, so it is never newer
    than the microbatch's batch. An R comes between F and B or I, at most once. Batch n's STEP makes version n
    + 1 after exactly its backwards and before those of the next batch. A prediction looks at most as far
    ahead as the microbatch's own update; the delay of a STEP is that of the latest microbatch of its batch on
    all ranks. Communication is what `lower` makes of the rest. `norms`: every update waits for the norms of
    all stages, with NORM and STEP where `with_norms` puts them; without it there is no NORM. `ties`: the
    stages that share weights, whose updates wait as `with_ties` says.
    """
    ranks = ranks_of(program)
    idle = [rank for rank, actions in enumerate(program) if not actions]
    if idle or not program:
        raise ScheduleError(f"ranks {idle} have nothing to do: take fewer ranks, or more stages")
    window, round_ = range(batches * microbatches), rounds(program, batches, microbatches)
    stages = {
        (stage, rank): _Stage(microbatches, [mb for mb in window if mb % round_ % len(holders) == index])
        for stage, holders in enumerate(ranks)
        for index, rank in enumerate(holders)
    }
    for rank, actions in enumerate(program):
        for action in actions:
            if problem := stages[action.stage, rank].take(action):
                raise ScheduleError(f"rank {rank} has {action}: {problem}")
    for (index, rank), stage in stages.items():
        if problem := stage.end(batches):
            raise ScheduleError(f"rank {rank}, at its end, has done of stage {index} {problem}")
    _check_delays(program, microbatches)
    _check_communication(program, routes, norms, ties)


def _check_delays(program: Program, microbatches: int) -> None:
    """Refuse a STEP with a wrong delay, if any STEP has one."""
    if not any(action.op is Op.STEP and action.delay for actions in program for action in actions):
        return
    right = with_delays(program, microbatches, predicts=False, rates=True)
    for rank, (actions, expected) in enumerate(zip(program, right, strict=True)):
        for action, other in zip(actions, expected, strict=True):
            if action != other:
                raise ScheduleError(f"rank {rank} has {action}: its batch is {other.delay} updates late")


def _check_communication(program: Program, routes: Sequence[Edge] | None, norms: bool, ties: Ties) -> None:
    compute = with_ties(without_norms(compute_only(program)), ties)
    canonical = lower(with_norms(compute) if norms else compute, routes)
    earlier = ["with_ties()"] * bool(ties) + ["with_norms()"] * norms
    after = f", after {' and '.join(earlier)}" if earlier else ""
    for rank, (actions, right) in enumerate(zip(program, canonical, strict=True)):
        if actions != right:
            for actual, expected in zip_longest(actions, right):
                if actual != expected:
                    raise ScheduleError(
                        f"rank {rank} has {actual or 'nothing more'} where {expected or 'nothing'} belongs: "
                        f"its communication must be what lower() makes{after}"
                    )


@dataclass(slots=True)
class _Stage:
    """The state of one stage on one rank, which runs the microbatches `mbs` of the window."""

    microbatches: int
    mbs: list[int]
    done: dict[str, int] = field(
        default_factory=lambda: {"forwards": 0, "input gradients": 0, "weight gradients": 0}
    )
    newest: int = 0
    reads: dict[int, Read] = field(default_factory=dict)  # what each forward read
    recomputed: set[int] = field(default_factory=set)

    def take(self, action: Action) -> str:
        """Do an action; return what is wrong with it, or ""."""
        if action.op in COMPUTE:
            return self._compute(action)
        if action.op in UPDATE and action.mb:
            return f"an update has no microbatch, and this one has mb={action.mb}"
        if action.op in COMMUNICATION and action.version:
            return f"a message has no version, and this one has version={action.version}"
        return self._step(action) if action.op is Op.STEP else ""

    def _compute(self, action: Action) -> str:
        op, mb = action.op, action.mb
        if op is Op.R:
            return self._recompute(action)
        for kind in _COUNTED[op]:
            following = self.mbs[self.done[kind] :][:1]
            if [mb] != following:
                what = f"the next is of microbatch {following[0]}" if following else "all are done"
                return f"its {kind} must ascend, each once, and {what}"
        if op is Op.F:
            if not 0 <= action.version <= self.newest:
                return f"version {action.version} is not made yet; the newest is {self.newest}"
            if action.delay > mb // self.microbatches - action.version:
                return f"it predicts beyond its own update, that of batch {mb // self.microbatches}"
            self.reads[mb] = action.read
        else:
            if self.done[_COUNTED[op][0]] >= self.done[_NEEDS[op]]:
                return f"it comes before microbatch {mb} was among the {_NEEDS[op]}"
            if action.read != self.reads[mb]:
                return f"its forward read {_in_words(self.reads[mb])}"
            if op is not Op.I and mb // self.microbatches != self.newest:
                return f"it is of batch {mb // self.microbatches}, yet batch {self.newest} is still to STEP"
        for kind in _COUNTED[op]:
            self.done[kind] += 1
        return ""

    def _recompute(self, action: Action) -> str:
        mb = action.mb
        if mb not in self.reads:
            return f"it comes before the forward of microbatch {mb}"
        if mb in self.mbs[: self.done["input gradients"]]:
            return f"the backward of microbatch {mb} has begun"
        if mb in self.recomputed:
            return f"microbatch {mb} has been recomputed"
        self.recomputed.add(mb)
        return "" if action.read == self.reads[mb] else f"its forward read {_in_words(self.reads[mb])}"

    def _step(self, action: Action) -> str:
        if action.version != self.newest + 1:
            return f"the next STEP makes version {self.newest + 1}"
        done = self.done["weight gradients"]
        expected = bisect_left(self.mbs, action.version * self.microbatches)
        if done != expected:
            return f"it comes after {done} weight gradients, and its batch ends with number {expected}"
        self.newest += 1
        return ""

    def end(self, batches: int) -> str:
        """Return what is missing or too much at the end of the window, or ""."""
        for kind, done in self.done.items():
            if done != len(self.mbs):
                return f"{done} {kind} of {len(self.mbs)}"
        return f"{self.newest} updates of {batches}" if self.newest != batches else ""


def _in_words(read: Read) -> str:
    return f"version {read.version}, {read.ahead} ahead" if isinstance(read, Predicted) else f"version {read}"
