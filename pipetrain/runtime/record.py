"""What a stage did in training, counted up window by window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipetrain.schedule.actions import COMMUNICATION, Op
from pipetrain.schedule.measured import RankWindow


def mean_of(counts: Mapping[int, int]) -> float:
    """Return the mean of values that are counted."""
    return sum(value * count for value, count in counts.items()) / (sum(counts.values()) or 1)


@dataclass(slots=True)
class StageRecord:
    """What one stage did in training: peaks and sums over all windows. Times in seconds."""

    peak_in_flight: int = 0
    peak_versions: int = 1
    staleness: dict[int, int] = field(default_factory=dict)  # forwards, by the updates that they are late by
    busy_s: float = 0.0
    wait_s: float = 0.0  # blocked in its sends and receives; a drain counts for its rank's first stage
    bytes_sent: int = 0  # as they were on the wire
    skipped: int = 0  # updates left out: their gradient was not finite
    raw_bytes: int = 0  # of what was sent, before it was encoded
    codec_s: float = 0.0  # of its sends and receives: encoding and decoding

    @property
    def max_staleness(self) -> int:
        """By how many updates the most late gradient was late."""
        return max(self.staleness, default=0)

    @property
    def mean_staleness(self) -> float:
        """By how many updates gradients were late on average."""
        return mean_of(self.staleness)

    @property
    def ratio(self) -> float | None:
        """How many times as large it would have been without codecs; None where it sent nothing."""
        return self.raw_bytes / self.bytes_sent if self.bytes_sent else None

    def copy(self) -> StageRecord:
        """Return what it says now."""
        return replace(self, staleness=dict(self.staleness))


def count(records: Mapping[int, StageRecord], window: RankWindow) -> None:
    """Add what a window took and sent to the records of one rank's stages."""
    messages = iter(window.messages)
    for action, start, end, blocked in window.timed:
        record = records[action.stage]
        if action.op in COMMUNICATION:
            nbytes, codec_s = next(messages)
            record.wait_s += blocked
            record.codec_s += codec_s
            record.bytes_sent += nbytes * (action.op in (Op.SEND_F, Op.SEND_B))
        else:
            record.busy_s += end - start
    records[min(records)].wait_s += window.drain[1] - window.drain[0] + window.undecided
