"""What simulated actions wait for: messages on bounded edges, and collectives of several stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from pipetrain.schedule.actions import Action, Placement


@dataclass(slots=True)
class BoundedEdge:
    """A bounded, ordered channel. Message k leaves when SEND k is issued and receive k is posted.

    Receive k is posted at the start for k < bound, else when RECV k - bound is done. SEND k blocks its rank
    until message k - bound has arrived. Entry k of each list is the time of message k.
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

    def deliver(self) -> bool:
        """Deliver the next message if it can leave; each event lets at most one message leave."""
        index = len(self.arrived)
        # The end of RECV `posted_by` posts receive `index`; below 0 it is posted at the start.
        posted_by = index - self.bound
        if index >= len(self.issued) or posted_by >= len(self.received):
            return False
        posted = self.received[posted_by] if posted_by >= 0 else 0.0
        self.arrived.append(max(self.issued[index], posted) + self.travel[index])
        return True


class Collective:
    """Numbers that the replicas of some stages send before each update; all wait until all have arrived."""

    def __init__(self, name: str, stages: Iterable[int], ranks: Placement) -> None:
        self.name = name
        self._from = {(stage, rank) for stage in stages for rank in ranks[stage]}
        self.ranks = {rank for _, rank in self._from}
        self._arrivals: dict[int, dict[tuple[int, int], float]] = defaultdict(dict)  # by version

    def send(self, action: Action, rank: int, arrives: float) -> bool:
        """Send a stage's numbers, once; return whether the collective is now complete."""
        arrivals, source = self._arrivals[action.version], (action.stage, rank)
        if source not in self._from or source in arrivals:
            return False
        arrivals[source] = arrives
        return len(arrivals) == len(self._from)

    def complete(self, version: int, now: float) -> float | None:
        """Return when all numbers have arrived; None if unknown yet."""
        arrivals = self._arrivals[version]
        return max([now, *arrivals.values()]) if len(arrivals) == len(self._from) else None

    def missing(self, version: int) -> list[tuple[int, int]]:
        """Return the stages, with their ranks, whose numbers have not been sent."""
        return sorted(self._from - self._arrivals[version].keys())
