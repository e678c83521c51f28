"""Draws timelines as one HTML page, one above the other on one axis of time, with nothing from elsewhere.

Each action is a bar of its own, which says what it is when it is pointed at; so even a long window can be
looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from pipetrain.schedule.actions import Op, most_open
from pipetrain.schedule.draw import COLOURS, NAMES, Block, bars_of
from pipetrain.schedule.timeline import Timeline

WIDTH, LEFT, HEIGHT, GAP = 1320, 50, 22, 4  # pixels: of all, of the names, of a rank, between ranks
NUMBERED = 10.0  # pixels of a bar from which on it has its number
TICKS = 12  # most of the axis
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff;
  margin: 1.5em auto; max-width: 1320px; padding: 0 1em; }
h1 { font-size: 1.4em; }
h2 { font-size: 1.1em; margin: 1em 0 0; }
p { margin: 0 0 .3em; }
i { display: inline-block; width: 1em; height: 1em; vertical-align: -.15em; margin: 0 .3em 0 1em; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
text { font: 11px system-ui, sans-serif; }
.bar text { fill: #fff; text-anchor: middle; }
.idle { fill: #e9e9e9; background: #e9e9e9; }
.grid { stroke: #bbb; stroke-width: .5; }
.step { stroke: #222; stroke-width: 2; }
.later rect { fill-opacity: .68; }
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
    bars = [bars_of(one.timeline, one.until) for one in shown]
    ops = {bar.action.op for of_one in bars for bar in of_one}
    paler = " &nbsp; (paler: a later stage of its rank)" * any(bar.depth for of_one in bars for bar in of_one)
    legend = "".join(f'<i class="{op}"></i>{op}, {name}' for op, name in NAMES.items() if op in ops)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(introduction)} A bar's number is its microbatch; point at it for more.</p>",
        f'<p>{legend}<i class="idle"></i>idle &nbsp; <b>|</b> step{paler}</p>',
    ]
    for one, of_one in zip(shown, bars, strict=True):
        parts += [f"<h2>{escape(one.name)}</h2>", f"<p>{escape(one.says)}</p>"]
        parts += [f"<p>{escape(facts(one, shown[0]))}</p>", _drawing(one, of_one, longest)]
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


def _drawing(one: Shown, bars: Sequence[Block], longest: float) -> str:
    """Draw the rows of all ranks as SVG; `longest`: the seconds that the axis shows."""
    scale, ranks = (WIDTH - LEFT - 8) / longest, len(one.timeline.rows)
    bottom, width = ranks * (HEIGHT + GAP), min(one.timeline.makespan, one.until) * scale
    parts = [f'<svg viewBox="0 0 {WIDTH} {bottom + 14}" role="img">']
    for label, at in _ticks(longest):
        x = LEFT + at * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 10}">{label}</text>')
    for rank in range(ranks):
        y = rank * (HEIGHT + GAP)
        parts.append(f'<text x="0" y="{y + 15}">rank {rank}</text>')
        parts.append(f'<rect class="idle" x="{LEFT}" y="{y}" width="{width:.1f}" height="{HEIGHT}"/>')
    parts += (_bar(bar, scale) for bar in bars if bar.end <= one.until)
    return "\n".join([*parts, "</svg>"])


def _ticks(longest: float) -> Iterator[tuple[str, float]]:
    """Yield the labels of the axis and their seconds, at 1, 2 or 5 of a power of ten."""
    power = 10.0 ** math.floor(math.log10(longest / TICKS))
    step = next(power * digit for digit in (1, 2, 5, 10) if longest / (power * digit) <= TICKS)
    for number in range(int(longest / step) + 1):
        at = number * step
        yield (f"{at:.4g} s" if longest >= 1 else f"{1000 * at:.4g} ms"), at


def _bar(bar: Block, scale: float) -> str:
    action, x, y = bar.action, LEFT + bar.start * scale, bar.rank * (HEIGHT + GAP)
    when = f"{1000 * bar.start:.1f} to {1000 * bar.end:.1f} ms"
    if action.op is Op.STEP:
        title = f"<title>stage {action.stage}, step to version {action.version}: {when}</title>"
        return f'<g>{title}<path class="step" d="M{x:.1f} {y - 2}v{HEIGHT + 4}"/></g>'
    what = f"stage {action.stage}, {NAMES[action.op]} of microbatch {action.mb}, version {action.version}"
    width = max(0.5, (bar.end - bar.start) * scale - 0.6)
    number = f'<text x="{x + width / 2:.1f}" y="{y + 15}">{action.mb}</text>' if width >= NUMBERED else ""
    return (
        f'<g class="bar {action.op}{" later" * bool(bar.depth)}"><title>{what}: {when}</title>'
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}"/>{number}</g>'
    )
