"""What actions cost in seconds, as measured or predicted: what `simulate` needs to speak of real time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipetrain.schedule.actions import Action, Op


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of each kind of action at each stage: a `Cost` for `simulate`.

    Of a SEND, the time that its message travels while the sender goes on. What is not listed costs nothing.
    """

    seconds: Mapping[tuple[int, Op], float]

    def __call__(self, action: Action) -> float:
        """Price one action."""
        return self.seconds.get((action.stage, action.op), 0.0)
