"""The comparison as pictures: the metric by epoch and by time, throughput, bytes, and the timelines.

The same figures are written as PNG beside the table and stand as SVG in the report. A method has one colour,
one marker and one line style in all of them, so curves can be told apart without colours too. Curves over
epochs may coincide, where schedules do the same sums: the lower ones are wider, and each has its markers at
other epochs. Matplotlib is used through its objects, without pyplot's global state.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from comparison.metric import Metric
from comparison.runs import Spec
from comparison.table import Row, by_model, compared, size
from pipetrain.cli import as_hydra, conf_dir
from pipetrain.schedule.actions import compute_program, placement
from pipetrain.schedule.draw import as_figure
from pipetrain.schedule.lower import lower
from pipetrain.schedule.simulate import simulate, unit_cost
from pipetrain.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# Okabe and Ito's colours, which the colour-blind can tell apart, without yellow.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), "-.", ":", (0, (8, 2)), (0, (4, 1, 1, 1, 1, 1)), (0, (2, 1)))
MARKS = 10  # markers on a curve, about
INK = "#333333"
STYLE: Any = {  # of matplotlib
    "text.parse_math": False,  # a name is no formula
    "svg.fonttype": "none",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
}
MICROBATCHES = 8  # about so many are drawn of a schedule, at least a batch


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure as it stands in the report: its SVG as an address, and what it shows in words."""

    title: str
    address: str
    words: str
    caption: str = ""


def files(metric: Metric) -> list[str]:
    """Return the names of the pictures of a comparison by a metric."""
    return [f"{metric.slug}_epoch.png", f"{metric.slug}_seconds.png", "throughput.png", "bytes.png"]


def write(out: Path, methods: Sequence[str], rows: Sequence[Row]) -> list[Picture]:
    """Write the pictures of the runs that finished as PNG; return them for the report.

    `methods`: the names of all of them, which decide how each is drawn.
    """
    metric = compared(rows)
    panels = by_model([row for row in rows if row.done])
    sent = by_model([row for rows in panels.values() for row in rows if row.values("bytes_per_epoch")])
    with matplotlib.rc_context(STYLE):
        drawn = [
            (f"{metric.heading} by epoch", _over(panels, methods, "epoch")),
            (f"{metric.heading} by time", _over(panels, methods, "elapsed_s")),
            ("Throughput", _bars(panels, methods, "samples_per_s", "training samples a second", _number)),
            ("Bytes", _bars(sent, methods, "bytes_per_epoch", "on the wire in an epoch's training", size)),
        ]
        pictures = []
        for name, (title, figure) in zip(files(metric), drawn, strict=True):
            (out / name).unlink(missing_ok=True)
            if figure is None:
                continue
            figure.savefig(out / name, dpi=150)
            svg = BytesIO()
            figure.savefig(svg, format="svg", metadata={"Date": None})
            words = "; ".join(
                f"{model} by {row.method}: {metric.text(fmean(row.last))} after the last epoch"
                for model, rows in panels.items()
                for row in rows
            )
            pictures.append(Picture(title, _address(svg.getvalue()), f"{title}. {words}"))
    return pictures


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _address(svg: bytes) -> str:
    return f"data:image/svg+xml;base64,{b64encode(svg).decode()}"


def _panels(panels: dict[str, list[Row]], height: float) -> tuple[Figure, list[Axes]]:
    """Make a figure with a panel for each model."""
    figure = Figure(figsize=(7.0 * len(panels), height), layout="constrained")
    axes = list(figure.subplots(1, len(panels), squeeze=False)[0])
    for one, (model, rows) in zip(axes, panels.items(), strict=True):
        seeds = max(len(row.done) for row in rows)
        what = f"{model} on {rows[0].alike('data')}, "
        one.set_title(what + (f"{seeds} seeds" if seeds > 1 else "one seed"), loc="left", fontsize=10.5)
    return figure, axes


def _over(panels: dict[str, list[Row]], methods: Sequence[str], key: str) -> Figure | None:
    """Draw the seeds' mean metric over a column of metrics.csv, in a band from the least to the most."""
    if not panels:
        return None
    figure, axes = _panels(panels, 4.4)
    for one, rows in zip(axes, panels.values(), strict=True):
        for place, row in enumerate(rows):
            metric, x = row.metric, np.mean(_curves(row, key), axis=0)
            y = metric.scale * np.array(_curves(row, f"val_{metric.name}"))
            mean, style = y.mean(axis=0), methods.index(row.method) % len(COLOURS)
            below = len(rows) - 1 - place if key == "epoch" else 0  # how many curves may cover this one
            every = max(1, len(x) // MARKS)
            one.fill_between(x, y.min(axis=0), y.max(axis=0), color=COLOURS[style], alpha=0.13, lw=0)
            one.plot(
                x,
                mean,
                color=COLOURS[style],
                linestyle=DASHES[style],
                linewidth=1.6 + 0.8 * below,
                marker=MARKERS[style],
                markersize=5.5 + 0.6 * below,
                markevery=(place % every, every),
                markeredgecolor="white",
                markeredgewidth=0.6,
                label=f"{row.method}  {metric.text(mean[-1])}",
            )
        one.set_ylabel(f"test {compared(rows).title}")
        (_percent if compared(rows).percent else _fitted)(one)
        if key == "epoch":
            one.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            one.set_xlabel("epoch")
        else:
            one.set_xlim(left=0)
            one.set_xlabel("seconds since the start, evaluation included")
        one.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
        one.grid(axis="y", linewidth=0.6)
        one.legend(title="after the last epoch", frameon=False, handlelength=3.6, alignment="left")
    return figure


def _curves(row: Row, key: str) -> list[list[float]]:
    """Return a column of metrics.csv of each finished run, up to the last epoch that all of them have.

    They differ where the number of epochs was changed between two runs.
    """
    curves = [outcome.curves[key] for outcome in row.outcomes if outcome.summary is not None]
    return [curve[: min(map(len, curves))] for curve in curves]


def _percent(axes: Axes) -> None:
    """Scale an axis of percentages: no wider than 0 to 100 %, no narrower than a point."""
    low, high = axes.get_ylim()
    middle, half = (low + high) / 2, max(high - low, 1.0) / 2
    axes.set_ylim(max(-0.5, middle - half), min(100.5, middle + half))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %"))


def _fitted(axes: Axes) -> None:
    """Scale an axis of numbers: by logarithms where a curve of positive ones spans more than a decade."""
    values = np.concatenate([np.asarray(line.get_ydata(), float) for line in axes.lines])
    values = values[np.isfinite(values)]
    if values.size and 0 < 10 * values.min() < values.max():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _bars(
    panels: dict[str, list[Row]],
    methods: Sequence[str],
    key: str,
    label: str,
    form: Callable[[float], str],
) -> Figure | None:
    """Draw the mean of a figure as a bar a method, with a stroke for each seed."""
    if not panels:
        return None
    figure, axes = _panels(panels, 1.1 + 0.42 * max(map(len, panels.values())))
    for one, rows in zip(axes, panels.values(), strict=True):
        longest = max(max(row.values(key)) for row in rows) or 1.0
        for place, row in enumerate(rows):
            values, style = row.values(key), methods.index(row.method) % len(COLOURS)
            one.barh(place, fmean(values), height=0.66, color=COLOURS[style])
            if len({*values}) > 1:
                one.plot(values, [place] * len(values), "|-", color=INK, markersize=9, linewidth=1.2)
            one.text(max(values) + 0.015 * longest, place, form(fmean(values)), va="center")
        one.set_yticks(range(len(rows)), [row.method for row in rows])
        one.tick_params(axis="y", length=0)
        one.set_ylim(len(rows) - 0.45, -0.55)
        one.set_xlim(0, 1.17 * longest)
        one.xaxis.set_major_locator(MaxNLocator(5))
        one.xaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
        several = ", a stroke for each seed" if any(len({*row.values(key)}) > 1 for row in rows) else ""
        one.set_xlabel(label + several)
    return figure


def timelines(specs: Sequence[Spec]) -> tuple[list[Picture], list[str]]:
    """Draw a short window of each schedule; return the drawings, and the methods that cannot be drawn.

    A method's own configuration says its schedule, microbatches and ranks, so this needs no run: it shows
    what was meant also where nothing finished. A schedule that decides while it runs is played at the same
    unit costs, as an example. Methods that differ in something else share a drawing.
    """
    first: dict[str, Spec] = {}
    for spec in specs:
        first.setdefault(spec.method.name, spec)
    drawn: dict[tuple[Any, ...], tuple[Timeline, list[str]]] = {}
    missing: list[str] = []
    for method, spec in first.items():
        try:
            key, timeline = play(spec)
        except Exception:  # whatever overrides that nobody has checked can do to a schedule
            missing.append(method)
            continue
        drawn.setdefault(key, (timeline, []))[1].append(method)
    pictures = []
    with TemporaryDirectory() as folder, matplotlib.rc_context({"svg.fonttype": "none"}):
        path = Path(folder) / "timeline.svg"
        for (_, ranks, batches, m, _), (timeline, methods) in drawn.items():
            title, caption = ", ".join(methods), f"{batches} batches of {m} microbatch{'es' * (m > 1)}"
            as_figure(timeline, path, title, f"forwards of 1/{ranks} of the model")
            words = f"{title}: {caption} on {ranks} ranks, bubble {timeline.bubble:.1%}"
            pictures.append(Picture(title, _address(path.read_bytes()), words, caption))
    return pictures, missing


def play(spec: Spec) -> tuple[tuple[Any, ...], Timeline]:
    """Return what a timeline depends on, and the timeline to draw."""
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = compose("config", overrides=as_hydra(spec.arguments))
    m, bound = int(cfg.microbatches), int(cfg.buffer_size)
    batches = max(2, -(-MICROBATCHES // m))
    program = lower(compute_program(instantiate(cfg.schedule), spec.nproc, batches, m, buffer_size=bound))
    share = spec.nproc / len(placement(program))  # of a rank's part of the model, in a stage
    timeline = simulate(program, m, buffer_size=bound, cost=lambda action: share * unit_cost(action))
    return (str(cfg.schedule), spec.nproc, batches, m, bound), timeline
