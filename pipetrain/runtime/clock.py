"""The times of the actions, measured on the device that ran them, in seconds of the host's clock.

On a GPU, moments are CUDA events, read once at the end of a window, because timing must not synchronise. An
event only knows its distance to another one, so one is recorded and waited for at the start of each window,
when the device is idle, and its host time is kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
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

    def begin(self) -> float:
        """Start a window: return the present in seconds of the host's clock."""
        if self._cuda:
            self._anchor = self.mark()
            self._anchor.synchronize()
        self._anchored = time.perf_counter()
        return self._anchored

    def mark(self) -> Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def durations(self, spans: Iterable[tuple[int, Mark, Mark]]) -> Iterator[tuple[int, float]]:
        """Convert (key, start, end) into (key, seconds); waits for the device once."""
        if self._cuda:
            torch.cuda.synchronize()
        for key, start, end in spans:
            yield key, start.elapsed_time(end) / 1000 if self._cuda else end - start

    def resolve(self, row: Row) -> Row:
        """Convert a window's marks into seconds of the host's clock; waits for the device once.

        On a GPU the host may wait for a message while the device still computes. Only the wait after the
        device is idle counts: the spans of messages and of the drain start there.
        """
        if not self._cuda:
            return row
        torch.cuda.synchronize()
        done = row.began
        spans: list[Span] = []
        for span in row.spans:
            if span.action is None or span.action.op in COMMUNICATION:
                start = max(span.start, done)
                waited = max(0.0, span.start + span.waited - start)
                spans.append(span._replace(start=start, end=max(span.end, start), waited=waited))
            else:
                start, done = self._seconds(span.start), self._seconds(span.end)
                spans.append(Span(span.action, start, done))
        return Row(row.began, time.perf_counter(), spans)

    def _seconds(self, event: Mark) -> float:
        return float(self._anchored + self._anchor.elapsed_time(event) / 1000)


class Stopwatch:
    """Measures the spans of one window of one rank: `start` before each action, `stop` after it.

    A policy's wait for one of several messages is added to the next message, if one follows.
    """

    def __init__(self, clock: Clock, channel: Channel) -> None:
        self._clock, self._channel = clock, channel
        self._began = clock.begin()
        self._spans: list[Span] = []
        self._wait: tuple[float, float] | None = None  # its start, and the channel's waited seconds then
        self._action: Action | None = None
        self._start: Mark = None
        self._before = (0.0, 0, 0.0)

    def start(self, action: Action | None) -> None:
        """Begin an action, or with None a wait outside of actions."""
        channel, self._action = self._channel, action
        if action is None or action.op in COMMUNICATION:
            now, waited = self._wait or (time.perf_counter(), channel.waited)
            self._start, self._before = now, (waited, channel.carried, channel.coded)
            self._wait = (now, waited) if action is None else None
            return
        self._end_wait()
        self._start = self._clock.mark()

    def stop(self) -> None:
        action, channel = self._action, self._channel
        if action is None:
            return
        if action.op in COMMUNICATION:
            waited, carried, coded = self._before
            self._spans.append(
                Span(
                    action,
                    self._start,
                    time.perf_counter(),
                    channel.waited - waited,
                    channel.carried - carried,
                    channel.coded - coded,
                )
            )
        else:
            self._spans.append(Span(action, self._start, self._clock.mark()))

    def row(self) -> Row:
        """End the window and return its spans."""
        self._end_wait()
        return self._clock.resolve(Row(self._began, time.perf_counter(), self._spans))

    def _end_wait(self) -> None:
        if self._wait is not None:
            since, waited = self._wait
            self._spans.append(Span(None, since, time.perf_counter(), self._channel.waited - waited))
            self._wait = None
