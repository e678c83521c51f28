"""Draws timelines as one HTML page, one above the other on one axis of time, with nothing from elsewhere.

Each action is a bar of its own, which says what it is when it is pointed at; so even a long window can be
looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from pipetrain.schedule.actions import COMPUTE, Op, most_open
from pipetrain.schedule.timeline import Row, Timeline

NAMES = {
    Op.F: "forward",
    Op.R: "recompute",
    Op.I: "input gradient",
    Op.W: "weight gradient",
    Op.B: "whole backward",
}
"""What the letters stand for, in the order of the legend."""
WIDTH, LEFT, HEIGHT, GAP = 1320, 50, 22, 4  # pixels: of all, of the names, of a rank, between ranks
LARGE, SMALL = 13.0, 6.5  # pixels of a bar from which on its number is large, or small
TICKS = 12  # most of the axis
COLOURS = {Op.F: "#4e79a7", Op.R: "#b07aa1", Op.I: "#d9822b", Op.W: "#59a14f", Op.B: "#a85a28"}
STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --idle: #e9e9e9; --line: #bbb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #ddd; --paper: #17191c; --idle: #2b2e33; --line: #555; }
}
body { background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif;
  margin: 1.5em auto; max-width: 1320px; padding: 0 1em; }
h1 { font-size: 1.4em; margin: 0 0 .4em; }
h2 { font-size: 1.1em; margin: 1em 0 0; }
p { margin: 0 0 .3em; }
i { display: inline-block; width: 1em; height: 1em; vertical-align: -.15em; margin: 0 .3em 0 1em; }
.facts { opacity: .8; font-size: .9em; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
text { fill: var(--ink); font: 11px system-ui, sans-serif; }
.bar text { fill: #fff; text-anchor: middle; }
.bar text.small { font-size: 7px; letter-spacing: -.4px; }
.idle { fill: var(--idle); background: var(--idle); }
.grid { stroke: var(--line); stroke-width: .5; }
.step { stroke: var(--ink); stroke-width: 2; }
.second rect { fill-opacity: .68; }
"""
STYLE += "".join(f".{op} rect {{ fill: {c}; }} i.{op} {{ background: {c}; }}\n" for op, c in COLOURS.items())


@dataclass(frozen=True, slots=True)
class Shown:
    """A timeline of the page, in seconds."""

    name: str
    says: str  # of it, in a sentence
    timeline: Timeline
    note: str = ""  # behind its time
    batches: int = 1  # that this time is for
    until: float = math.inf  # what to draw of it, from its start


def page(title: str, introduction: str, shown: Sequence[Shown]) -> str:
    """Return the page."""
    longest = max(min(one.timeline.makespan, one.until) for one in shown)
    ops = {action.op for one in shown for row in one.timeline.rows for action in row.actions}
    several = any(len(one.timeline.stages) > len(one.timeline.rows) for one in shown)
    paler = " &nbsp; (paler: its second stage)" if several else ""
    legend = "".join(f'<i class="{op}"></i>{op}, {name}' for op, name in NAMES.items() if op in ops)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(introduction)} A bar's number is its microbatch; point at it for more.</p>",
        f'<p>{legend}<i class="idle"></i>idle &nbsp; <b>|</b> step{paler}</p>',
    ]
    for one in shown:
        parts += [f"<h2>{escape(one.name)}</h2>", f"<p>{escape(one.says)}</p>"]
        parts += [f'<p class="facts">{escape(facts(one, shown[0]))}</p>', drawing(one, longest)]
    return "\n".join([*parts, "</body></html>\n"])


def facts(one: Shown, first: Shown) -> str:
    """Say in figures what a timeline shows, beside the first one."""
    timeline = one.timeline
    seconds = timeline.makespan
    held = most_open([row.actions for row in timeline.rows]) * len(timeline.rows) / len(timeline.stages)
    ratio = first.timeline.makespan / first.batches / (seconds / one.batches)
    gain = "" if one is first else f", {ratio:.2f} times as fast as {first.name}"
    return (
        f"{seconds:.3f} s{one.note}{gain} · bubble {timeline.bubble:.1%} · "
        f"a rank holds {held:g} microbatches of its part of the model at most · "
        f"staleness {max(timeline.staleness)}, weight versions {max(timeline.versions)}"
    )


def drawing(one: Shown, longest: float) -> str:
    """Draw the rows of all ranks as SVG; `longest`: the seconds that the axis shows."""
    scale = (WIDTH - LEFT - 8) / longest
    rows = one.timeline.rows
    began = min(row.began for row in rows)
    bottom = len(rows) * (HEIGHT + GAP)
    width = min(one.timeline.makespan, one.until) * scale
    parts = [f'<svg viewBox="0 0 {WIDTH} {bottom + 14}" role="img">']
    for label, at in _ticks(longest):
        x = LEFT + at * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 10}">{label}</text>')
    for rank, row in enumerate(rows):
        y = rank * (HEIGHT + GAP)
        parts.append(f'<text x="0" y="{y + 15}">rank {rank}</text>')
        parts.append(f'<rect class="idle" x="{LEFT}" y="{y}" width="{width:.1f}" height="{HEIGHT}"/>')
        parts += _bars(row, began, one.until, scale, y)
    return "\n".join([*parts, "</svg>"])


def _ticks(longest: float) -> Iterator[tuple[str, float]]:
    """Yield the labels of the axis and their seconds, at 1, 2 or 5 of a power of ten."""
    power = 10.0 ** math.floor(math.log10(longest / TICKS))
    step = next(power * digit for digit in (1, 2, 5, 10) if longest / (power * digit) <= TICKS)
    for number in range(int(longest / step) + 1):
        at = number * step
        yield (f"{at:.4g} s" if longest >= 1 else f"{1000 * at:.4g} ms"), at


def _bars(row: Row, began: float, until: float, scale: float, y: int) -> Iterator[str]:
    first = min(action.stage for action in row.actions)
    for span in row.spans:
        action = span.action
        if action is None or action.op not in COMPUTE | {Op.STEP}:
            continue
        start, end = span.start + span.waited - began, span.end - began
        if end > until:
            return
        x, width = LEFT + start * scale, max(0.5, (end - start) * scale - 0.6)
        if action.op is Op.STEP:
            title = _title(f"stage {action.stage}, step to version {action.version}", start, end)
            yield f'<g>{title}<path class="step" d="M{x:.1f} {y - 2}v{HEIGHT + 4}"/></g>'
            continue
        what = f"stage {action.stage}, {NAMES[action.op]} of microbatch {action.mb}, version {action.version}"
        kind = f"bar {action.op}{'' if action.stage == first else ' second'}"
        size = "" if width >= LARGE else ' class="small"'
        number = f'<text{size} x="{x + width / 2:.1f}" y="{y + 15}">{action.mb}</text>'
        yield (
            f'<g class="{kind}">{_title(what, start, end)}'
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}"/>'
            f"{number if width >= SMALL else ''}</g>"
        )


def _title(what: str, start: float, end: float) -> str:
    return f"<title>{what}: {1000 * start:.1f} to {1000 * end:.1f} ms</title>"
