"""Draws a timeline as text for a terminal: a row per rank, time to the right, microbatches as numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

from pipetrain.schedule.actions import COMPUTE, Action, Op
from pipetrain.schedule.memory import Memory, totals
from pipetrain.schedule.timeline import Timeline

LINES = 2, 1  # most lines of a text: of the window's beginning, and of its end
BATCHES = 2  # most batches of a beginning
NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.R: "recompute",
}
_LEVELS = "▁▂▃▄▅▆▇█"

Cells = tuple[int, int]
"""The first and the last cell of a part of a timeline."""


class Bar(NamedTuple):
    """An action as it is drawn."""

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
    unit, stages = unit_of(timeline), stages_of(timeline)
    several = any(len(on_rank) > 1 for on_rank in stages)
    total = cells_of(timeline)
    bars = bars_of(timeline, timeline.makespan if span is None else (span[1] + 0.5) * unit)
    names = [f"rank {rank}  " for rank in range(len(stages))]
    left = max(map(len, names), default=0)
    cell = 1 + max((len(_label(bar.action, several)) for bar in bars), default=1)
    fits = (width - left) // cell
    if fits < total:  # leave room for the mark at the end of a line
        fits = max(1, (width - left - 1) // cell)
    spans = ends(timeline, [lines * fits for lines in LINES]) if span is None else [_within(span, total)]
    rows = _drawn(bars, len(stages), max(until for _, until in spans), cell, unit, several)

    facts = [*([title] if title else []), *facts_of(timeline, unit_of_time)]
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


def _legend(bars: Sequence[Bar], several: bool) -> list[str]:
    """Return what the letters of a text are."""
    shown = {bar.action.op for bar in bars}
    names = [f"{op} {name}" for op, name in NAMES.items() if op in shown]
    names += ["| step"] if Op.STEP in shown else []
    number = "1F3: of stage 1, microbatch 3" if several else "F3: of microbatch 3"
    return [*names, ". idle", number]


def ends(timeline: Timeline, most: Sequence[int]) -> list[Cells]:
    """Return the parts of a window that show it: its first batches, and its end from the last forward on.

    `most`: cells of each. All of it is one part where what is left out would be shorter than its end.
    """
    unit, total, last = unit_of(timeline), cells_of(timeline), 0.0
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


def cells_of(timeline: Timeline) -> int:
    """Return how many cells, each of the time `unit_of`, a timeline has."""
    return round(timeline.makespan / unit_of(timeline))


def _within(span: Cells, total: int) -> Cells:
    return min(span[0], total), min(span[1], total)


def _left_out(spans: Sequence[Cells], total: int) -> str:
    parts = (f"{since} to {until}" if since else f"the first {until}" for since, until in spans)
    return f"{' and '.join(parts)} of {total} cells"


def _drawn(
    bars: Sequence[Bar], ranks: int, end: int, cell: int, unit: float, several: bool
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
    for of_rank, times in zip(memory, ends_of(timeline), strict=True):
        moments = totals(of_rank)
        most = max(moments, default=0) or 1
        row = []
        for start, end in cells:
            first, last = bisect_right(times, start), bisect_left(times, end)
            held = moments[max(0, first - 1) : max(1, last)]
            row.append(_LEVELS[max(0, -(-8 * max(held, default=0) // most) - 1)])
        rows.append(row)
    return rows


def ends_of(timeline: Timeline) -> list[list[float]]:
    """Return when the actions of each rank end."""
    return [[span.end for span in row.spans if span.action is not None] for row in timeline.rows]


def bars_of(timeline: Timeline, until: float) -> list[Bar]:
    """Return the computations and steps that begin before a time."""
    bars: list[Bar] = []
    for rank, (stages, row) in enumerate(zip(stages_of(timeline), timeline.rows, strict=True)):
        for action, began, end, waited, *_ in row.spans:
            start = began + waited  # of a STEP that waits for norms or ties
            if action is None or (action.op not in COMPUTE and action.op is not Op.STEP):
                continue
            if start > until or (start == until and action.op in COMPUTE):
                break
            bars.append(Bar(rank, action, start, end, stages.index(action.stage)))
    return bars


def _label(action: Action, several: bool) -> str:
    """Return `F3`, or `1F3` on a rank with several stages."""
    stage = str(action.stage) if several else ""
    return f"{stage}{action.op}{action.mb}" if action.op in COMPUTE else ""


def facts_of(timeline: Timeline, unit_of_time: str) -> list[str]:
    """Say how many ranks there are, how long it takes, and what of that is a bubble."""
    ranks = len(timeline.rows)
    return [
        f"{ranks} ranks" if ranks > 1 else "1 rank",
        f"makespan {_time(timeline.makespan, unit_of_time)}",
        f"bubble {timeline.bubble:.1%}",
    ]


def _time(time: float, unit_of_time: str) -> str:
    return f"{time:.4g} {unit_of_time}".rstrip()


def unit_of(timeline: Timeline) -> float:
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


def stages_of(timeline: Timeline) -> list[list[int]]:
    """Return the stages of each rank."""
    return [sorted({action.stage for action in row.actions}) for row in timeline.rows]
