"""What was measured of a program as it ran: when each rank did each action, all on one clock.

The same shape as a simulation, so that the two can be held against each other. Times in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pipetrain.schedule.actions import Action

Timed = tuple[Action, float, float, float]
"""(action, start, end, blocked): of the time from start, so much went by waiting for another rank.

A wait is the first thing that a SEND (for room) or a RECV (for its message) does; other actions have none.
With a codec a SEND encodes before it waits, and counts as if it did so afterwards.
"""

Carried = tuple[int, float]
"""(bytes on the wire, seconds of encoding or decoding) of a message that was sent or received."""


@dataclass(slots=True)
class RankWindow:
    """One rank's run of one window: from before its receives are posted to after its sends are taken."""

    began: float
    timed: list[Timed]
    drain: tuple[float, float]
    ended: float
    messages: list[Carried] = field(default_factory=list)  # of each SEND and RECV, in the order of `timed`
    undecided: float = 0.0  # seconds that a policy waited for room before it chose a forward

    @property
    def waited(self) -> float:
        """Seconds that the rank was blocked: in its messages, and in the drain."""
        return sum(blocked for *_, blocked in self.timed) + self.drain[1] - self.drain[0] + self.undecided


@dataclass(frozen=True, slots=True)
class TracedWindow:
    """One window of training as all its ranks ran it."""

    epoch: int  # from 0
    samples: list[int]  # of each microbatch
    ranks: list[RankWindow]
