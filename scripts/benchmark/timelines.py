"""Suite `timelines`: what four ranks really did, one schedule above the other on one axis of time.

The machine is that of `zero-bubble`, on which F, I and W of a whole stage take the same time (see `paced`),
so that the order is what can be seen. The page is one HTML file with nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from benchmark.contestants import Ours, race
from benchmark.paced import Paced
from benchmark.report import Row, timed_row
from benchmark.tasks import Scale
from benchmark.worlds import Say, run_world, titled
from benchmark.zero_bubble import Way, bound, prepared
from pipetrain.runtime.mesh import Mesh
from pipetrain.schedule.actions import COMPUTE, Op
from pipetrain.schedule.tailored import most_open
from pipetrain.schedule.timeline import Row as Spans
from pipetrain.schedule.timeline import Timeline

RANKS, MICROBATCHES, BATCHES = 4, 8, 2
PRODUCT_S = 0.06
SHOWN = {
    "1f1b": "One forward, one backward, a flush after each batch.",
    "zb_h1": "The same memory, the backward split: W waits until a rank has nothing else to do.",
    "zbv": "Two half stages a rank, placed as a V: the first rank has the loss, too.",
    "v_async": "The same placement without a flush, old weights stashed: no rank waits once it is full.",
}
NAMES = {Op.F: "forward", Op.I: "input gradient", Op.W: "weight gradient", Op.B: "whole backward"}
"""What F, I, W and B stand for, in the order of the legend."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A schedule as it ran in its fastest round. `paper_s`: seconds of the window by `simulate`."""

    name: str
    timeline: Timeline
    paper_s: float


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure, write the page if one is asked for, and give the rows."""
    names, product_s = (("1f1b", "v_async"), 0.004) if scale.quick else (tuple(SHOWN), PRODUCT_S)
    shown = run_world(measure, RANKS, titled(say, "timelines"), names, product_s, scale.rounds)[0]
    if scale.page is not None:
        scale.page.parent.mkdir(parents=True, exist_ok=True)
        scale.page.write_text(page(shown, product_s))
    seconds = {one.name: [one.timeline.makespan] for one in shown}
    for one in shown:
        against = {"of bound": "bound", "x 1f1b": "1f1b"}
        title = f"{one.name}: {one.timeline.bubble:.1%} bubble"
        series = {**seconds, title: seconds[one.name], "bound": [one.paper_s]}
        yield timed_row(f"timelines, a window of {BATCHES} batches", title, series, against)


def measure(mesh: Mesh, say: Say, names: Sequence[str], product_s: float, rounds: int) -> list[Shown]:
    """Run every schedule, on one rank; returns what all ranks did."""
    contestants, taken, paper = [], {}, {}
    for name in names:
        way = Way(name, BATCHES, v=name not in ("1f1b", "zb_h1"))
        job, one_s = prepared(way, mesh.world.size, MICROBATCHES, product_s)
        ours = Ours(name, job, mesh)
        rows: list[Spans] = []
        ours.observe = rows.append
        taken[name], paper[name] = rows, BATCHES * bound(job.plan, one_s)
        contestants.append(Paced(ours, one_s))
    race(mesh, contestants, rounds, say)
    by_rank: list[dict[str, list[Spans]]] = mesh.gather("the spans", taken)  # type: ignore[assignment]
    shown = []
    for name in names:
        turns = zip(*(rank[name] for rank in by_rank), strict=True)  # each with the rows of all ranks
        ran = [Timeline(list(rows), MICROBATCHES) for rows in turns]
        shown.append(Shown(name, min(ran, key=lambda turn: turn.makespan), paper[name]))
    return shown


# The page

WIDTH, LEFT, HEIGHT, GAP = 1320, 50, 22, 4  # pixels: of all, of the names, of a rank, between ranks
LARGE, SMALL = 13.0, 6.5  # pixels of a bar from which on its number is large, or small
TICK_S = 0.2
COLOURS = {Op.F: "#4e79a7", Op.I: "#d9822b", Op.W: "#59a14f", Op.B: "#a85a28"}
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


def page(shown: Sequence[Shown], product_s: float) -> str:
    """Return the page."""
    longest = max(one.timeline.makespan for one in shown)
    legend = "".join(f'<i class="{op}"></i>{op}, {name}' for op, name in NAMES.items())
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>Zero bubble, measured</title>',
        f"<style>{STYLE}</style></head><body>",
        "<h1>Zero bubble, measured</h1>",
        f"<p>{RANKS} ranks train {BATCHES} batches of {MICROBATCHES} microbatches, drawn from the spans that "
        f"the engine recorded, all on the same axis of time. F, I and W of a whole stage take "
        f"{1000 * product_s:g} ms each, and those of the half stages of a V placement half of it; B is I and "
        f"W in one. A bar's number is its microbatch; point at it for more.</p>",
        f'<p>{legend}<i class="idle"></i>idle &nbsp; <b>|</b> step &nbsp; (paler: its second stage)</p>',
    ]
    for one in shown:
        parts += [f"<h2>{escape(one.name)}</h2>", f"<p>{escape(SHOWN[one.name])}</p>"]
        parts += [f'<p class="facts">{facts(one, shown[0])}</p>', drawing(one.timeline, longest)]
    return "\n".join([*parts, "</body></html>\n"])


def facts(one: Shown, first: Shown) -> str:
    """Say in figures what a timeline shows, beside the first one."""
    timeline = one.timeline
    seconds = timeline.makespan
    held = most_open([row.actions for row in timeline.rows]) * len(timeline.rows) / len(timeline.stages)
    gain = "" if one is first else f", {first.timeline.makespan / seconds:.2f} times as fast as {first.name}"
    return (
        f"{seconds:.3f} s{gain} (on paper {one.paper_s:.3f} s) · bubble {timeline.bubble:.1%} · "
        f"a rank holds {held:g} microbatches of its part of the model at most · "
        f"staleness {max(timeline.staleness)}, weight versions {max(timeline.versions)}"
    )


def drawing(timeline: Timeline, longest: float) -> str:
    """Draw the rows of all ranks as SVG; `longest`: the seconds that the axis shows."""
    scale = (WIDTH - LEFT - 8) / longest
    began = min(row.began for row in timeline.rows)
    bottom = len(timeline.rows) * (HEIGHT + GAP)
    width = timeline.makespan * scale
    parts = [f'<svg viewBox="0 0 {WIDTH} {bottom + 14}" role="img">']
    for number in range(int(longest / TICK_S) + 1):
        x = LEFT + number * TICK_S * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 10}">{number * TICK_S:.1f} s</text>')
    for rank, row in enumerate(timeline.rows):
        y = rank * (HEIGHT + GAP)
        parts.append(f'<text x="0" y="{y + 15}">rank {rank}</text>')
        parts.append(f'<rect class="idle" x="{LEFT}" y="{y}" width="{width:.1f}" height="{HEIGHT}"/>')
        parts += _bars(row, began, scale, y)
    return "\n".join([*parts, "</svg>"])


def _bars(row: Spans, began: float, scale: float, y: int) -> Iterator[str]:
    first = min(action.stage for action in row.actions)
    for span in row.spans:
        action = span.action
        if action is None or action.op not in COMPUTE | {Op.STEP}:
            continue
        start, end = span.start + span.waited - began, span.end - began
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
