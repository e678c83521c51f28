"""The comparison as tables: Markdown to read, CSV to compute with, and rows for the report.

The first table has the columns in which such comparisons are published, with their meaning: the best epoch of
all seeds and its accuracy, which flatters, because it is chosen on the test set. The second one is what to
trust: the last epoch, and means over the seeds with their deviation. The third one has the time to a target,
and what was measured. Where another metric is compared, such as perplexity, it takes the place of accuracy.
"""

from __future__ import annotations

import csv
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from comparison import measured
from comparison.figures import Metric, duration, metric_of, spread
from comparison.runs import Outcome, Summary
from pipetrain.records.sweep_table import figures_of

FILES = ("table.md", "runs.csv")
LATEX = "table.tex"
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

    @property
    def seconds(self) -> list[float]:
        """The mean time of an epoch's training of each finished run."""
        return [summary["epoch_s"] for summary in self.done]

    def alike(self, key: str) -> str:
        """Return what a key says in all runs; a dash where there is none."""
        return "; ".join(_distinct(self.done, key)) or "-"


def make_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each model and method, models apart, both in the order in which they come."""
    order = list(dict.fromkeys(outcome.spec.method.name for outcome in outcomes))
    rows: list[Row] = []
    for asked in dict.fromkeys(outcome.spec.model for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.spec.model == asked]
        # A run that failed may not know its model by itself, where only an override names it.
        model = next((str(outcome.summary["model"]) for outcome in mine if outcome.summary), asked or "-")
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


# What LaTeX would not print as it is.
_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
_TEX |= {sign: rf"\{sign}" for sign in "&%$#_{}"} | {sign: f"${sign}$" for sign in "<>|"}


def _tex(text: str) -> str:
    return "".join(_TEX.get(sign, sign) for sign in text)


@dataclass(frozen=True, slots=True)
class Table:
    """A head and lines of cells, with notes below. `text`: the columns that hold words; `bad`: cells."""

    name: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    text: Collection[str] = ("method", "dataset", "model", "device")
    bad: Collection[str] = ("failed",)

    @property
    def markdown(self) -> str:
        return "\n".join([markdown_table([self.head, *self.lines], self.text), *self.notes]) + "\n"

    @property
    def latex(self) -> str:
        """The table for a paper that uses the package booktabs, with its notes as caption."""
        columns = "".join("l" if name in self.text else "r" for name in self.head)
        head, *lines = (" & ".join(map(_tex, cells)) + r" \\" for cells in (self.head, *self.lines))
        rows = [
            r"\begin{table}\centering\small\setlength{\tabcolsep}{4pt}",
            rf"\caption{{{_tex(' '.join(self.notes))}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            *(r"\toprule", head, r"\midrule", *lines, r"\bottomrule"),
            r"\end{tabular}\end{table}",
        ]
        return "\n".join(rows) + "\n"


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


def tables(rows: Sequence[Row], target: float | None = None) -> list[Table]:
    """Return the tables of results. `target`: of the metric, as shown; None: the best that all runs reach."""
    metric = compared(rows)
    seeds = list(dict.fromkeys(outcome.spec.seed for row in rows for outcome in row.outcomes))
    title = metric.title + metric.unit + ("" if metric.higher else " (lower is better)")
    published = [
        f"epoch and {metric.name}: the best epoch of all seeds, counted from 1, and its test {title}. "
        "eachtime: mean time of an epoch's training, without evaluation."
    ]
    trusted = [
        f"Means over the seeds ({', '.join(map(str, seeds))}) ± their sample deviation. last_{metric.name}: "
        f"test {title} after the last epoch. train_s: seconds of an epoch's training; speedup: those of the "
        "model's first row over those of the row. MB, codec_s: sent in an epoch's training, by all stages "
        "together, and seconds of their codecs.",
        *remarks(rows),
    ]
    which = ", the best that all runs of a model reach" if target is None else ""
    beside = [f"target: test {title}{which}. {measured.MEANING}"]
    goals = {model: _common(of) if target is None else target for model, of in by_model(rows).items()}
    tables = []
    for name, lines, notes in (
        ("Results", [_published(row, metric) for row in rows], published),
        ("Over the seeds", [_trusted(row, metric) for row in rows], trusted),
        ("To a target, and measured", [_measured(row, metric, goals[row.model]) for row in rows], beside),
    ):
        tables.append(Table(name, list(lines[0]), [list(line.values()) for line in lines], notes))
    return tables


def _published(row: Row, metric: Metric) -> dict[str, str]:
    best = max(row.done, key=lambda summary: metric.worth(metric.value(summary, "best_val")), default=None)
    return {
        "method": row.method,
        "dataset": row.alike("data"),
        "model": row.model,
        "device": row.alike("device"),
        "lr": row.alike("lr"),
        "batch_size": row.alike("batch_size"),
        "data_worker": row.alike("data_workers"),
        "buffer_size": row.alike("buffer_size"),
        "epoch": str(best["best_epoch"]) if best else "-",
        metric.name: metric.number(metric.value(best, "best_val")) if best else "failed",
        "eachtime": duration(fmean(row.seconds)) if best else "-",
    }


def _trusted(row: Row, metric: Metric) -> dict[str, str]:
    mine, theirs = row.seconds, (row.first or row).seconds
    runs, sent = len(row.outcomes), [(summary.get("bytes_per_epoch") or 0.0) / 1e6 for summary in row.done]
    return {
        "method": row.method,
        "model": row.model,
        "seeds": str(runs) if len(row.done) == runs else f"{len(row.done)} of {runs}",
        f"last_{metric.name}": spread(row.last, metric.number) if row.done else "failed",
        "train_s": spread(mine),
        "speedup": f"{fmean(theirs) / fmean(mine):.2f}x" if mine and theirs else "-",
        "MB": f"{fmean(sent):.2f}" if sent else "-",
        "codec_s": spread([summary.get("codec_s_per_epoch") or 0.0 for summary in row.done]),
    }


def _common(rows: Sequence[Row]) -> float | None:
    return measured.common([run for row in rows for run in row.outcomes], compared(rows))


def _measured(row: Row, metric: Metric, target: float | None) -> dict[str, str]:
    runs, first = ([run for run in of.outcomes if run.summary] for of in (row, row.first or row))
    return {"method": row.method, "model": row.model, **measured.cells(runs, first, metric, target)}


def write(out: Path, results: Sequence[Table], rows: Sequence[Row], latex: bool = False) -> str:
    """Write table.md, runs.csv and, where it is asked for, table.tex; return the Markdown."""
    text = "\n".join(table.markdown for table in results)
    (out / "table.md").write_text(text)
    if latex:
        (out / LATEX).write_text("\n".join(table.latex for table in results))
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
    return (
        summary
        | figures_of(outcome.summary or {})
        | {
            "run": spec.name,
            "state": "failed" if outcome.failure else "done",
            "method": spec.method.name,
            "seed": spec.seed,
            "nproc": spec.nproc,
            "wall_s": outcome.wall_s,
        }
    )


def remarks(rows: Sequence[Row]) -> list[str]:
    """Say what failed, and what is not alike in runs that are compared."""
    said = []
    counts = [(row, len(row.outcomes), len(row.outcomes) - len(row.done)) for row in rows]
    if failed := [f"{row.method} {row.model} {n} of {runs}" for row, runs, n in counts if n]:
        said.append(f"Failed runs, left out of the means: {', '.join(failed)}.")
    for model, of_model in by_model(rows).items():
        done = [outcome for row in of_model for outcome in row.outcomes]
        facts = [outcome.machine | outcome.summary for outcome in done if outcome.summary]
        unlike = {key: "; ".join(each) for key in FAIR if len(each := _distinct(facts, key)) > 1}
        said += [f"Not alike in all runs: {key} ({model}: {each})." for key, each in unlike.items()]
    return said
