"""The times of the actions, measured on the device that ran them, in seconds of the host's clock.

On a GPU, moments are CUDA events, read when the device has passed them, because timing must not synchronise.
An event only knows its distance to another one, so the first one is waited for, when the device is idle, and
its host time is kept; from then on the end of each window that was read is the anchor of the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from pipetrain.runtime.channel import Channel
from pipetrain.schedule.actions import COMMUNICATION, Action
from pipetrain.schedule.timeline import Row, Span

Mark = Any
"""A moment: seconds of the host's clock (float), or an event on the device's stream (torch.cuda.Event)."""


class Clock:
    """Marks moments on one device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._anchor: Mark = None
        self._anchored = 0.0
        self._stream: Any = None  # None: the current one

    def begin(self) -> Mark:
        """Mark the start of a window, on the stream that is current then."""
        if self._cuda:
            self._stream = torch.cuda.current_stream()
        if self._cuda and self._anchor is None:
            self._anchor = self.mark()
            self._anchor.synchronize()
            self._anchored = time.perf_counter()
        return self.mark()

    def mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)  # looking up the stream takes longer than to record
        return event

    def settle(self) -> None:
        """Wait for the device."""
        if self._cuda:
            torch.cuda.synchronize()

    def durations(self, spans: Iterable[tuple[int, Mark, Mark]]) -> Iterator[tuple[int, float]]:
        """Convert (key, start, end) into (key, seconds); waits for the device once."""
        if self._cuda:
            torch.cuda.synchronize()
        for key, start, end in spans:
            yield key, start.elapsed_time(end) / 1000 if self._cuda else end - start

    def resolve(self, row: Row) -> Row:
        """Convert a window's marks into seconds of the host's clock; waits for the device. In order.

        Where the host waits for messages, it may do so while the device still computes. Only the wait after
        the device is idle counts: the spans of such messages and of the drain start there.
        """
        if not self._cuda:
            return row
        last: Any = row.ended
        last.synchronize()
        began, ended = self._seconds(row.began), self._seconds(last)
        done = began
        spans: list[Span] = []
        for span in row.spans:
            mark: Mark = span.start
            if isinstance(mark, float):
                start = max(span.start, done)
                waited = max(0.0, span.start + span.waited - start)
                spans.append(span._replace(start=start, end=max(span.end, start), waited=waited))
                continue
            start, done = self._seconds(span.start), self._seconds(span.end)
            message = span.action is not None and span.action.op in COMMUNICATION
            spans.append(span._replace(start=start, end=done, waited=done - start if message else 0.0))
        self._anchor, self._anchored = last, ended
        return Row(began, max([ended, *(span.end for span in spans)]), spans)

    def _seconds(self, event: Mark) -> float:
        return float(self._anchored + self._anchor.elapsed_time(event) / 1000)


class Stopwatch:
    """Measures the spans of one window of one rank: `start` before each action, `stop` after it.

    A policy's wait for one of several messages is added to the next message, if one follows. Messages for
    which the stream waits are marked on it, as computation is. `coded` returns the seconds of encoding and
    decoding so far.
    """

    def __init__(self, clock: Clock, channel: Channel, coded: Callable[[], float] = lambda: 0.0) -> None:
        self._clock, self._channel, self._coded = clock, channel, coded
        self._began = clock.begin()
        self._spans: list[Span] = []
        self._wait: tuple[float, float] | None = None  # its start, and the channel's waited seconds then
        self._action: Action | None = None
        self._start: Mark = None
        self._before = (0.0, 0, 0.0)

    def start(self, action: Action | None) -> None:
        """Begin an action, or with None a wait outside of actions."""
        channel, self._action = self._channel, action
        if self._by_host(action):
            now, waited = self._wait or (time.perf_counter(), channel.waited)
            self._start, self._before = now, (waited, channel.carried, self._coded())
            self._wait = (now, waited) if action is None else None
            return
        self._end_wait()
        self._start, self._before = self._clock.mark(), (channel.waited, channel.carried, self._coded())

    def _by_host(self, action: Action | None) -> bool:
        """Return whether it is the host that waits."""
        return action is None or (action.op in COMMUNICATION and not self._channel.ordered)

    def stop(self) -> None:
        action, channel = self._action, self._channel
        if action is None:
            return
        end = time.perf_counter() if self._by_host(action) else self._clock.mark()
        span = Span(action, self._start, end)
        if action.op in COMMUNICATION:
            waited, carried, coded = self._before
            sums = channel.waited - waited, channel.carried - carried, self._coded() - coded
            span = Span(action, self._start, end, *sums)
        self._spans.append(span)

    def row(self) -> Row:
        """End the window and return its spans, to be resolved by the clock."""
        self._end_wait()
        return Row(self._began, self._clock.mark(), self._spans)

    def _end_wait(self) -> None:
        if self._wait is not None:
            since, waited = self._wait
            self._spans.append(Span(None, since, time.perf_counter(), self._channel.waited - waited))
            self._wait = None
