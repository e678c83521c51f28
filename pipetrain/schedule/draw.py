"""Draws a timeline: as text for a terminal, as SVG or PNG.

Both have a row per rank, time to the right, and a microbatch's number on each bar. Matplotlib is used through
its object interface, which leaves pyplot's global state alone, and is imported only when needed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from pipetrain.schedule.actions import COMPUTE, Action, Op, ScheduleError
from pipetrain.schedule.memory import Memory, totals
from pipetrain.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHORT = 48, 16  # most cells of a figure: of the window's beginning, and of its end
LINES = 2, 1  # likewise lines of a text
BATCHES = 2  # most batches of a beginning
_MOST_INCHES = 100.0
_COLOURS = {Op.F: "#4e79a7", Op.B: "#a85a28", Op.I: "#e08a2e", Op.W: "#59a14f", Op.R: "#b07aa1"}
_NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.R: "recompute",
}
_MEMORY, _FIXED = "#9c755f", "#bab0ac"
_LEVELS = "▁▂▃▄▅▆▇█"
_STEP, _IDLE, _INK = "#222222", "#ececec", "#333333"
_LEGEND: dict[str, Any] = {
    "frameon": False,
    "fontsize": 8,
    "labelcolor": _INK,
    "borderaxespad": 0.2,
    "handlelength": 1.1,
    "handletextpad": 0.5,
}


Cells = tuple[int, int]
"""The first and the last cell of a part of a timeline."""


class _Bar(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float
    depth: int  # index of the stage on its rank


def as_text(
    timeline: Timeline,
    width: int = 100,
    unit_of_time: str = "",
    span: Cells | None = None,
    memory: Memory = (),
    title: str = "",
) -> str:
    """Draw a row per rank in `width` columns; a cell is the shortest action's time (1 at `unit_cost`).

    `F3` is the forward of microbatch 3, `B3--` its backward (`I` and `W` its halves), `1F3` names the stage
    too, on ranks with several; a dot is idle time, `|` a step. `span`: the first and last cell, drawn in as
    many lines per rank as needed; None for what `ends` chooses, in at most LINES. The first line says what
    is left out; with a `title` another one says what the letters are. `unit_of_time`: of the costs, as s.
    `memory`: what each rank holds over time, drawn below in eighths of the rank's peak.
    """
    unit, stages = _unit(timeline), _stages(timeline)
    several = any(len(on_rank) > 1 for on_rank in stages)
    total = _cells(timeline)
    bars = _bars(timeline, timeline.makespan if span is None else (span[1] + 0.5) * unit)
    names = [f"rank {rank}  " for rank in range(len(stages))]
    left = max(map(len, names), default=0)
    cell = 1 + max((len(_label(bar.action, several)) for bar in bars), default=1)
    fits = (width - left) // cell
    if fits < total:  # leave room for the mark at the end of a line
        fits = max(1, (width - left - 1) // cell)
    spans = ends(timeline, [lines * fits for lines in LINES]) if span is None else [_within(span, total)]
    rows = _cells_of(bars, len(stages), max(until for _, until in spans), cell, unit, several)

    facts = [*([title] if title else []), *_facts(timeline, unit_of_time)]
    of_cell = unit_of_time if unit_of_time.isalpha() else ""
    drawing = [f"a cell is {unit:.3g} {of_cell}".rstrip()] if unit != 1 else []
    drawing += [_left_out(spans, total)] if spans != [(0, total)] else []
    groups = []
    for start in (start for since, until in spans for start in range(since, until, fits)):
        stop = min(start + fits, next(until for since, until in spans if since <= start < until))
        parts = ("".join(row[start * cell : stop * cell]).rstrip() for row in rows)
        more = "…" if stop < total else ""
        drawn = [f"{n.ljust(left)}{part}{more}\n" for n, part in zip(names, parts, strict=True)]
        if memory:
            levels = _levels(timeline, memory, [(at * unit, (at + 1) * unit) for at in range(start, stop)])
            drawn += [
                f"{n.ljust(left)}{''.join(level * cell for level in row)}{more}\n"
                for n, row in zip(names, levels, strict=True)
            ]
        groups.append("".join(drawn))
    drawing += [f"below, memory: {_LEVELS[-1]} is a rank's peak"] if memory else []
    head = [", ".join(facts), ", ".join(_legend(bars, several)), "; ".join(drawing)]
    if not title:
        head = ["; ".join([head[0], *drawing])]
    return "\n".join([*filter(None, head), "\n".join(groups)])


def _legend(bars: Sequence[_Bar], several: bool) -> list[str]:
    """Return what the letters of a text are."""
    shown = {bar.action.op for bar in bars}
    names = [f"{op} {name}" for op, name in _NAMES.items() if op in shown]
    names += ["| step"] if Op.STEP in shown else []
    number = "1F3: of stage 1, microbatch 3" if several else "F3: of microbatch 3"
    return [*names, ". idle", number]


def ends(timeline: Timeline, most: Sequence[int]) -> list[Cells]:
    """Return the parts of a window that show it: its first batches, and its end from the last forward on.

    `most`: cells of each. All of it is one part where what is left out would be shorter than its end.
    """
    unit, total, last = _unit(timeline), _cells(timeline), 0.0
    stepped: list[float] = []
    for action, start, end, *_ in (span for row in timeline.rows for span in row.spans):
        if action is not None and action.op is Op.F:
            last = max(last, start)
        elif action is not None and action.op is Op.STEP and action.version == BATCHES:
            stepped.append(end)
    first = max(stepped, default=timeline.makespan)
    until = min(-int(-first // unit), most[0], total)
    since = max(int(last / unit), total - most[1])
    return [(0, total)] if since - until < total - since else [(0, until), (since, total)]


def _cells(timeline: Timeline) -> int:
    return round(timeline.makespan / _unit(timeline))


def _within(span: Cells, total: int) -> Cells:
    return min(span[0], total), min(span[1], total)


def _left_out(spans: Sequence[Cells], total: int) -> str:
    parts = (f"{since} to {until}" if since else f"the first {until}" for since, until in spans)
    return f"{' and '.join(parts)} of {total} cells"


def _cells_of(
    bars: Sequence[_Bar], ranks: int, end: int, cell: int, unit: float, several: bool
) -> list[list[str]]:
    """Return the characters of each rank's first `end` cells, of `cell` characters each."""
    rows = [list(("." + " " * (cell - 1)) * end) for _ in range(ranks)]
    for bar in bars:
        first, last = int(bar.start / unit + 0.5), int(bar.end / unit + 0.5)
        if bar.action.op is Op.STEP and 0 < first <= end:
            rows[bar.rank][first * cell - 1] = "|"
        elif first < min(last, end):
            bar_text = _label(bar.action, several).ljust((last - first) * cell - 1, "-") + " "
            rows[bar.rank][first * cell : last * cell] = bar_text[: (end - first) * cell]
    return rows


def _levels(timeline: Timeline, memory: Memory, cells: Sequence[tuple[float, float]]) -> list[list[str]]:
    """Return the most that each rank holds in each cell of time, in eighths of its peak."""
    rows = []
    for of_rank, times in zip(memory, _times(timeline), strict=True):
        moments = totals(of_rank)
        most = max(moments, default=0) or 1
        row = []
        for start, end in cells:
            first, last = bisect_right(times, start), bisect_left(times, end)
            held = moments[max(0, first - 1) : max(1, last)]
            row.append(_LEVELS[max(0, -(-8 * max(held, default=0) // most) - 1)])
        rows.append(row)
    return rows


def _times(timeline: Timeline) -> list[list[float]]:
    """Return when the actions of each rank end."""
    return [[span.end for span in row.spans if span.action is not None] for row in timeline.rows]


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

    unit, stages = _unit(timeline), _stages(timeline)
    cells = ends(timeline, SHORT) if span is None else [span]
    total = _cells(timeline)
    spans = [tuple(timeline.makespan if cell >= total else cell * unit for cell in part) for part in cells]
    lengths = [until - since for since, until in spans]
    heights = [1.15 + 0.4 * len(stages)] + ([0.55 + 0.5 * len(stages)] if memory else [])
    size = (min(max(6.5, 1.1 + 0.25 * sum(lengths) / unit), _MOST_INCHES), sum(heights))
    figure = Figure(figsize=size, dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(
        len(heights), len(spans), squeeze=False, height_ratios=heights, width_ratios=lengths
    )
    facts = [*([title] if title else []), *_facts(timeline, unit_of_time)]
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
    for rank, (of_rank, row, done) in enumerate(zip(memory, timeline.rows, _times(timeline), strict=True)):
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
    bars = [bar for bar in _bars(timeline, until) if bar.end > since]
    deepest, narrow = max((bar.depth for bar in bars), default=0), _unit(timeline) / 2
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
        Patch(color=_COLOURS[op], label=name) for op, name in _NAMES.items() if op in shown
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


def _bars(timeline: Timeline, until: float) -> list[_Bar]:
    bars: list[_Bar] = []
    for rank, (stages, row) in enumerate(zip(_stages(timeline), timeline.rows, strict=True)):
        for action, began, end, waited, *_ in row.spans:
            start = began + waited  # of a STEP that waits for norms or ties
            if action is None or (action.op not in COMPUTE and action.op is not Op.STEP):
                continue
            if start > until or (start == until and action.op in COMPUTE):
                break
            bars.append(_Bar(rank, action, start, end, stages.index(action.stage)))
    return bars


def _label(action: Action, several: bool) -> str:
    """Return `F3`, or `1F3` on a rank with several stages."""
    stage = str(action.stage) if several else ""
    return f"{stage}{action.op}{action.mb}" if action.op in COMPUTE else ""


def _facts(timeline: Timeline, unit_of_time: str) -> list[str]:
    ranks = len(timeline.rows)
    return [
        f"{ranks} ranks" if ranks > 1 else "1 rank",
        f"makespan {_time(timeline.makespan, unit_of_time)}",
        f"bubble {timeline.bubble:.1%}",
    ]


def _time(time: float, unit_of_time: str) -> str:
    return f"{time:.4g} {unit_of_time}".rstrip()


def _unit(timeline: Timeline) -> float:
    """Return the time of the shortest action, unless most others would be out of proportion to it.

    It is at least a quarter of the median, and a third of the mean of the busiest rank.
    """
    times = [
        [span.end - span.start for span in row.spans if span.action is not None and span.action.op in COMPUTE]
        for row in timeline.rows
    ]
    flat = [time for of_rank in times for time in of_rank]
    if not any(flat):
        return 1.0
    busiest = max(times, key=lambda of_rank: sum(of_rank))
    return max(min(flat), median(flat) / 4, fmean(busiest) / 3)


def _stages(timeline: Timeline) -> list[list[int]]:
    return [sorted({action.stage for action in row.actions}) for row in timeline.rows]


def _paler(colour: str, by: float) -> tuple[float, ...]:
    """Mix a #rrggbb colour with white."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(channel + (1 - channel) * by for channel in channels)
