"""The report's pictures: curves as SVG, bars as table rows, both in the colours and the type of their page.

Written out here instead of drawn by matplotlib, because a page that is read on a phone, in the dark and by
a screen reader needs text that is text and colours that follow it; and it is little. A method has one
colour and one marker everywhere. Accuracy has an axis that stretches towards 100 %, as in the PNGs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from comparison.plots import OFFSET, TICKS

WIDTH, HEIGHT = 520, 320
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 14, 46
STYLES = 7
MARKS = 8  # markers a curve, about
MARKERS = (  # paths around the origin, as in the PNGs: circle, square, triangles, diamond, plus, cross
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-3.6 -3.6h7.2v7.2h-7.2z",
    "M0 -4.6L4.4 3.4H-4.4z",
    "M0 -5L5 0L0 5L-5 0z",
    "M0 4.6L4.4 -3.4H-4.4z",
    "M-1.6 -4.8h3.2v3.2h3.2v3.2h-3.2v3.2h-3.2v-3.2h-3.2v-3.2h3.2z",
    "M-4.4 -2.2L-2.2 -4.4L0 -2.2L2.2 -4.4L4.4 -2.2L2.2 0L4.4 2.2L2.2 4.4L0 2.2L-2.2 4.4L-4.4 2.2L-2.2 0z",
)


@dataclass(frozen=True, slots=True)
class Curve:
    """A method's accuracy in percent along x, over its seeds. `style`: the method's number everywhere."""

    name: str
    style: int
    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True, slots=True)
class Bar:
    """A method's bar: its parts, the first solid and the rest pale, and what is written after it."""

    name: str
    style: int
    parts: tuple[float, ...]
    label: str


def marker(style: int) -> str:
    """Return a method's marker as an SVG of its own, for a legend."""
    return (
        f'<svg class="key s{style % STYLES}" viewBox="-6 -6 12 12" aria-hidden="true">'
        f'<path d="{MARKERS[style % STYLES]}"/></svg>'
    )


def accuracy(curves: Sequence[Curve], label: str, title: str, whole_x: bool) -> str:
    """Draw accuracy along x. `whole_x`: x counts something, and the axis starts where the curves do."""
    x0 = min(min(c.x) for c in curves) if whole_x else 0.0
    x1 = max(max(max(c.x) for c in curves), x0 + (1 if whole_x else 1e-9))
    lowest, highest = min(min(c.low) for c in curves), max(max(c.high) for c in curves)
    z0, z1 = _stretched(lowest), _stretched(highest)
    margin = 0.05 * (z1 - z0) + 0.01
    z0, z1 = z0 - margin, min(z1 + margin, _stretched(100.0))

    def across(x: float) -> float:
        return LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (_stretched(y) - z0) / (z1 - z0) * (HEIGHT - TOP - BOTTOM)

    parts = [_y_axis(_accuracy_ticks(z0, z1), up), _x_axis(_ticks(x0, x1, whole_x), across, label)]
    parts += [_band(curve, across, up) for curve in curves]
    # Curves over epochs may coincide, where methods do the same sums: the lower ones are wider.
    parts += [_line(c, across, up, len(curves) - 1 - i if whole_x else 0) for i, c in enumerate(curves)]
    return (
        f'<svg class="chart" role="img" viewBox="0 0 {WIDTH} {HEIGHT}"><title>{escape(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _stretched(y: float) -> float:
    return -log10(max(100 + OFFSET - y, 1e-3))


def _accuracy_ticks(z0: float, z1: float) -> list[float]:
    low, high = 100 + OFFSET - 10**-z0, 100 + OFFSET - 10**-z1
    inside = [float(tick) for tick in TICKS if low <= tick <= high]
    chosen = inside if len(inside) > 2 else _ticks(low, high, False)
    kept: list[float] = []
    for tick in chosen:  # leave out what would be written over its neighbour
        if not kept or (_stretched(tick) - _stretched(kept[-1])) / (z1 - z0) > 0.075:
            kept.append(tick)
    return kept


def _ticks(low: float, high: float, whole: bool) -> list[float]:
    """Return about six round numbers between two."""
    raw = max((high - low) / 6, 1e-9)
    power = 10 ** floor(log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    step = max(1.0, step) if whole else step
    first = ceil(low / step - 1e-9)
    return [i * step for i in range(first, floor(high / step + 1e-9) + 1)]


def _y_axis(ticks: Sequence[float], up: Callable[[float], float]) -> str:
    return "".join(
        f'<path class="grid" d="M{LEFT} {up(y):.1f}H{WIDTH - RIGHT}"/>'
        f'<text class="tick" x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:g}</text>'
        for y in ticks
    )


def _x_axis(ticks: Sequence[float], across: Callable[[float], float], label: str) -> str:
    base = HEIGHT - BOTTOM
    marks = "".join(
        f'<text class="tick" x="{across(x):.1f}" y="{base + 19}" text-anchor="middle">{x:g}</text>'
        for x in ticks
    )
    name = f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">'
    return f'<path class="base" d="M{LEFT} {base}H{WIDTH - RIGHT}"/>{marks}{name}{escape(label)}</text>'


def _band(curve: Curve, across: Callable[[float], float], up: Callable[[float], float]) -> str:
    if curve.low == curve.high:
        return ""
    there = [f"{across(x):.1f} {up(y):.1f}" for x, y in zip(curve.x, curve.high, strict=True)]
    back = [f"{across(x):.1f} {up(y):.1f}" for x, y in zip(curve.x, curve.low, strict=True)]
    return f'<path class="band s{curve.style % STYLES}" d="M{"L".join(there + back[::-1])}z"/>'


def _line(curve: Curve, across: Callable[[float], float], up: Callable[[float], float], below: int) -> str:
    points = [(across(x), up(y)) for x, y in zip(curve.x, curve.mean, strict=True)]
    style = f"s{curve.style % STYLES}"
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    every = max(1, ceil(len(points) / MARKS))
    shown = points[::-1][::every]  # the last one always
    marks = "".join(
        f'<path class="mark {style}" transform="translate({x:.1f} {y:.1f})" '
        f'd="{MARKERS[curve.style % STYLES]}"/>'
        for x, y in shown
    )
    title = f"<title>{escape(curve.name)}: {curve.mean[-1]:.2f} %</title>"
    return (
        f'<g>{title}<path class="line {style}" stroke-width="{2 + 0.7 * below:.1f}" d="M{path}"/>{marks}</g>'
    )


def bars(rows: Sequence[Bar], caption: str, head: tuple[str, str]) -> str:
    """Return bars as a table of their figures, which is what it is to who can't see them."""
    longest = max((sum(row.parts) for row in rows), default=0.0) or 1.0
    lines = []
    for row in rows:
        spans = "".join(
            f'<span class="bar s{row.style % STYLES}{" pale" * (i > 0)}" '
            f'style="width:{100 * part / longest:.2f}%"></span>'
            for i, part in enumerate(row.parts)
        )
        lines.append(
            f'<tr><th scope="row">{marker(row.style)}&nbsp;{escape(row.name)}</th>'
            f'<td><span class="track" aria-hidden="true">{spans}</span></td><td>{escape(row.label)}</td></tr>'
        )
    titles = f'<th scope="col">{escape(head[0])}</th><td></td><th scope="col">{escape(head[1])}</th>'
    return (
        f'<table class="bars"><caption>{escape(caption)}</caption><thead><tr>{titles}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
    )


def legend(names: Mapping[str, int], notes: Mapping[str, str]) -> str:
    """Return the methods with their markers, and a note to each."""
    items = "".join(
        f"<li>{marker(style)}&nbsp;{escape(name)} <b>{escape(notes.get(name, ''))}</b></li>"
        for name, style in names.items()
    )
    return f'<ul class="legend">{items}</ul>'
