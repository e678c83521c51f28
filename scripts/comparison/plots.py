"""The comparison as pictures: the metric by epoch and by time.

They are written as PNG beside the table and stand in the report. A method has one colour, one marker and one
line style, of cycles of other lengths, so that many can be told apart, without colours too. Curves over
epochs may coincide, where schedules do the same sums: the lower ones are wider, and each has its markers at
epochs of its own. Matplotlib is used through its objects, without pyplot's global state.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from comparison.table import Row, by_model, compared

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind can tell apart, with grey in the place of yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8a8a8a", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), "-.", ":", (0, (8, 2)), (0, (4, 1, 1, 1, 1, 1)), (0, (2, 1)))
MARKS = 3, 10  # markers on a curve: at least, where there are so many epochs, and about
WIDEST = 4.0  # more than the uppermost curve
OVER = {"epoch": "epoch", "elapsed_s": "seconds since the start, evaluation included"}
"""Columns of metrics.csv to draw over, and their labels."""


def write(out: Path, methods: Sequence[str], rows: Sequence[Row]) -> list[str]:
    """Write the pictures of the runs that finished; return their files. `methods`: of all, in order."""
    panels = by_model([row for row in rows if row.done])
    name = re.sub(r"\W+", "_", compared(rows).title.lower())
    files = {f"{name}_epoch.png": "epoch", f"{name}_seconds.png": "elapsed_s"} if panels else {}
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 9.5}):  # a name is no formula
        for file, key in files.items():
            draw(panels, methods, key).savefig(out / file, dpi=150)
    return list(files)


def draw(panels: dict[str, list[Row]], methods: Sequence[str], key: str) -> Figure:
    """Draw the seeds' mean metric over a column of metrics.csv, in a band from the least to the most.

    There is a panel for each model.
    """
    figure = Figure(figsize=(8.6 * len(panels), 4.4), layout="constrained")
    side_by_side = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (model, rows) in zip(side_by_side, panels.items(), strict=True):
        metric, seeds = compared(rows), max(len(row.done) for row in rows)
        axes.set_title(f"{model} on {rows[0].alike('data')}, {seeds} seed{'s' * (seeds > 1)}", loc="left")
        for place, row in enumerate(rows):
            _curve(axes, row, key, methods.index(row.method), place, len(rows))
        axes.set_ylabel(f"test {metric.title}{', %' * metric.percent}")
        axes.set_xlabel(OVER[key])
        if key == "epoch":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        _fit(axes, metric.percent)
        axes.grid(axis="y", linewidth=0.6, color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}  # so that it hides no curve
        axes.legend(title="after the last epoch", frameon=False, handlelength=3.6, alignment="left", **beside)
    return figure


def _curve(axes: Axes, row: Row, key: str, style: int, place: int, curves: int) -> None:
    """Draw a method. `style`: its number among all; `place`: here, where later ones of `curves` cover it."""
    colour, marker, dashes = (cycle[style % len(cycle)] for cycle in (COLOURS, MARKERS, DASHES))
    wider = min(0.8, WIDEST / curves) * (curves - 1 - place)
    metric, x = row.metric, np.mean(_columns(row, key), axis=0)
    y = metric.scale * np.array(_columns(row, f"val_{metric.name}"))
    mean = y.mean(axis=0)
    few, many = MARKS
    apart = max(1, min(curves, len(x) // few), len(x) // many)
    axes.fill_between(x, y.min(axis=0), y.max(axis=0), color=colour, alpha=0.13, lw=0)
    axes.plot(
        x,
        mean,
        color=colour,
        linestyle=dashes,
        linewidth=1.4 + wider,
        marker=marker,
        markersize=6.5 + wider,
        markevery=(place % apart, apart),
        markeredgecolor="white",
        markeredgewidth=0.6,
        label=f"{row.method}  {metric.text(mean[-1])}",
    )


def _columns(row: Row, key: str) -> list[list[float]]:
    """Return a column of metrics.csv of each finished run, up to the last epoch that all of them have.

    They differ where the number of epochs was changed between two runs.
    """
    curves = [outcome.curves[key] for outcome in row.outcomes if outcome.summary is not None]
    return [curve[: min(map(len, curves))] for curve in curves]


def _fit(axes: Axes, percent: bool) -> None:
    """Scale percentages no narrower than a point; others by logarithms if positive and over a decade."""
    if percent:
        low, high = axes.get_ylim()
        middle, half = (low + high) / 2, max(high - low, 1.0) / 2
        axes.set_ylim(middle - half, middle + half)
        return
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    values = values[np.isfinite(values)]
    if values.size and 0 < 10 * values.min() < values.max():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:g}")
