"""Draws a timeline as text for a terminal: a row per rank, time to the right, microbatches as numbers.

What plot.py draws too is here: bars, names, colours and the facts above a drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, inf
from statistics import fmean, median
from typing import NamedTuple

from pipetrain.schedule.actions import COMPUTE, Action, Op
from pipetrain.schedule.timeline import Timeline

LINES = 2  # most lines of a text, unless a span is given
NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.R: "recompute",
}
COLOURS = {Op.F: "#4e79a7", Op.B: "#a85a28", Op.I: "#e08a2e", Op.W: "#59a14f", Op.R: "#b07aa1"}

Cells = tuple[int, int]
"""The first and the last cell of a part of a timeline; a cell lasts `unit_of` the timeline."""


class Block(NamedTuple):
    """An action as it is drawn."""

    rank: int
    action: Action
    start: float  # from the timeline's start
    end: float
    depth: int  # index of the stage on its rank


def as_text(
    timeline: Timeline, width: int = 100, unit_of_time: str = "", span: Cells | None = None, title: str = ""
) -> str:
    """Draw a row per rank in `width` columns; a cell is the shortest action's time (1 at `unit_cost`).

    `F3` is the forward of microbatch 3, `B3--` its backward (`I` and `W` its halves); on ranks with several
    stages `1F3` names the stage too; a dot is idle time, `|` a step. `span`: the first and last cell, drawn
    in as many lines per rank as needed; None: as many as fit into LINES. With a `title`, a line explains the
    letters. `unit_of_time`: of the costs, as s.
    """
    unit, total, ranks = unit_of(timeline), cells_of(timeline), len(timeline.rows)
    stages = stages_of(timeline)
    virtual, one_each = any(len(on_rank) > 1 for on_rank in stages), stages == [[n] for n in range(ranks)]
    bars = bars_of(timeline)
    labels = [
        f"rank {n}" + f" ({named(stages_of_rank)})" * (not virtual and not one_each)
        for n, stages_of_rank in enumerate(stages)
    ]
    names = [f"{label.ljust(max(map(len, labels)))}  " for label in labels]
    cell = 1 + max((len(_label(bar.action, virtual)) for bar in bars), default=1)
    fits = max(1, (width - len(names[0]) - 1) // cell)  # and the mark at the end of a line
    first, last = (min(at, total) for at in span or (0, LINES * fits))

    facts = ", ".join([*([title] if title else []), *facts_of(timeline, unit_of_time)])
    notes = [facts, *([f"a cell is {unit:.3g} {unit_of_time}".rstrip()] if unit != 1 else [])]
    notes += [f"cells {first} to {last} of {total}"] if (first, last) != (0, total) else []
    head = ["; ".join(notes), *([", ".join(_legend(bars, virtual))] if title else [])]

    rows = _drawn(bars, ranks, last, cell, unit, virtual)
    groups = []
    for start in range(first, last, fits):
        stop = min(start + fits, last)
        more = "…" if stop < total else ""
        lines = ("".join(row[start * cell : stop * cell]).rstrip() for row in rows)
        groups.append("".join(f"{n}{line}{more}\n" for n, line in zip(names, lines, strict=True)))
    return "\n".join([*head, "\n".join(groups)])


def _legend(bars: Sequence[Block], virtual: bool) -> list[str]:
    shown = {bar.action.op for bar in bars}
    names = [f"{op} {name}" for op, name in NAMES.items() if op in shown]
    names += ["| step"] if Op.STEP in shown else []
    number = "1F3: of stage 1, microbatch 3" if virtual else "F3: of microbatch 3"
    return [*names, ". idle", number]


def _drawn(
    bars: Sequence[Block], ranks: int, end: int, cell: int, unit: float, virtual: bool
) -> list[list[str]]:
    """Return the characters of each rank's first `end` cells, of `cell` characters each."""
    rows = [list(("." + " " * (cell - 1)) * end) for _ in range(ranks)]
    for bar in bars:
        first, last = int(bar.start / unit + 0.5), int(bar.end / unit + 0.5)
        if bar.action.op is Op.STEP and 0 < first <= end:
            rows[bar.rank][first * cell - 1] = "|"
        elif first < min(last, end):
            bar_text = _label(bar.action, virtual).ljust((last - first) * cell - 1, "-") + " "
            rows[bar.rank][first * cell : last * cell] = bar_text[: (end - first) * cell]
    return rows


def _label(action: Action, virtual: bool) -> str:
    """Return `F3`, or `1F3` on a rank with several stages."""
    stage = str(action.stage) if virtual else ""
    return f"{stage}{action.op}{action.mb}" if action.op in COMPUTE else ""


def bars_of(timeline: Timeline, until: float = inf) -> list[Block]:
    """Return the computations and steps that begin before a time, counted from the timeline's start."""
    origin = min((row.began for row in timeline.rows), default=0.0)
    bars: list[Block] = []
    for rank, (stages, row) in enumerate(zip(stages_of(timeline), timeline.rows, strict=True)):
        for action, began, end, waited, *_ in row.spans:
            if action is not None and (action.op in COMPUTE or action.op is Op.STEP):
                start = began + waited - origin  # of a STEP that waits for norms or ties
                if start < until or (start == until and action.op is Op.STEP):
                    bars.append(Block(rank, action, start, end - origin, stages.index(action.stage)))
    return bars


def facts_of(timeline: Timeline, unit_of_time: str) -> list[str]:
    """Return the number of ranks, the makespan, and the bubble, as text."""
    ranks = len(timeline.rows)
    return [
        counted(ranks, "rank"),
        f"makespan {timeline.makespan:.4g} {unit_of_time}".rstrip(),
        f"bubble {timeline.bubble:.1%}",
    ]


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
    return max(min(flat), median(flat) / 4, fmean(max(times, key=fsum)) / 3)


def cells_of(timeline: Timeline) -> int:
    """Return how many cells a timeline has."""
    return round(timeline.makespan / unit_of(timeline))


def stages_of(timeline: Timeline) -> list[list[int]]:
    """Return the stages of each rank."""
    return [sorted({action.stage for action in row.actions}) for row in timeline.rows]


def named(stages: Sequence[int]) -> str:
    """Return `stage 0`, or `stages 0, 2`."""
    return f"stage{'s' * (len(stages) != 1)} {', '.join(map(str, stages))}"


def counted(number: int, noun: str) -> str:
    """Return a number of things, such as `1 batch` or `2 batches`."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('tch') else 's'}"


def aligned(rows: Sequence[Sequence[str]], right: bool = False) -> str:
    """Return the rows of a table as text, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = str.rjust if right else str.ljust
    return "\n".join("  ".join(map(pad, row, widths)).rstrip() for row in rows)
