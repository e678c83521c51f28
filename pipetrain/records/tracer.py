"""Traces the first windows (`trace=`): keeps their spans, and gathers them on rank 0.

Every rank sends its spans once, after the epoch of the last traced window. Its clock is compared with rank
0's before and after; a linear drift is assumed in between.
"""

from __future__ import annotations

import platform
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch

from pipetrain.checkpoint.files import Position
from pipetrain.data.loader import pieces
from pipetrain.plan.program import window_lengths
from pipetrain.records.history import About
from pipetrain.runtime.clock import Observe
from pipetrain.runtime.mesh import Mesh
from pipetrain.schedule.actions import Op, parse_action
from pipetrain.schedule.timeline import Row, Span, Timeline, TracedWindow

MOST_ACTIONS = 100_000  # per rank, in whole windows; one window is always traced


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of all ranks. `clock_error_s`: the bound of the difference of the ranks' clocks."""

    windows: list[TracedWindow]
    cut: str  # where the trace ends before the requested windows; empty if it is complete
    clock_error_s: float


class Tracer:
    """One rank's trace of the first windows from a position on. All ranks make the same calls."""

    def __init__(self, about: About, mesh: Mesh, position: Position) -> None:
        self._about = about
        self._mesh = mesh
        lengths = _lengths(about, position)[: about.settings.trace]
        longest = {n: max(map(len, window.program)) for n, window in about.plan.windows.items()}
        actions = list(accumulate(longest[n] for n in lengths))
        self._left = max(1, bisect_right(actions, MOST_ACTIONS))
        self._cut = "" if self._left == len(lengths) else f"at {MOST_ACTIONS} actions of a rank"
        self._windows: list[tuple[int, list[int]]] = []  # epoch, samples of microbatches
        self._rows: list[Row] = []  # of each window
        self._began = self._compare_clocks()

    @property
    def over(self) -> bool:
        return not self._left

    def observer(self, epoch: int, sizes: Sequence[int]) -> Observe | None:
        """Return the observer of the next window, of batches of these sizes; None if it is not traced."""
        if self.over:
            return None
        self._left -= 1
        return partial(self._take, epoch, sizes)

    def collect(self) -> Trace:
        """Gather the spans of all ranks, on the clock of rank 0."""
        (began, first, error), (ended, last, other_error) = self._began, self._compare_clocks()
        drift = (last - first) / (ended - began)
        rows = [_shifted(row, lambda moment: moment + first + drift * (moment - began)) for row in self._rows]
        mine = {"windows": list(map(_as_json, rows)), "clock_error_s": max(error, other_error)}
        ranks = self._mesh.gather("the trace", mine)
        m = self._about.settings.microbatches
        return Trace(
            [
                TracedWindow(epoch, samples, Timeline([_as_row(rank["windows"][n]) for rank in ranks], m))
                for n, (epoch, samples) in enumerate(self._windows)
            ],
            "where the run was stopped" if self._left else self._cut,
            max(rank["clock_error_s"] for rank in ranks),
        )

    def _take(self, epoch: int, sizes: Sequence[int], row: Row) -> None:
        done = max(action.version for action in row.actions if action.op is Op.STEP)
        microbatches = self._about.settings.microbatches
        self._windows.append((epoch, [n for size in sizes[:done] for n in pieces(size, microbatches)]))
        self._rows.append(row)

    def _compare_clocks(self) -> tuple[float, float, float]:
        """Return the present, the offset to rank 0's clock, and its error, in seconds."""
        return perf_counter(), *self._mesh.clock_offset()


def about_trace(about: About, trace: Trace) -> dict[str, Any]:
    """Return the conditions of a trace, needed to replay it."""
    settings, plan = about.settings, about.plan
    return {
        "model": settings.model,
        "parameters": sum(layer.params for layer in plan.layers),
        "data": about.data.name,
        "schedule": settings.schedule,
        "ranks": settings.ranks,
        "placement": plan.placement,
        "partition": plan.cuts,
        "batch_size": settings.batch_size,
        "microbatches": settings.microbatches,
        "window": settings.window,
        "epoch_batches": about.batches,
        "buffer_size": settings.buffer_size,
        "bounds": [[*edge, bound] for edge, bound in sorted(plan.cut.bounds.items())],
        "ties": [list(tie) for tie in plan.cut.ties],
        "codec_forward": str(settings.codecs.forward),
        "codec_backward": str(settings.codecs.backward),
        "dtype": str(settings.dtype).removeprefix("torch."),
        "precision": settings.precision,
        "memory_format": plan.numerics.memory_format,
        "threads": torch.get_num_threads(),
        "device": about.device,
        "clock_error_us": round(1e6 * trace.clock_error_s, 1),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def _lengths(about: About, position: Position) -> list[int]:
    batches, window = about.batches, about.settings.window
    return [
        length
        for epoch in range(position.epoch, about.settings.epochs)
        for length in window_lengths(batches, window, position.batch if epoch == position.epoch else 0)
    ]


def _as_json(row: Row) -> list[Any]:
    return [row.began, row.ended, [[span.action and str(span.action), *span[1:]] for span in row.spans]]


def _as_row(data: list[Any]) -> Row:
    """Return the row of `_as_json`."""
    began, ended, spans = data
    return Row(began, ended, [Span(action and parse_action(action), *rest) for action, *rest in spans])


def _shifted(row: Row, shift: Callable[[float], float]) -> Row:
    spans = [span._replace(start=shift(span.start), end=shift(span.end)) for span in row.spans]
    return Row(shift(row.began), shift(row.ended), spans)
