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

from comparison.figures import Metric, duration, metric_of, size, spread
from comparison.runs import Outcome, Summary

FILES = ("table.md", "runs.csv")
# What should be alike in all runs of a model: keys of summary.json, and of what a run was made on.
FAIR: tuple[str, ...] = ("model", "data", "device", "lr", "batch_size", "data_workers", "epochs", "updates")
FAIR += ("threads", "precision", "memory_format", "task", "machine", "torch", "pipetrain")


@dataclass(frozen=True, slots=True)
class Row:
    """The runs of one method on one model. `first`: the model's first row, None where it is this one."""

    model: str
    method: str
    outcomes: list[Outcome]
    first: Row | None

    @property
    def done(self) -> list[Summary]:
        return [outcome.summary for outcome in self.outcomes if outcome.summary is not None]

    @property
    def metric(self) -> Metric:
        return metric_of(self.done)

    @property
    def last(self) -> list[float]:
        """The metric after the last epoch of each finished run."""
        return [self.metric.value(summary, "val") for summary in self.done]

    def values(self, key: str) -> list[float]:
        """Return a figure of each finished run; none where one does not say it."""
        found = [summary.get(key) for summary in self.done]
        return [] if None in found else [value for value in found if value is not None]

    def ratio(self, key: str) -> float | None:
        """Return a figure's mean, divided by that of the model's first row."""
        mine, theirs = self.values(key), (self.first or self).values(key)
        return fmean(mine) / fmean(theirs) if mine and theirs and fmean(theirs) else None

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


def _distinct(facts: Sequence[Summary], key: str) -> list[str]:
    """Return the values of a key, each once; what an older run did not say is unknown."""
    values = (one.get(key, "unknown") for one in facts)
    return list(dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values))


MEANINGS = {
    "epoch": "epoch and {name}: the best epoch of all seeds, counted from 1, and its test {title}",
    "eachtime": "eachtime: mean time of an epoch's training, without evaluation",
    "last_{name}": "last_{name}: mean test {title} after the last epoch",
    "speedup": "speedup: train_s of the model's first row over that of the row",
    "train_s": "train_s: seconds of an epoch's training; whole_s: with evaluation and all else",
    "best_{name}": "best_{name}: mean of each seed's best epoch",
    "bytes": "bytes: on the wire in an epoch's training; bytes_ratio: to those of the model's first row",
    "codec_s": "codec_s: seconds of an epoch in codecs, all stages together",
}


def _cells(row: Row, metric: Metric) -> dict[str, str]:
    """Return what is printed of a row; a dash where there is nothing to say."""
    done, made, name = row.done, len(row.outcomes), metric.name
    bests = [metric.value(summary, "best_val") for summary in done]
    best = max(
        zip(map(metric.worth, bests), bests, done, strict=True), default=None, key=lambda each: each[0]
    )

    def figure(values: Sequence[float]) -> str:
        return spread(values, partial(metric.number, level=fmean(values) if values else None))

    def mean(key: str, form: Callable[[float], str]) -> str:
        values = row.values(key)
        return form(fmean(values)) if values else "-"

    speedup, more = row.ratio("epoch_s"), row.ratio("bytes_per_epoch")
    return {
        "method": row.method,
        "dataset": row.alike("data") or "-",
        "model": row.model or "-",
        "device": row.alike("device") or "-",
        "lr": row.alike("lr") or "-",
        "batch_size": row.alike("batch_size") or "-",
        "data_worker": row.alike("data_workers") or "-",
        "buffer_size": row.alike("buffer_size") or "-",
        "epoch": str(best[2]["best_epoch"]) if best else "-",
        name: metric.number(best[1]) if best else "failed",
        "eachtime": mean("epoch_s", duration),
        f"last_{name}": figure(row.last) if done else "failed",
        "speedup": f"{1 / speedup:.2f}x" if speedup else "-",
        "train_s": spread(row.values("epoch_s")),
        "whole_s": spread([summary["total_s"] / summary["epochs"] for summary in done]),
        f"best_{name}": figure(bests),
        "bytes": mean("bytes_per_epoch", size),
        "bytes_ratio": f"{more:.3f}" if more is not None else "-",
        "codec_s": mean("codec_s_per_epoch", "{:.2f}".format),
        "seeds": str(made) if len(done) == made else f"{len(done)} of {made}",
    }


@dataclass(frozen=True, slots=True)
class Table:
    """A head and lines of cells, with notes below. `text`: the columns that hold words."""

    name: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    text: Collection[str] = ("method", "dataset", "model", "device")


def markdown_table(lines: Sequence[Sequence[str]], text: Collection[str]) -> str:
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
    lines = [_cells(row, compared(rows)) for row in rows]
    shown = [name for name in lines[0] if any(line[name] != "-" for line in lines)]
    notes = [_meaning(shown, rows), *remarks(rows)]
    return Table("Results", shown, [[line[name] for name in shown] for line in lines], notes)


def write(out: Path, rows: Sequence[Row]) -> str:
    """Write table.md and runs.csv; return the Markdown."""
    table = results(rows)
    text = markdown_table([table.head, *table.lines], table.text) + "\n" + "\n".join(table.notes) + "\n"
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
    summary = {k: v for k, v in (outcome.summary or {}).items() if isinstance(v, (str, int, float))}
    return summary | {
        "run": spec.name,
        "state": "failed" if outcome.failure else "done",
        "method": spec.method.name,
        "seed": spec.seed,
        "nproc": spec.nproc,
        "wall_s": outcome.wall_s,
    }


def _meaning(shown: Collection[str], rows: Sequence[Row]) -> str:
    """Say in sentences what the columns are."""
    seeds = list(dict.fromkeys(outcome.spec.seed for row in rows for outcome in row.outcomes))
    several = len(seeds) > 1
    said = [f"{len(seeds)} seed{'s' * several} ({', '.join(map(str, seeds))})"]
    said += ["±: sample deviation over the seeds" if several else "One run has no deviation"]
    metric = compared(rows)
    title = metric.title + " in %" * metric.percent + f" ({metric.direction})" * (not metric.higher)
    words = {"name": metric.name, "title": title}
    said += [text.format(**words) for name, text in MEANINGS.items() if name.format(**words) in shown]
    return ". ".join(said) + "."


def remarks(rows: Sequence[Row]) -> list[str]:
    """Say what failed, and what is not alike in runs that are compared."""
    said = []
    counts = [(row, len(row.outcomes), len(row.outcomes) - len(row.done)) for row in rows]
    failed = [f"{row.method} {row.model}".strip() + f" {n} of {made}" for row, made, n in counts if n]
    if failed:
        said.append(f"Failed runs, left out of the means: {', '.join(failed)}.")
    for model, of_model in by_model(rows).items():
        done = [outcome for row in of_model for outcome in row.outcomes]
        facts = [outcome.made | outcome.summary for outcome in done if outcome.summary]
        unlike = {key: "; ".join(each) for key in FAIR if len(each := _distinct(facts, key)) > 1}
        said += [f"Not alike in all runs: {key} ({model}: {each})." for key, each in unlike.items()]
    return said
