"""Draws the charts of a record side by side, in one style for all records.

A colour says where a line comes from: published, run here, planned here, or a bound. All lines have one
width, and their names stand at their ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from published.record import Chart, How, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

STYLES: dict[How, dict[str, Any]] = {  # with Okabe and Ito's colours, which the colour-blind can tell apart
    How.PUBLISHED: {"color": "#6e6e6e", "linestyle": (0, (5, 2)), "marker": "s"},
    How.RUN: {"color": "#0072b2", "linestyle": "-", "marker": "o"},
    How.PLANNED: {"color": "#d55e00", "linestyle": "-", "marker": "D", "markerfacecolor": "white"},
    How.BOUND: {"color": "#111111", "linestyle": ":", "marker": ""},
}
WIDTH, LETTER = 1.6, 8.5  # of a line, and the size of its name, in points
APART = 1.25  # names, in heights of a letter
PANEL = (6.2, 3.9)  # inches


def draw(charts: Sequence[Chart], path: Path) -> None:
    """Write the charts as one PNG file, at most two in a row."""
    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 9.5}):
        figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.3), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in panels[len(charts) :]:
            axes.set_visible(False)
        names = [_chart(axes, chart) for axes, chart in zip(panels, charts, strict=False)]
        hows = dict.fromkeys(line.how for how in How for c in charts for line in c.lines if line.how is how)
        keys = [panels[0].plot([], [], label=how.value, linewidth=WIDTH, **STYLES[how])[0] for how in hows]
        figure.legend(handles=keys, loc="outside upper left", ncols=len(keys), frameon=False)
        figure.draw_without_rendering()
        for of_chart in names:
            _move_apart(of_chart, figure)
        figure.savefig(path, dpi=100)


def _chart(axes: Axes, chart: Chart) -> list[Annotation]:
    """Draw a chart; return the names of its lines."""
    axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold")
    for line in chart.lines:
        _line(axes, line)
    if all(x == int(x) for line in chart.lines for x in line.points):
        axes.locator_params("x", integer=True)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    for axis in chart.logs:
        _logarithmic(axes, axis, chart.lines)
    heights = [y for line in chart.lines for y in line.points.values()]
    if "y" not in chart.logs and min(heights) < max(heights) / 2:
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(axis="y", linewidth=0.6, color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)
    return _names(axes, chart.lines)


def _line(axes: Axes, line: Line) -> None:
    x, style = [*line.points], STYLES[line.how]
    axes.plot(x, [*line.points.values()], linewidth=WIDTH, markersize=5, **style)
    if line.band is not None:
        least, most = zip(*line.band, strict=True)
        axes.fill_between(x, least, most, color=style["color"], alpha=0.15, linewidth=0)


def _logarithmic(axes: Axes, axis: str, lines: Sequence[Line]) -> None:
    """Scale an axis by logarithms; one of counts has ticks where there are points."""
    getattr(axes, f"set_{axis}scale")("log")
    one = getattr(axes, f"{axis}axis")
    one.set_major_formatter(ScalarFormatter())
    one.set_minor_formatter(NullFormatter())
    if axis == "x":
        axes.set_xticks(sorted({x for line in lines for x in line.points}))
        axes.minorticks_off()


def _names(axes: Axes, lines: Sequence[Line]) -> list[Annotation]:
    """Write the lines' names at their last points."""
    style: Any = {"textcoords": "offset points", "va": "center", "fontsize": LETTER, "annotation_clip": False}
    return [
        axes.annotate(line.name, [*line.points.items()][-1], (6, 0), color=STYLES[line.how]["color"], **style)
        for line in lines
    ]


def _move_apart(names: Sequence[Annotation], figure: Figure) -> None:
    """Move names up and down that would cover one another; the figure has its layout."""
    points = 72 / figure.dpi
    ends = [float(name.axes.transData.transform(name.xy)[1]) * points for name in names]  # type: ignore[union-attr]
    order = sorted(range(len(names)), key=ends.__getitem__)
    heights: list[float] = []
    for n in order:
        heights.append(max(ends[n], heights[-1] + APART * LETTER) if heights else ends[n])
    shift = sum(heights[k] - ends[n] for k, n in enumerate(order)) / max(1, len(order))
    for k, n in enumerate(order):
        names[n].set_position((6, heights[k] - shift - ends[n]))
