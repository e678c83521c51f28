"""When an action began and ended, on the device that ran it, told in seconds of the host's clock.

A GPU runs behind the host, so its marks are CUDA events, read once at the end of a window: timing must not
synchronise what it times. An event only knows its distance to another one, so one is recorded, waited for and
put down with the host's time at the start of each window, when the device has nothing to do anyhow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from pipetrain.schedule.actions import COMMUNICATION
from pipetrain.schedule.measured import RankWindow, Timed

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

    def resolve(self, window: RankWindow) -> RankWindow:
        """Turn a window's marks into seconds of the host's clock; waits for the device once.

        On a GPU the host often waits for a message while the device still computes. What counts as waiting is
        what is left when the device has done: a message's span starts there, and so does the drain's.
        """
        if not self._cuda:
            return window
        torch.cuda.synchronize()
        done = window.began
        timed: list[Timed] = []
        for action, start, end, blocked in window.timed:
            if action.op in COMMUNICATION:
                free = max(start, done)
                timed.append((action, free, max(end, free), max(0.0, start + blocked - free)))
            else:
                begun, done = self._seconds(start), self._seconds(end)
                timed.append((action, begun, done, 0.0))
        drain = tuple(max(moment, done) for moment in window.drain)
        ended = time.perf_counter()
        # What the host waited before it chose, the device may have computed.
        return replace(window, timed=timed, drain=(drain[0], drain[1]), ended=ended, undecided=0.0)

    def _seconds(self, event: Mark) -> float:
        return float(self._anchored + self._anchor.elapsed_time(event) / 1000)
