"""The comparison as tables: Markdown to read, CSV to compute with, and rows for the report.

First come the columns in which such comparisons are published, with their meaning: the best epoch of all
seeds and its accuracy, which flatters, because it is chosen on the test set. Then comes what to trust: the
last epoch, and means over the seeds with their deviation. Where another metric is compared, such as
perplexity, it takes the place of accuracy.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from comparison.figures import Metric, deviation, duration, metric_of, size, times, two
from comparison.runs import Outcome, Summary

FILES = ("table.md", "runs.csv")
# What should be alike in all runs of a model: keys of summary.json, and of what a run was made on, in words.
FAIR: tuple[str, ...] = ("model", "data", "device", "lr", "batch_size", "data_workers", "epochs", "updates")
FAIR += ("threads", "precision", "memory_format", "task")
MADE = {"machine": "machine", "torch": "torch version", "pipetrain": "pipetrain revision"}
BUSY = 0.25  # cores that other programs may take before it is said


@dataclass(frozen=True, slots=True)
class Row:
    """The runs of one method on one model. `first`: the model's first row, None where it is this one."""

    model: str
    method: str
    outcomes: list[Outcome]
    first: Row | None

    @property
    def done(self) -> list[Summary]:
        """The summaries of the runs that finished."""
        return [outcome.summary for outcome in self.outcomes if outcome.summary is not None]

    @property
    def metric(self) -> Metric:
        """What its runs are compared by."""
        return metric_of(self.done)

    @property
    def best(self) -> Summary:
        """The summary of the run with the best epoch of all; empty where none finished."""
        metric = self.metric
        return max(self.done, key=lambda summary: metric.worth(metric.value(summary, "best_val")), default={})

    @property
    def last(self) -> list[float]:
        """The metric after the last epoch of each finished run."""
        return [self.metric.value(summary, "val") for summary in self.done]

    def values(self, key: str) -> list[float]:
        """Return a figure of each finished run; none where one does not say it."""
        found = [summary.get(key) for summary in self.done]
        return [] if None in found else [value for value in found if value is not None]

    def mean(self, key: str) -> float | None:
        """Return a figure's mean over the finished runs."""
        return fmean(values) if (values := self.values(key)) else None

    def ratio(self, key: str) -> float | None:
        """Return a figure's mean, divided by that of the model's first row."""
        mine, theirs = self.mean(key), (self.first or self).mean(key)
        return mine / theirs if mine is not None and theirs else None

    def speedup(self) -> float | None:
        """Return how many times as fast as the model's first row it trains."""
        return 1 / ratio if (ratio := self.ratio("epoch_s")) else None

    def alike(self, key: str) -> str:
        """Return what a key says in all runs."""
        return "; ".join(_distinct(self.done, key))


def make_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each model and method, models apart, both in the order in which they come."""
    order = list(dict.fromkeys(outcome.spec.method.name for outcome in outcomes))
    rows: list[Row] = []
    for asked in dict.fromkeys(outcome.spec.model for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.spec.model == asked]
        # A run that failed may not know its model by itself, where only an override names it.
        model = next((str(outcome.summary["model"]) for outcome in mine if outcome.summary), asked or "")
        first: Row | None = None
        for method in order:
            if runs := [outcome for outcome in mine if outcome.spec.method.name == method]:
                rows.append(Row(model, method, runs, first))
                first = first or rows[-1]
    return rows


def compared(rows: Sequence[Row]) -> Metric:
    """Return the metric that the rows are compared by; accuracy where no run finished."""
    return metric_of([summary for row in rows for summary in row.done])


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each model."""
    models = dict.fromkeys(row.model for row in rows)
    return {model: [row for row in rows if row.model == model] for model in models}


def _distinct(facts: Sequence[Summary | dict[str, str]], key: str) -> list[str]:
    """Return the values of a key, each once; what an older run did not say is unknown."""
    values = (one.get(key, "unknown") for one in facts)
    return list(dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values))


# Columns

METRIC = "{metric}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column: what it says of a row, how a number is written, and what it means.

    A value that is a list has an entry a seed, and is shown as mean and sample deviation: `90.00 ± 1.00`. The
    name of the metric stands for METRIC in a column's name, and its values are written as it says.
    """

    name: str
    value: Callable[[Row], str | float | list[float] | None]
    form: Callable[[float], str] = two
    meaning: str = ""

    def cell(self, row: Row) -> str:
        """Return what is printed; a dash where there is nothing to say, `failed` where no run finished."""
        value = self.value(row)
        if self in (BEST, LAST) and not row.done:
            return "failed"
        if value is None or isinstance(value, str):
            return value or "-"
        values = value if isinstance(value, list) else [value]
        if not values:
            return "-"
        mean = fmean(values) if len(values) > 1 else values[0]
        form = partial(row.metric.number, level=mean) if METRIC in self.name else self.form
        return form(mean) + (f" ± {form(deviation(values))}" if len(values) > 1 else "")

    def head(self, metric: Metric) -> str:
        """Return its name in a comparison by a metric."""
        return self.name.replace(METRIC, metric.name)


def _said(key: str) -> Callable[[Row], str]:
    return lambda row: row.alike(key)


def _seeds(row: Row) -> str:
    """Return how many runs finished, and of how many where some failed."""
    done, made = len(row.done), len(row.outcomes)
    return str(made) if done == made else f"{done} of {made}"


METHOD = Column("method", lambda row: row.method)
MODEL = Column("model", lambda row: row.model)
EPOCH = Column(
    "epoch",
    lambda row: row.best.get("best_epoch"),
    str,
    "epoch and {metric}: the best epoch of all seeds, counted from 1, and its test {title}",
)
BEST = Column(METRIC, lambda row: row.metric.value(row.best, "best_val") if row.done else None)
EACHTIME = Column(
    "eachtime",
    lambda row: row.mean("epoch_s"),
    duration,
    "eachtime: mean time of an epoch's training, without evaluation",
)
LAST = Column(
    f"last_{METRIC}",
    lambda row: row.last,
    meaning="last_{metric}: mean test {title} after the last epoch",
)
SPEEDUP = Column(
    "speedup",
    lambda row: row.speedup(),
    times,
    "speedup: train_s of the model's first row over that of the row",
)
PUBLISHED = (
    METHOD,
    Column("dataset", _said("data")),
    MODEL,
    Column("device", _said("device")),
    Column("lr", _said("lr")),
    Column("batch_size", _said("batch_size")),
    Column("data_worker", _said("data_workers")),
    Column("buffer_size", _said("buffer_size")),
    EPOCH,
    BEST,
    EACHTIME,
)
RESULTS = (
    LAST,
    SPEEDUP,
    Column(
        "train_s",
        lambda row: row.values("epoch_s"),
        meaning="train_s: seconds of an epoch's training; whole_s: with evaluation and all else",
    ),
    Column("whole_s", lambda row: [summary["total_s"] / summary["epochs"] for summary in row.done]),
    Column(
        f"best_{METRIC}",
        lambda row: [row.metric.value(summary, "best_val") for summary in row.done],
        meaning="best_{metric}: mean of each seed's best epoch",
    ),
    Column(
        "bytes",
        lambda row: row.mean("bytes_per_epoch"),
        size,
        "bytes: on the wire in an epoch's training; bytes_ratio: to those of the model's first row",
    ),
    Column("bytes_ratio", lambda row: row.ratio("bytes_per_epoch"), lambda value: f"{value:.3f}"),
    Column(
        "codec_s",
        lambda row: row.mean("codec_s_per_epoch"),
        meaning="codec_s: seconds of an epoch in codecs, all stages together",
    ),
    Column("seeds", _seeds),
)


# Tables


@dataclass(frozen=True, slots=True)
class Table:
    """A head and lines of cells, with notes below. `text`: the columns that hold words."""

    name: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    text: Collection[str] = ("method", "dataset", "model", "device")

    def markdown(self) -> str:
        """Return it with its notes as Markdown."""
        return aligned([self.head, *self.lines], self.text) + "\n" + "\n".join(self.notes) + "\n"


def aligned(lines: Sequence[Sequence[str]], text: Collection[str]) -> str:
    """Return lines of cells, the head first, as a Markdown table. `text`: the columns that hold words."""
    words = [name in text for name in lines[0]]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * w if left else "-" * (w - 1) + ":" for left, w in zip(words, widths, strict=True)]
    said = ""
    for line in (lines[0], rule, *lines[1:]):
        cells = zip(line, words, widths, strict=True)
        said += f"| {' | '.join(c.ljust(w) if left else c.rjust(w) for c, left, w in cells)} |\n"
    return said


def results(rows: Sequence[Row]) -> Table:
    """Return the table of results, without the columns that say nothing of any row."""
    shown = [column for column in (*PUBLISHED, *RESULTS) if any(column.cell(row) != "-" for row in rows)]
    lines = [[column.cell(row) for column in shown] for row in rows]
    notes = [meaning(shown, rows), *remarks(rows)]
    return Table("Results", [column.head(compared(rows)) for column in shown], lines, notes)


def write(out: Path, rows: Sequence[Row]) -> str:
    """Write table.md and runs.csv; return the Markdown."""
    text = results(rows).markdown()
    (out / "table.md").write_text(text)
    lines = [_run(outcome) for row in rows for outcome in row.outcomes]
    with (out / "runs.csv").open("w", newline="") as file:
        names = dict.fromkeys(name for line in lines for name in line)
        writer = csv.DictWriter(file, list(names), lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line.items()})
    return text


def _run(outcome: Outcome) -> dict[str, Any]:
    """Return a run's line of runs.csv: what it was, how it ended, and the plain values of its summary."""
    spec = outcome.spec
    line: dict[str, Any] = {
        "run": spec.name,
        "state": "failed" if outcome.failure else "done",
        "method": spec.method.name,
        "schedule": spec.method.schedule,
        "seed": spec.seed,
        "nproc": spec.nproc,
        "wall_s": round(outcome.wall_s, 1),
        "other_load": outcome.other_load,
    }
    summary = {k: v for k, v in (outcome.summary or {}).items() if isinstance(v, (str, int, float))}
    return summary | line


# What is said below a table


def meaning(shown: Sequence[Column], rows: Sequence[Row]) -> str:
    """Say in sentences what the columns are."""
    seeds = list(dict.fromkeys(outcome.spec.seed for row in rows for outcome in row.outcomes))
    several = len(seeds) > 1
    said = [f"{len(seeds)} seed{'s' * several} ({', '.join(map(str, seeds))})"]
    said += ["±: sample deviation over the seeds" if several else "One run has no deviation"]
    metric = compared(rows)
    title = metric.title + " in %" * metric.percent + f" ({metric.direction})" * (not metric.higher)
    said += [column.meaning.format(metric=metric.name, title=title) for column in shown if column.meaning]
    return ". ".join(said) + "."


def remarks(rows: Sequence[Row]) -> list[str]:
    """Say what failed, what is not alike in runs that are compared, and where the machine was busy."""
    said = []
    counts = [(row, len(row.outcomes), len(row.outcomes) - len(row.done)) for row in rows]
    failed = [f"{row.method} {row.model}".strip() + f" {n} of {made}" for row, made, n in counts if n]
    if failed:
        said.append(f"Failed runs, left out of the means: {', '.join(failed)}.")
    for model, of_model in by_model(rows).items():
        done = [outcome for row in of_model for outcome in row.outcomes if outcome.summary]
        values = {key: _distinct([outcome.summary or {} for outcome in done], key) for key in FAIR}
        values |= {name: _distinct([outcome.made for outcome in done], key) for key, name in MADE.items()}
        unlike = {name: "; ".join(each) for name, each in values.items() if len(each) > 1}
        said += [f"Not alike in all runs: {name} ({model}: {each})." for name, each in unlike.items()]
    return said + disturbed(rows)


def disturbed(rows: Sequence[Row]) -> list[str]:
    """Say whether other programs ran beside the runs."""
    runs = [outcome for row in rows for outcome in row.outcomes]
    busy = [(outcome.other_load, outcome.spec.title) for outcome in runs if (outcome.other_load or 0) > BUSY]
    if not busy:
        return []
    most, title = max(busy)
    return [
        f"Other programs ran beside {len(busy)} of {len(runs)} runs and make their times uncertain: they "
        f"kept {most:.1f} cores busy at most, during {title}."
    ]
