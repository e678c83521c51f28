"""The times of the actions, measured on the device that ran them, in seconds of the host's clock.

On a GPU, moments are CUDA events, read when the device has passed them, because timing must not synchronise.
An event only knows its distance to another one, so the first one is waited for, when the device is idle, and
its host time is kept; from then on the end of each window that was read is the anchor of the next one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipetrain.runtime.comm.channel import Channel
from pipetrain.runtime.stage.stage import Stage
from pipetrain.schedule.actions import COMMUNICATION, Action
from pipetrain.schedule.timeline import Row, Span, StageStats, add_stats

Mark = Any
"""A moment: seconds of the host's clock (float), or an event on the device's stream (torch.cuda.Event)."""
MAX_UNREAD = 256  # windows whose times need not have been read


class Clock:
    """Marks moments on one device."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"
        """Whether moments are events of a device, not the host's."""
        self._anchor: Mark = None
        self._anchor_s = 0.0
        self._stream: Any = None  # None: the current one

    def begin(self) -> Mark:
        """Mark the start of a window, on the stream that is current then."""
        if self.on_device:
            self._stream = torch.cuda.current_stream()
        if self.on_device and self._anchor is None:
            self._anchor = self.mark()
            self._anchor.synchronize()
            self._anchor_s = time.perf_counter()
        return self.mark()

    def mark(self) -> Mark:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)  # looking up the stream takes longer than to record
        return event

    def synchronize(self) -> None:
        if self.on_device:
            torch.cuda.synchronize()

    def resolve(self, row: Row) -> Row:
        """Convert a window's marks into seconds of the host's clock; waits for the device. In order.

        Where the host waits for messages, it may do so while the device still computes. Only the wait after
        the device is idle counts: the spans of such messages and of the drain start there.
        """
        if not self.on_device:
            return row
        last: Any = row.ended
        last.synchronize()
        began, ended = self._seconds(row.began), self._seconds(last)
        passed = began
        spans: list[Span] = []
        for span in row.spans:
            mark: Mark = span.start
            if isinstance(mark, float):
                start = max(span.start, passed)
                waited = max(0.0, span.start + span.waited - start)
                spans.append(span._replace(start=start, end=max(span.end, start), waited=waited))
                continue
            start, passed = self._seconds(span.start), self._seconds(span.end)
            message = span.action is not None and span.action.op in COMMUNICATION
            spans.append(span._replace(start=start, end=passed, waited=passed - start if message else 0.0))
        self._anchor, self._anchor_s = last, ended
        return Row(began, max([ended, *(span.end for span in spans)]), spans)

    def _seconds(self, event: Mark) -> float:
        return float(self._anchor_s + self._anchor.elapsed_time(event) / 1000)


class Stopwatch:
    """Measures the spans of one window of one rank: `start` before each action, `stop` after it.

    Messages for which the stream waits are marked on it, as computation is. An event that ends a span begins
    the next one too. `coding_s` returns the seconds of encoding and decoding so far.
    """

    def __init__(self, clock: Clock, channel: Channel, coding_s: Callable[[], float] = lambda: 0.0) -> None:
        self._clock, self._channel, self._coding_s = clock, channel, coding_s
        self._began = clock.begin()
        self._spans: list[Span] = []
        self._action: Action | None = None
        self._between_actions = False  # outside of actions
        self._end: Mark = self._began  # of the last span
        self._start: Mark = None
        self._counts_before: tuple[float, int, float] = (0.0, 0, 0.0)
        self._by_host = True

    def start(self, action: Action | None) -> None:
        """Begin an action, or with None a wait outside of actions, which lasts until the next start."""
        if self._between_actions:
            self.stop()
        channel = self._channel
        self._action, self._between_actions = action, action is None
        # The host's time counts for what the host does, and on a CPU for all.
        channel.deadline.begin()
        by_host = action is None or (not channel.ordered and action.op in COMMUNICATION)
        self._by_host = by_host or not self._clock.on_device
        shared = not self._by_host and not isinstance(self._end, float)
        self._start = self._end if shared else self._mark()
        self._counts_before = channel.waited, channel.transferred_bytes, self._coding_s()

    def stop(self) -> None:
        waited, nbytes, coding_s = self._counts_before
        channel, self._end = self._channel, self._mark()
        waited, nbytes = channel.waited - waited, channel.transferred_bytes - nbytes
        span = Span(self._action, self._start, self._end, waited, nbytes, self._coding_s() - coding_s)
        self._spans.append(span)
        self._between_actions = False

    def row(self) -> Row:
        """End the window and return its spans, to be resolved by the clock."""
        if self._between_actions:
            self.stop()
        return Row(self._began, self._marked_on_device(), self._spans)

    def _mark(self) -> Mark:
        return time.perf_counter() if self._by_host else self._marked_on_device()

    def _marked_on_device(self) -> Mark:
        mark = self._clock.mark()
        self._channel.deadline.mark(mark)
        return mark


class Times:
    """The statistics of each stage's training since they were taken.

    On a GPU, times are read when the device has passed them: the host does not wait for each window.
    """

    def __init__(self, stages: Mapping[int, Stage], clock: Clock) -> None:
        self._stages = stages
        self._clock = clock
        self._unread: deque[tuple[Row, int]] = deque()  # and microbatches a batch
        self.reset({})

    def reset(self, stats: Mapping[int, StageStats]) -> None:
        """Begin the statistics again, or go on from these."""
        self.stats = {stage: StageStats() for stage in self._stages} | dict(stats)

    def add(self, row: Row, microbatches: int, raw_bytes: Mapping[int, int], timed: bool) -> Row | None:
        """Add a window; return what it measured if it is `timed`, for which the host waits."""
        for index in self._stages:
            self.stats[index].raw_bytes += raw_bytes[index]
        self._unread.append((row, microbatches))
        read = self.read(wait=timed)
        return read if timed else None

    def read(self, wait: bool) -> Row | None:
        """Read the times of all windows, for which the host waits, or of those that are too many.

        Also count the updates that stages have skipped. Return what the last window measured.
        """
        for index, stage in self._stages.items():
            self.stats[index].skipped += stage.take_skipped()
        read = None
        while self._unread and (wait or len(self._unread) > MAX_UNREAD):
            row, microbatches = self._unread.popleft()
            read = self._clock.resolve(row)
            add_stats(self.stats, read, microbatches)
        return read
