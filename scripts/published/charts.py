"""Draws the charts of a record side by side, in one style for all records.

A method has a colour and a marker of its own in all charts of a record; a line's dashes say where it comes
from: published, run here, planned here, or a bound. Names stand at the ends of lines. Categories are not
joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from published.record import Chart, How, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

DASHES: dict[How, Any] = {
    How.RUN: "-",
    How.PLANNED: (0, (5, 1.5)),
    How.PUBLISHED: (0, (1.5, 1.5)),
    How.BOUND: ":",
}
FILLED = {How.RUN: "full", How.PLANNED: "none", How.PUBLISHED: "none", How.BOUND: "none"}  # markers
BLACK = "#111111"  # of bounds
# Okabe and Ito's colours, which the colour-blind can tell apart; yellow would not be seen on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#6e6e6e")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")
WIDTH, LETTER = 1.6, 8.5  # of a line, and the size of its name, in points
APART = 1.25  # names, in heights of a letter
PANEL = (6.2, 3.9)  # inches

Looks = Mapping[str, tuple[str, str]]
"""The colour and the marker of each method."""


def looks_of(charts: Sequence[Chart]) -> Looks:
    """Return how each method looks, in the order in which they come."""
    names = dict.fromkeys(line.name for chart in charts for line in chart.lines if line.how is not How.BOUND)
    return dict(zip(names, zip(cycle(COLOURS), cycle(MARKERS), strict=False), strict=False))


def draw(charts: Sequence[Chart], path: Path) -> None:
    """Write the charts as one PNG file, at most two in a row."""
    columns = min(2, len(charts))
    rows = -(-len(charts) // columns)
    looks = looks_of(charts)
    with matplotlib.rc_context({"text.parse_math": False, "font.size": 9.5}):
        figure = Figure(figsize=(PANEL[0] * columns, PANEL[1] * rows + 0.3), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in panels[len(charts) :]:
            axes.set_visible(False)
        names = [_chart(axes, chart, looks) for axes, chart in zip(panels, charts, strict=False)]
        hows = dict.fromkeys(line.how for how in How for c in charts for line in c.lines if line.how is how)
        style: Any = {"linewidth": WIDTH, "color": BLACK, "marker": "o", "markersize": 5}
        keys = [
            panels[0].plot([], [], label=how.value, **style | {"marker": ""} if how is How.BOUND else style)[
                0
            ]
            for how in hows
        ]
        for key, how in zip(keys, hows, strict=True):
            key.set(linestyle=DASHES[how], fillstyle=FILLED[how])
        figure.legend(handles=keys, loc="outside upper left", ncols=len(keys), frameon=False, handlelength=4)
        figure.draw_without_rendering()
        for of_chart in names:
            _move_apart(of_chart, figure)
        figure.savefig(path, dpi=100)


def _chart(axes: Axes, chart: Chart, looks: Looks) -> list[Annotation]:
    """Draw a chart; return the names of its lines."""
    axes.set_title(chart.title, loc="left", fontsize=10, fontweight="bold")
    for line in chart.lines:
        _line(axes, line, looks, joined=not chart.categories)
    if chart.categories:
        axes.set_xticks(
            range(1, len(chart.categories) + 1), chart.categories, rotation=30, ha="right", fontsize=LETTER
        )
        axes.set_xlim(0.5, len(chart.categories) + 0.5)
    elif all(x == int(x) for line in chart.lines for x in line.points):
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
    return _names(axes, chart.lines, looks)


def _line(axes: Axes, line: Line, looks: Looks, joined: bool) -> None:
    """Draw a line, or the points of categories; with its band, or at each point an interval."""
    x, (colour, marker) = [*line.points], looks.get(line.name, (BLACK, ""))
    dashes = DASHES[line.how] if joined or not marker else ""
    style: Any = {"color": colour, "marker": marker, "linestyle": dashes, "fillstyle": FILLED[line.how]}
    axes.plot(x, [*line.points.values()], linewidth=WIDTH, markersize=5 if joined else 8, **style)
    if line.band is None:
        return
    least, most = zip(*line.band, strict=True)
    if joined and len(x) > 1:
        axes.fill_between(x, least, most, color=colour, alpha=0.15, linewidth=0)
    else:
        axes.vlines(x, least, most, color=colour, linewidth=WIDTH)


def _logarithmic(axes: Axes, axis: str, lines: Sequence[Line]) -> None:
    """Scale an axis by logarithms; one of counts has ticks where there are points."""
    getattr(axes, f"set_{axis}scale")("log")
    one = getattr(axes, f"{axis}axis")
    one.set_major_formatter(ScalarFormatter())
    one.set_minor_formatter(NullFormatter())
    if axis == "x":
        axes.set_xticks(sorted({x for line in lines for x in line.points}))
        axes.minorticks_off()


def _names(axes: Axes, lines: Sequence[Line], looks: Looks) -> list[Annotation]:
    """Write each method's name once, at the last point of one of its lines."""
    style: Any = {"textcoords": "offset points", "va": "center", "fontsize": LETTER, "annotation_clip": False}
    ends = {line.name: [*line.points.items()][-1] for line in reversed(lines)}
    return [
        axes.annotate(name, end, (6, 0), color=looks.get(name, (BLACK, ""))[0], **style)
        for name, end in ends.items()
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
