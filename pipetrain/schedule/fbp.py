"""fbp, forward-backward parallelism: each stage takes what is ready, backward first.

What PipeDream's order fixes ahead is here left to the timing: a stage goes on with a forward while a gradient
is late, and catches up with backwards when they come, so stages whose times vary do not wait for each other
as long as the queue between them is neither full nor empty. The price is paid in staleness and in activations
held, and `in_flight` bounds both.

Three settings, apart: `in_flight`, the microbatches that a stage holds open; `buffer_size`, the messages
under way on an edge; and `microbatches`, as everywhere the pieces of a batch, so a step follows so many
backwards.
With `in_flight` 1, or on one rank, this is layer_dist.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipetrain.schedule.actions import Action, Op, ScheduleError
from pipetrain.schedule.policy import Bounds, Policy, View, Wait


@dataclass(frozen=True)
class ForwardBackward(Policy):
    """Backward first; a forward while fewer than `in_flight` microbatches are open and there is room."""

    in_flight: int

    def decide(
        self, stage: int, stages: int, batches: Callable[[], int], microbatches: int, view: View
    ) -> Iterator[Action | Wait]:
        """See Policy. A forward reads the newest weights, and its backward reads the same."""
        first, last = stage == 0, stage == stages - 1
        forwards, backwards, newest = 0, 0, 0
        reads: deque[int] = deque()  # of the open microbatches
        while backwards < (total := batches() * microbatches):
            gradient = Action(stage, Op.RECV_B, backwards)
            activation, onward = Action(stage, Op.RECV_F, forwards), Action(stage, Op.SEND_F, forwards)
            may_go_ahead = forwards < total and len(reads) < self.in_flight
            here = may_go_ahead and (first or view.arrived(activation))  # asked once: it may change
            if reads and (last or view.arrived(gradient)):
                if not last:
                    yield gradient
                yield Action(stage, Op.B, backwards, reads.popleft())
                if not first:
                    yield Action(stage, Op.SEND_B, backwards)
                backwards += 1
                if backwards % microbatches == 0:
                    newest += 1
                    yield Action(stage, Op.REDUCE, version=newest)
                    yield Action(stage, Op.STEP, version=newest)
            elif here and (last or view.room(onward)):
                if not first:
                    yield activation
                reads.append(newest)
                yield Action(stage, Op.F, forwards, newest)
                if not last:
                    yield onward
                forwards += 1
            else:
                receives = (gradient,) * bool(reads) + (activation,) * (may_go_ahead and not here)
                yield Wait(receives, (onward,) * here)

    def bounds(self, stage: int, stages: int, batches: int, microbatches: int) -> Bounds:
        """See Policy. A forward follows all but `in_flight - 1` of the backwards before it."""
        ahead = min(self.in_flight, batches * microbatches) - 1 if stage < stages - 1 else 0
        staleness = min(-(-ahead // microbatches), batches - 1)
        return Bounds(ahead + 1, staleness + 1, staleness)

    def refuse(self, ranks: int, batches: int, microbatches: int) -> None:
        """See Policy."""
        counts = {"ranks": ranks, "batches": batches, "microbatches": microbatches}
        for name, count in {**counts, "in_flight": self.in_flight}.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ScheduleError(f"schedule fbp needs {name} >= 1; got {name}={count}")
