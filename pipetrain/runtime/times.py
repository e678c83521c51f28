"""What the stages of a rank have done, from the times of their windows.

On a GPU, times are read when the device has passed them: the host does not wait for each window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipetrain.runtime.clock import Clock
from pipetrain.runtime.stage import Stage
from pipetrain.schedule.timeline import Row, StageStats, stage_stats, total

UNREAD = 256  # windows whose times need not have been read

Observe = Callable[[Row], None]
"""Called with the measured spans of a window, after its end."""


@dataclass(slots=True)
class _Unread:
    """A window of training whose times have not been read."""

    row: Row
    microbatches: int
    skipped: Mapping[int, int]  # updates, by stage
    raw_bytes: Mapping[int, int]
    observe: Observe | None


class Times:
    """The statistics of each stage's training since they were taken."""

    def __init__(self, stages: Mapping[int, Stage], clock: Clock) -> None:
        self._stages = stages
        self._clock = clock
        self._skipped = dict.fromkeys(stages, 0)  # updates, up to the last window
        self._unread: deque[_Unread] = deque()
        self.stats = {stage: StageStats() for stage in stages}

    def add(self, row: Row, microbatches: int, raw_bytes: Mapping[int, int], observe: Observe | None) -> None:
        """Add a window; for `observe` the host waits until the device is done."""
        now = {index: stage.skipped for index, stage in self._stages.items()}
        skipped = {index: count - self._skipped[index] for index, count in now.items()}
        self._skipped = now
        self._unread.append(_Unread(row, microbatches, skipped, raw_bytes, observe))
        self.read(wait=observe is not None)

    def read(self, wait: bool) -> None:
        """Read the times of all windows, for which the host waits, or of those that are too many."""
        while self._unread and (wait or len(self._unread) > UNREAD):
            window = self._unread.popleft()
            row = self._clock.resolve(window.row)
            for index, stats in stage_stats(row, window.microbatches).items():
                stats.skipped = window.skipped[index]
                stats.raw_bytes = window.raw_bytes[index]
                self.stats[index] = total([self.stats[index], stats])
            if window.observe:
                window.observe(row)
