"""Traces the first windows (`trace=`): records their spans, and gathers them on rank 0.

Every rank sends its spans once, after the epoch of the last traced window. Its clock is compared with rank
0's before and after; between the two a linear drift is assumed.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from pipetrain.model.specs import Size
from pipetrain.records.history import About
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.actions import parse_action
from pipetrain.schedule.timeline import Row, Span, Timeline, TracedWindow

MOST_ACTIONS = 100_000  # per rank, in whole windows; one window is always traced


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of all ranks. `clock_error_s`: a bound on the difference between the ranks' clocks."""

    windows: list[TracedWindow]
    cut: str  # where the trace ends before the requested windows; empty if complete
    clock_error_s: float


class Tracer:
    """One rank's trace of the first windows. All ranks make the same calls."""

    def __init__(self, about: About, groups: ProcessGroups) -> None:
        self._about = about
        self._groups = groups
        self._actions, self._traced = 0, 0  # of the longest rank; windows
        self._cut = ""
        self._windows: list[tuple[int, list[int], Row]] = []  # epoch, samples of microbatches, spans
        self._began = self._compare_clocks()

    @property
    def over(self) -> bool:
        return bool(self._cut) or self._traced == self._about.settings.trace

    def traces(self, batches: int) -> bool:
        """Return whether the next window, of so many batches, is traced."""
        if self.over:
            return False
        self._actions += max(map(len, self._about.plan.training(batches).program))
        if self._traced and self._actions > MOST_ACTIONS:
            self._cut = f"at {MOST_ACTIONS} actions of a rank"
            return False
        self._traced += 1
        return True

    def add(self, epoch: int, sizes: Sequence[Size], row: Row) -> None:
        """Add a window of batches of these sizes, which has run."""
        m = self._about.settings.microbatches
        self._windows.append((epoch, [piece.samples for size in sizes for piece in size.pieces(m)], row))

    def collect(self, stopped: bool) -> Trace:
        """Gather the spans of all ranks, on the clock of rank 0. `stopped`: whether the run was stopped."""
        (began, first, error), (ended, last, other_error) = self._began, self._compare_clocks()
        drift = (last - first) / (ended - began)

        def shift(moment: float) -> float:
            return moment + first + drift * (moment - began)

        rows = [_as_json(row, shift) for *_, row in self._windows]
        ranks = self._groups.gather("the trace", {"rows": rows, "error_s": max(error, other_error)})
        m = self._about.settings.microbatches
        return Trace(
            [
                TracedWindow(epoch, samples, Timeline([_as_row(rank["rows"][n]) for rank in ranks], m))
                for n, (epoch, samples, _) in enumerate(self._windows)
            ],
            "where the run was stopped" if stopped and not self.over else self._cut,
            max(rank["error_s"] for rank in ranks),
        )

    def _compare_clocks(self) -> tuple[float, float, float]:
        return perf_counter(), *self._groups.clock_offset()


def about_trace(about: About, trace: Trace) -> dict[str, Any]:
    """Return the facts about the run in a trace."""
    return {
        **about.conditions(),
        "clock_error_us": round(1e6 * trace.clock_error_s, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _as_json(row: Row, shift: Callable[[float], float]) -> list[Any]:
    """Return a row as JSON data, its moments shifted."""
    spans = [
        [span.action and str(span.action), shift(span.start), shift(span.end), *span[3:]]
        for span in row.spans
    ]
    return [shift(row.began), shift(row.ended), spans]


def _as_row(data: list[Any]) -> Row:
    began, ended, spans = data
    return Row(began, ended, [Span(action and parse_action(action), *rest) for action, *rest in spans])
