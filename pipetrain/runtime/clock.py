"""When an action began and ended, on the device that ran it.

A GPU runs behind the host, so its marks are CUDA events, read once at the end of a window: timing must not
synchronise what it times.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

Mark = Any
"""A moment: seconds of the host's clock (float), or an event in the device's stream (torch.cuda.Event)."""


class Clock:
    """Marks moments on one device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

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
