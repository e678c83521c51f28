"""When each action began and ended, on the device that ran it, told in seconds of the host's clock.

A GPU runs behind the host, so its marks are CUDA events, read once at the end of a window: timing must not
synchronise what it times. An event only knows its distance to another one, so one is recorded, waited for and
put down with the host's time at the start of each window, when the device has nothing to do anyhow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch

from pipetrain.schedule.actions import COMMUNICATION, Action
from pipetrain.schedule.timeline import Row, Span

Mark = Any
"""A moment: seconds of the host's clock (float), or an event in the device's stream (torch.cuda.Event)."""


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
        """Mark the present moment."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def durations(self, spans: Iterable[tuple[int, Mark, Mark]]) -> Iterator[tuple[int, float]]:
        """Turn (key, start, end) into (key, seconds); waits for the device once."""
        if self._cuda:
            torch.cuda.synchronize()
        for key, start, end in spans:
            yield key, start.elapsed_time(end) / 1000 if self._cuda else end - start

    def resolve(self, row: Row) -> Row:
        """Turn a window's marks into seconds of the host's clock; waits for the device once.

        On a GPU the host often waits for a message while the device still computes. What counts as waiting is
        what is left when the device has done: a message's span starts there, and so does the drain's.
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


class Counts(Protocol):
    """What a channel has counted so far."""

    @property
    def waited(self) -> float:
        """Seconds that it has been blocked by other ranks."""

    @property
    def coded(self) -> float:
        """Seconds that it has encoded and decoded."""

    @property
    def carried(self) -> int:
        """Bytes that it has sent and received, on the wire."""


class Stopwatch:
    """Takes the spans of one window of one rank: `start` before each action, `stop` after it.

    A policy's wait for one of several messages belongs to the message that is exchanged next, if one is.
    """

    def __init__(self, clock: Clock, channel: Counts) -> None:
        self._clock, self._channel = clock, channel
        self._began = clock.begin()
        self._spans: list[Span] = []
        self._wait: tuple[float, float] | None = None  # when one began, and what the channel had waited
        self._action: Action | None = None
        self._start: Mark = None
        self._before = (0.0, 0, 0.0)

    def start(self, action: Action | None) -> None:
        """Begin an action; or, with None, a wait that belongs to none."""
        channel, self._action = self._channel, action
        if action is None or action.op in COMMUNICATION:
            now, waited = self._wait or (time.perf_counter(), channel.waited)
            self._start, self._before = now, (waited, channel.carried, channel.coded)
            self._wait = (now, waited) if action is None else None
            return
        self._end_wait()
        self._start = self._clock.mark()

    def stop(self) -> None:
        """End the action."""
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
        """End the window."""
        self._end_wait()
        return self._clock.resolve(Row(self._began, time.perf_counter(), self._spans))

    def _end_wait(self) -> None:
        if self._wait is not None:
            since, waited = self._wait
            self._spans.append(Span(None, since, time.perf_counter(), self._channel.waited - waited))
            self._wait = None
