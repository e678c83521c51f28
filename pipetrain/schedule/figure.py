"""Draws a timeline as SVG or PNG: a row per rank, time to the right, a microbatch's number on each bar.

Matplotlib is used through its object interface, which leaves pyplot's global state alone, and is imported
only when needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetrain.schedule.actions import Op, ScheduleError
from pipetrain.schedule.draw import (
    NAMES,
    Cells,
    bars_of,
    cells_of,
    ends,
    ends_of,
    facts_of,
    stages_of,
    unit_of,
)
from pipetrain.schedule.memory import Memory, totals
from pipetrain.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHORT = 48, 16  # most cells of a figure: of the window's beginning, and of its end
_MOST_INCHES = 100.0
_COLOURS = {Op.F: "#4e79a7", Op.B: "#a85a28", Op.I: "#e08a2e", Op.W: "#59a14f", Op.R: "#b07aa1"}
_MEMORY, _FIXED = "#9c755f", "#bab0ac"
_STEP, _IDLE, _INK = "#222222", "#ececec", "#333333"
_LEGEND: dict[str, Any] = {
    "frameon": False,
    "fontsize": 8,
    "labelcolor": _INK,
    "borderaxespad": 0.2,
    "handlelength": 1.1,
    "handletextpad": 0.5,
}


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.4g} MiB"


def as_figure(
    timeline: Timeline,
    path: Path | str,
    title: str = "",
    unit_of_time: str = "",
    span: Cells | None = None,
    memory: Memory = (),
) -> None:
    """Write the timeline to `path`, a .svg or .png file. Raises ScheduleError.

    `span`: the first and the last cell to draw; None for what `ends` chooses, of at most SHORT cells.
    `memory`: what each rank holds over time, drawn below on the same axis, with the peak labelled.
    """
    path = Path(path)
    if path.suffix.lower() not in (".svg", ".png"):
        raise ScheduleError(f"a timeline is written as .svg or .png; got {path.name}")
    figure = _figure(timeline, title, unit_of_time, span, memory)
    figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def as_png(timeline: Timeline, title: str = "", unit_of_time: str = "", memory: Memory = ()) -> bytes:
    """Return the same as a PNG, in short."""
    buffer = BytesIO()
    _figure(timeline, title, unit_of_time, None, memory).savefig(buffer, format="png")
    return buffer.getvalue()


def _figure(timeline: Timeline, title: str, unit_of_time: str, span: Cells | None, memory: Memory) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    unit, stages = unit_of(timeline), stages_of(timeline)
    cells = ends(timeline, SHORT) if span is None else [span]
    total = cells_of(timeline)
    spans = [tuple(timeline.makespan if cell >= total else cell * unit for cell in part) for part in cells]
    lengths = [until - since for since, until in spans]
    heights = [1.15 + 0.4 * len(stages)] + ([0.55 + 0.5 * len(stages)] if memory else [])
    size = (min(max(6.5, 1.1 + 0.25 * sum(lengths) / unit), _MOST_INCHES), sum(heights))
    figure = Figure(figsize=size, dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        len(heights), len(spans), squeeze=False, height_ratios=heights, width_ratios=lengths
    )
    facts = [*([title] if title else []), *facts_of(timeline, unit_of_time)]
    figure.suptitle("  ·  ".join(facts), x=0.01, ha="left", fontsize=9.5, color=_INK)
    shown: set[Op] = set()
    for (since, until), (axes, *below) in zip(spans, grid.T, strict=True):
        _draw_frame(axes, stages, since, until, max(2, int(12 * (until - since) / sum(lengths))))
        shown |= _draw_bars(axes, timeline, since, until)
        if memory:
            _draw_memory(below[0], timeline, memory, since, until)
    first, *later = grid.T
    _label_first(first, stages, shown, unit_of_time, memory)
    for column in later:
        column[0].set_xlabel("the window's end", fontsize=8, color=_INK)
        for axes in column:
            axes.set_yticks([])
    return figure


def _label_first(
    column: Sequence[Axes], stages: list[list[int]], shown: set[Op], unit_of_time: str, memory: Memory
) -> None:
    """Add legends, the axis of time and the ranks' names to the first part of a figure."""
    axes, *below = column
    several = any(len(on_rank) > 1 for on_rank in stages)
    names = [
        f"rank {rank}\nstages {', '.join(map(str, on_rank))}" if several else f"rank {rank}"
        for rank, on_rank in enumerate(stages)
    ]
    axes.set_yticks(range(len(stages)), names, fontsize=8, color=_INK)
    time = f"time, {unit_of_time}" if unit_of_time else "time"
    note = "; paler: a later stage of the rank" if several else ""
    axes.set_xlabel(f"{time}; numbers: microbatches{note}", fontsize=8, color=_INK)
    _draw_legend(axes, shown)
    for one in below:
        one.set_title("memory held, each rank at its own scale", loc="left", fontsize=8, color=_INK)
        peaks = (max(totals(of_rank), default=0) for of_rank in memory)
        names = [f"rank {rank}\npeak {_mib(peak)}" for rank, peak in enumerate(peaks)]
        one.set_yticks(range(len(memory)), names, fontsize=7, color=_INK)
        _add_legend(one)


def _draw_memory(axes: Axes, timeline: Timeline, memory: Memory, since: float, until: float) -> None:
    """Draw what each rank holds over time, each at its own scale, with the peak labelled."""
    for rank, (of_rank, row, done) in enumerate(zip(memory, timeline.rows, ends_of(timeline), strict=True)):
        base = rank + 0.42
        axes.broken_barh([(since, until - since)], (rank - 0.38, 0.8), facecolors=_IDLE, zorder=1)
        if not done:
            continue
        held, activations = totals(of_rank), totals(of_rank, ["activations"])
        top = max(held) or 1
        times = [row.began, *done, timeline.makespan]
        at = done[held.index(max(held))]
        held, activations = ([of[0], *of, of[-1]] for of in (held, activations))
        fixed = [all_of_it - part for all_of_it, part in zip(held, activations, strict=True)]
        for values, colour in ((held, _MEMORY), (fixed, _FIXED)):
            tops = [base - 0.8 * value / top for value in values]
            axes.fill_between(times, base, tops, step="post", color=colour, linewidth=0, zorder=2)
        if since <= at <= until:
            axes.plot([at], [base - 0.8], marker="v", markersize=3.5, color=_INK, zorder=4)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(memory) - 0.4, -0.6)
    axes.set_xlim(since, until + 0.004 * (until - since))
    axes.set_xticks([])
    for side in axes.spines:
        axes.spines[side].set_visible(False)


def _add_legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=_MEMORY, label="activations"), Patch(color=_FIXED, label="weights and all else")]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.006, 1.0), ncols=2, **_LEGEND)


def _draw_frame(axes: Axes, stages: list[list[int]], since: float, until: float, ticks: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylim(len(stages) - 0.4, -0.6)
    axes.set_xlim(since, until + 0.004 * (until - since))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, steps=[1, 2, 5, 10]))
    axes.tick_params(axis="x", labelsize=8, labelcolor=_INK, color="#999999")
    axes.tick_params(axis="y", length=0)
    for side in axes.spines:
        axes.spines[side].set_visible(False)
    for rank in range(len(stages)):
        axes.broken_barh([(since, until - since)], (rank - 0.38, 0.76), facecolors=_IDLE, zorder=1)


def _draw_bars(axes: Axes, timeline: Timeline, since: float, until: float) -> set[Op]:
    """Draw the actions of a part of a timeline; return their kinds."""
    bars = [bar for bar in bars_of(timeline, until) if bar.end > since]
    deepest, narrow = max((bar.depth for bar in bars), default=0), unit_of(timeline) / 2
    for rank, action, start, end, depth in bars:
        if action.op is Op.STEP:
            axes.plot([start, start], [rank - 0.44, rank + 0.44], color=_STEP, linewidth=1.6, zorder=4)
            continue
        paleness = 0.55 * depth / max(deepest, 1)
        axes.broken_barh(
            [(max(start, since), min(end, until) - max(start, since))],
            (rank - 0.38, 0.76),
            facecolors=_paler(_COLOURS[action.op], paleness),
            edgecolors="white",
            linewidth=0.7,
            zorder=2,
        )
        if since <= start and end <= until and end - start >= narrow:
            ink = "white" if paleness < 0.4 else _INK
            at = ((start + end) / 2, rank + 0.02)
            axes.text(*at, str(action.mb), ha="center", va="center", color=ink, fontsize=7.5, zorder=3)
    return {bar.action.op for bar in bars}


def _draw_legend(axes: Axes, shown: set[Op]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [
        Patch(color=_COLOURS[op], label=name) for op, name in NAMES.items() if op in shown
    ]
    if Op.STEP in shown:
        step = Line2D([], [], color=_STEP, marker="|", markersize=9, markeredgewidth=1.6, linestyle="")
        step.set_label("step")
        handles.append(step)
    handles.append(Patch(color=_IDLE, label="idle"))
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(-0.006, 1.0),
        ncols=len(handles),
        columnspacing=1.4,
        **_LEGEND,
    )


def _paler(colour: str, by: float) -> tuple[float, ...]:
    """Mix a #rrggbb colour with white."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(channel + (1 - channel) * by for channel in channels)
