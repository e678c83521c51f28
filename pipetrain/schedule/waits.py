"""What the actions of a simulation wait for: messages on bounded edges, and what stages tell each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipetrain.schedule.actions import Action, Placement


@dataclass(slots=True)
class BoundedEdge:
    """A bounded, ordered channel. Message k leaves when SEND k is issued and receive k is posted.

    Receive k is posted at the start for k < bound, else when RECV k - bound is done. SEND k blocks its rank
    until message k - bound has arrived.
    """

    sender: int
    receiver: int
    bound: int
    issued: list[float] = field(default_factory=list)
    travel: list[float] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)

    def send_free(self, now: float) -> float | None:
        """Return when the next SEND may be issued; None if unknown yet."""
        index = len(self.issued) - self.bound
        if index < 0:
            return now
        return max(now, self.arrived[index]) if index < len(self.arrived) else None

    def next_arrival(self, now: float) -> float | None:
        """Return when the next RECV has its message; None if unknown yet."""
        index = len(self.received)
        return max(now, self.arrived[index]) if index < len(self.arrived) else None

    def settle(self) -> bool:
        """Let the next message leave if it can; one event releases at most one message."""
        index = len(self.arrived)
        posted_by = index - self.bound
        if index >= len(self.issued) or posted_by >= len(self.received):
            return False
        posted = self.received[posted_by] if posted_by >= 0 else 0.0
        self.arrived.append(max(self.issued[index], posted) + self.travel[index])
        return True


class Told:
    """What some stages tell of each update, and each of their replicas; others wait until all of it came."""

    def __init__(self, name: str, stages: Iterable[int], ranks: Placement) -> None:
        self.name = name
        self._from = {(stage, rank) for stage in stages for rank in ranks[stage]}
        self._came: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)  # by version

    def tell(self, action: Action, rank: int, at: float) -> bool:
        """Return whether this is the last that was missing."""
        came = self._came[action.version]
        if (action.stage, rank) not in self._from:
            return False
        came[action.stage, rank] = at
        return len(came) == len(self._from)

    def heard(self, version: int, now: float) -> float | None:
        """Return when all has come; None if unknown yet."""
        came = self._came[version]
        return max([now, *came.values()]) if len(came) == len(self._from) else None

    def missing(self, version: int) -> str:
        """Return what has not come, in words; "" if all has."""
        stages = sorted({stage for stage, _ in self._from - self._came[version].keys()})
        return f"the {self.name} of stage {' and '.join(map(str, stages))}" if stages else ""
