"""The comparison as pictures: accuracy against epochs and against seconds, and throughput.

Accuracy is drawn on an axis that stretches towards 100 %, because the differences that matter lie within the
last points. A method has one colour and one marker in all pictures. Curves over epochs may coincide, where
schedules do the same sums: the lower ones are wider. Matplotlib is used through its objects, without pyplot's
global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from comparison.runs import Outcome, columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILES = ("accuracy_epoch.png", "accuracy_seconds.png", "throughput.png")

# Okabe and Ito's colours, which the colour-blind can tell apart, without yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK, PALE = "#333333", "#dddddd"
Array = npt.NDArray[np.float64]
OFFSET = 0.5  # of the stretched axis: how far beyond 100 % its end lies, in points
TICKS = (0, 20, 40, 60, 70, 80, 85, 90, 92, 94, 95, 96, 97, 98, 99, 99.5, 100)


class Style(NamedTuple):
    """How a method is drawn."""

    colour: str
    marker: str


class Group(NamedTuple):
    """The finished runs of one model and method."""

    method: str
    outcomes: list[Outcome]


def write(out: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the three pictures. Runs that failed are not in them."""
    schedules = dict.fromkeys(outcome.spec.method.name for outcome in outcomes)
    styles = dict(zip(schedules, map(Style._make, cycle(zip(COLOURS, MARKERS, strict=True))), strict=False))
    panels = _panels(outcomes)
    _accuracy(panels, styles, "epoch", "epoch").savefig(out / FILES[0])
    _accuracy(panels, styles, "elapsed_s", "seconds since the start, evaluation included").savefig(
        out / FILES[1]
    )
    _throughput(panels, styles).savefig(out / FILES[2])


def _panels(outcomes: Sequence[Outcome]) -> dict[str, list[Group]]:
    """Sort the finished runs by what a panel shows (a model and its data set), then by method."""
    panels: dict[str, dict[str, Group]] = {}
    for outcome in outcomes:
        if outcome.summary is not None:
            title = f"{outcome.model} on {outcome.summary['data']}"
            groups = panels.setdefault(title, {})
            groups.setdefault(outcome.spec.method.name, Group(outcome.spec.method.name, [])).outcomes.append(
                outcome
            )
    order = list(dict.fromkeys(outcome.spec.method.name for outcome in outcomes))
    return {
        title: sorted(groups.values(), key=lambda group: order.index(group.method))
        for title, groups in panels.items()
    }


def _figure(panels: dict[str, list[Group]], width: float, height: float) -> tuple[Figure, list[Axes]]:
    count = max(1, len(panels))
    figure = Figure(figsize=(width * count, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color("#999999")
        one.tick_params(colors="#999999", labelcolor=INK, labelsize=9)
    if not panels:
        axes[0].text(0.5, 0.5, "no run finished", ha="center", va="center", color=INK)
        axes[0].set_axis_off()
    return figure, axes


def _accuracy(panels: dict[str, list[Group]], styles: dict[str, Style], key: str, label: str) -> Figure:
    figure, axes = _figure(panels, 8.2, 4.8)
    for one, (title, groups) in zip(axes, panels.items(), strict=False):
        lowest, highest = 100.0, 0.0
        for below, group in zip(reversed(range(len(groups))), groups, strict=True):
            halo = below if key == "epoch" else 0
            curves = np.array(columns(group.outcomes, "val_acc")) * 100
            x = np.array(columns(group.outcomes, key)).mean(axis=0)
            style = styles[group.method]
            one.fill_between(x, curves.min(axis=0), curves.max(axis=0), color=style.colour, alpha=0.16, lw=0)
            mean = curves.mean(axis=0)
            one.plot(
                x,
                mean,
                color=style.colour,
                marker=style.marker,
                markersize=5.5 + 0.6 * halo,
                markevery=max(1, len(x) // 12),
                markeredgecolor="white",
                markeredgewidth=0.6,
                linewidth=1.8 + 0.8 * halo,
                label=f"{_plain(group.method)}  {mean[-1]:.2f} %",
            )
            lowest, highest = min(lowest, curves.min()), max(highest, curves.max())
        _stretch(one, lowest, highest)
        if key == "epoch":
            one.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            one.set_xlim(left=0)
        one.set_xlabel(label, color=INK)
        one.set_ylabel("test accuracy (%), axis stretched towards 100", color=INK)
        one.set_title(_title(title, groups), loc="left", fontsize=10.5, color=INK)
        one.grid(axis="y", color=PALE, linewidth=0.6)
        legend = one.legend(title="after the last epoch", loc="best", fontsize=9, title_fontsize=9)
        legend.get_frame().set_edgecolor("none")
        legend.set_alignment("left")
    return figure


def _title(title: str, groups: Sequence[Group]) -> str:
    n = max(len(group.outcomes) for group in groups)
    return f"{title}: mean of {n} seeds, band from least to most" if n > 1 else f"{title}, one seed"


def _plain(name: str) -> str:
    """Keep matplotlib from reading mathematics into a name."""
    return name.replace("$", r"\$")


def _stretch(axes: Axes, lowest: float, highest: float) -> None:
    """Scale an accuracy axis by the logarithm of what is missing to 100 %."""

    def forward(y: Array) -> Array:
        return -np.log10(np.maximum(100 + OFFSET - y, 1e-3))

    def back(z: Array) -> Array:
        return 100 + OFFSET - 10 ** -np.asarray(z)

    axes.set_yscale("function", functions=(forward, back))
    low, high = forward(np.array([lowest, highest]))
    margin = 0.05 * (high - low) + 0.01
    least, most = back(np.array([low - margin, high + margin]))
    axes.set_ylim(max(0.0, least), min(100.0, most))
    enough = sum(least <= tick <= most for tick in TICKS) > 2
    axes.yaxis.set_major_locator(FixedLocator(TICKS) if enough else MaxNLocator(6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _throughput(panels: dict[str, list[Group]], styles: dict[str, Style]) -> Figure:
    most = max((len(groups) for groups in panels.values()), default=1)
    figure, axes = _figure(panels, 6.8, 1.3 + 0.5 * most)
    for one, (title, groups) in zip(axes, panels.items(), strict=False):
        speeds = [[float((o.summary or {})["samples_per_s"]) for o in group.outcomes] for group in groups]
        longest = max(map(max, speeds))
        for place, (group, values) in enumerate(zip(groups, speeds, strict=True)):
            mean = fmean(values)
            one.barh(place, mean, height=0.66, color=styles[group.method].colour)
            if len(values) > 1:
                one.plot([min(values), max(values)], [place, place], color=INK, linewidth=1.4)
                one.plot(values, [place] * len(values), "|", color=INK, markersize=9, markeredgewidth=1.4)
            one.text(
                max(values) + 0.015 * longest,
                place,
                f"{mean:,.{0 if mean >= 100 else 1}f}",
                va="center",
                fontsize=9.5,
                color=INK,
            )
        one.set_yticks(range(len(groups)), [_plain(group.method) for group in groups], fontsize=9.5)
        one.tick_params(axis="y", length=0)
        one.set_ylim(len(groups) - 0.45, -0.55)
        one.set_xlim(0, longest * 1.13)
        one.set_xlabel(
            "training samples a second" + (", a stroke a seed" if len(speeds[0]) > 1 else ""), color=INK
        )
        one.set_title(title, loc="left", fontsize=10.5, color=INK)
    return figure
