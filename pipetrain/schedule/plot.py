"""Draws timelines as SVG or PNG: a row per rank, time to the right, a microbatch's number on each bar.

Matplotlib is used through its object interface, which leaves pyplot's global state alone, and is imported
only when needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipetrain.schedule.actions import Op, ScheduleError
from pipetrain.schedule.memory import Memory, totals
from pipetrain.schedule.text import (
    COLOURS,
    NAMES,
    Cells,
    bars_of,
    cells_of,
    facts_of,
    named,
    stages_of,
    unit_of,
)
from pipetrain.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CELLS = 64  # most cells of a figure, unless a span is given
STACK = 16.0  # inches: the width of measured timelines, whose actions may be short next to their waits
NUMBER = 0.12  # inches: a bar at least this wide shows its number
_MEMORY, _FIXED = "#9c755f", "#bab0ac"
_STEP, _IDLE, _INK = "#222222", "#ececec", "#333333"
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 8, "labelcolor": _INK, "borderaxespad": 0.2}
_LEGEND |= {"handlelength": 1.1, "handletextpad": 0.5, "columnspacing": 1.4}


def as_figure(
    timeline: Timeline,
    to: Path | str | BytesIO,
    title: str = "",
    unit_of_time: str = "",
    span: Cells | None = None,
    memory: Memory = (),
) -> None:
    """Write the timeline to a .svg or .png file, or as .png to a buffer. Raises ScheduleError.

    `span`: the first and last cell to draw; None: the first CELLS. `memory`: what ranks hold, drawn below.
    """
    unit, ranks = unit_of(timeline), len(timeline.rows)
    since, until = (min(at * unit, timeline.makespan) for at in span or (0, CELLS))
    heights = [1.15 + 0.4 * ranks] + ([0.55 + 0.5 * ranks] if memory else [])
    width = min(max(6.5, 1.1 + 0.25 * (until - since) / unit), 100.0)
    figure, (axes, *below) = _empty(width, heights)
    facts = [*([title] if title else []), *facts_of(timeline, unit_of_time)]
    if (since, until) != (0, timeline.makespan):
        facts.append(f"{since / unit:.0f} to {until / unit:.0f} of {cells_of(timeline)} cells")
    figure.suptitle("  ·  ".join(facts), x=0.01, ha="left", fontsize=9.5, color=_INK)
    for panel in (axes, *below):
        _frame(panel, ranks, since, until)
    _draw_actions(axes, timeline, since, until, unit_of_time)
    if memory:
        _draw_memory(below[0], timeline, memory, since, until)
    _save(figure, to)


def as_stack(titled: Sequence[tuple[str, Timeline, float]], path: Path | str) -> None:
    """Write timelines in seconds one above the other, on one axis of time. Raises ScheduleError.

    Each has its title, and until when it is drawn, from its start.
    """
    ends = [min(timeline.makespan, until) for _, timeline, until in titled]
    figure, panels = _empty(STACK, [1.5 + 0.4 * len(timeline.rows) for _, timeline, _ in titled])
    for axes, (title, timeline, _), end in zip(panels, titled, ends, strict=True):
        axes.set_title(title, loc="left", pad=20, fontsize=9.5, color=_INK)
        _frame(axes, len(timeline.rows), 0.0, end)
        axes.set_xlim(0.0, 1.004 * max(ends))
        _draw_actions(axes, timeline, 0.0, end, "s")
    _save(figure, path)


def as_png(timeline: Timeline, title: str = "", unit_of_time: str = "", memory: Memory = ()) -> bytes:
    """Return what `as_figure` writes as .png."""
    as_figure(timeline, buffer := BytesIO(), title, unit_of_time, memory=memory)
    return buffer.getvalue()


def _empty(width: float, heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Return a figure of this width, and its axes of these heights, in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, sum(heights)), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])


def _save(figure: Figure, to: Path | str | BytesIO) -> None:
    suffix = ".png" if isinstance(to, BytesIO) else Path(to).suffix.lower()
    if suffix not in (".svg", ".png"):
        raise ScheduleError(f"a timeline is written as .svg or .png; got {to}")
    figure.savefig(to, format=suffix[1:])


def _frame(axes: Axes, ranks: int, since: float, until: float) -> None:
    axes.set_ylim(ranks - 0.4, -0.6)
    axes.set_xlim(since, until + 0.004 * (until - since))
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    for rank in range(ranks):
        axes.broken_barh([(since, until - since)], (rank - 0.38, 0.76), facecolors=_IDLE, zorder=1)


def _draw_actions(axes: Axes, timeline: Timeline, since: float, until: float, unit_of_time: str) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    bars = [bar for bar in bars_of(timeline, until) if bar.end > since]
    deepest = max((bar.depth for bar in bars), default=0)
    left_end, right_end = axes.get_xlim()
    narrow = NUMBER * (right_end - left_end) / (axes.figure.bbox.width / axes.figure.dpi - 1.1)
    for rank, action, start, end, depth in bars:
        if action.op is Op.STEP:
            axes.plot([start, start], [rank - 0.44, rank + 0.44], color=_STEP, linewidth=1.6, zorder=4)
            continue
        paleness, left = 0.55 * depth / max(deepest, 1), max(start, since)
        axes.broken_barh(
            [(left, min(end, until) - left)],
            (rank - 0.38, 0.76),
            facecolors=_paler(COLOURS[action.op], paleness),
            edgecolors="white",
            linewidth=0.7,
            zorder=2,
        )
        if since <= start and end <= until and end - start >= narrow:
            ink, at = "white" if paleness < 0.4 else _INK, ((start + end) / 2, rank + 0.02)
            axes.text(*at, str(action.mb), ha="center", va="center", color=ink, fontsize=7.5, zorder=3)
    stages = stages_of(timeline)
    virtual, one_each = (
        any(len(on_rank) > 1 for on_rank in stages),
        stages == [[n] for n in range(len(stages))],
    )
    names = [f"rank {rank}" + f"\n{named(on_rank)}" * (not one_each) for rank, on_rank in enumerate(stages)]
    axes.set_yticks(range(len(stages)), names, fontsize=8, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, steps=[1, 2, 5, 10]))
    axes.tick_params(axis="x", labelsize=8, labelcolor=_INK, color="#999999")
    time = f"time, {unit_of_time}" if unit_of_time else "time"
    note = "; paler: a later stage of the rank" * virtual
    axes.set_xlabel(f"{time}; numbers: microbatches{note}", fontsize=8, color=_INK)
    shown = {bar.action.op for bar in bars}
    handles: list[Any] = [Patch(color=COLOURS[op], label=name) for op, name in NAMES.items() if op in shown]
    mark: dict[str, Any] = {"marker": "|", "markersize": 9, "markeredgewidth": 1.6, "linestyle": ""}
    handles += [Line2D([], [], color=_STEP, label="step", **mark)] if Op.STEP in shown else []
    handles.append(Patch(color=_IDLE, label="idle"))
    corner: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.006, 1.0)}
    axes.legend(handles=handles, ncols=len(handles), **corner, **_LEGEND)


def _draw_memory(axes: Axes, timeline: Timeline, memory: Memory, since: float, until: float) -> None:
    """Draw what each rank holds over time, each at its own scale, with the peak marked."""
    from matplotlib.patches import Patch

    names = []
    for rank, (of_rank, row) in enumerate(zip(memory, timeline.rows, strict=True)):
        done = [span.end for span in row.spans if span.action is not None]
        whole, activations = totals(of_rank), totals(of_rank, ["activations"])
        peak = max(whole, default=0)
        names.append(f"rank {rank}\npeak {peak / 2**20:.4g} MiB")
        if not done:
            continue
        times, base = [row.began, *done, timeline.makespan], rank + 0.38
        fixed = [nbytes - part for nbytes, part in zip(whole, activations, strict=True)]
        for values, colour in ((whole, _MEMORY), (fixed, _FIXED)):
            tops = [base - 0.76 * value / (peak or 1) for value in (values[0], *values, values[-1])]
            axes.fill_between(times, base, tops, step="post", color=colour, linewidth=0, zorder=2)
        if since <= (at := done[whole.index(peak)]) <= until:
            axes.plot([at], [base - 0.76], marker="v", markersize=3.5, color=_INK, zorder=4)
    axes.set_title("memory held, each rank at its own scale", loc="left", fontsize=8, color=_INK)
    axes.set_yticks(range(len(names)), names, fontsize=7, color=_INK)
    axes.set_xticks([])
    handles = [Patch(color=_MEMORY, label="activations"), Patch(color=_FIXED, label="weights and all else")]
    axes.legend(handles=handles, ncols=2, loc="lower right", bbox_to_anchor=(1.006, 1.0), **_LEGEND)


def _paler(colour: str, by: float) -> tuple[float, ...]:
    """Mix a #rrggbb colour with white."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(channel + (1 - channel) * by for channel in channels)
