"""The comparison as a table: Markdown to read, CSV to compute with.

What it shows of every comparison is what to trust: the last epoch, and means over the seeds with their
deviation. Beside a published record come its columns, with its meaning: the best epoch of all seeds and its
accuracy, which flatters, because it is chosen on the test set.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from comparison.runs import Outcome, Summary

FILES = ("table.md", "table.csv", "runs.csv")
# What should be alike in all runs of a model: keys of summary.json, and of what a run was made on, in words.
FAIR: tuple[str, ...] = ("model", "data", "device", "lr", "batch_size", "data_workers", "epochs", "updates")
FAIR += ("threads", "precision", "memory_format")
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
    def seeds(self) -> str:
        """How many runs finished, and of how many where some failed."""
        done, made = len(self.done), len(self.outcomes)
        return str(made) if done == made else f"{done} of {made}"

    @property
    def best(self) -> Summary:
        """The summary of the run with the best accuracy of all epochs; empty where none finished."""
        return max(self.done, key=lambda summary: summary["best_val_acc"], default={})

    def values(self, key: str) -> list[float]:
        """Return a figure of each finished run; none where one does not say it. Accuracies in percent."""
        found = [summary.get(key) for summary in self.done]
        factor = 100 if key.endswith("_acc") else 1
        return [] if None in found else [factor * value for value in found if value is not None]

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


def two(value: float) -> str:
    """Write a number with two digits after the point."""
    return f"{value:.2f}"


def times(value: float) -> str:
    """Write a factor: `1.50x`."""
    return f"{value:.2f}x"


def duration(seconds: float) -> str:
    """Write seconds as `8.3s`, `21s`, `2m36s` or `1h02m`."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def size(nbytes: float) -> str:
    """Write bytes as `512 B`, `3.07 MB` or `1.64 GB`, by powers of 1000."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= 0.9995 * factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def dash(value: float | None, form: Callable[[float], str]) -> str:
    """Write a value, None as a dash."""
    return "-" if value is None else form(value)


@dataclass(frozen=True, slots=True)
class Column:
    """A column: what it says of a row, and how a number is written.

    A value that is a list has an entry a seed, and is shown as mean and sample deviation: `90.00 ± 1.00`.
    """

    name: str
    value: Callable[[Row], str | float | list[float] | None]
    form: Callable[[float], str] = two

    def cell(self, row: Row) -> str:
        """Return what is printed; a dash where there is nothing to say, `failed` where no run finished."""
        value = self.value(row)
        if self.name in ("acc", "last_acc") and not row.done:
            return "failed"
        if isinstance(value, list):
            deviation = f" ± {stdev(value):.2f}" if len(value) > 1 else ""
            return f"{fmean(value):.2f}{deviation}" if value else "-"
        return value or "-" if isinstance(value, str) else dash(value, self.form)


TEXT = ("method", "dataset", "model", "device")
METHOD = Column("method", lambda row: row.method)
MODEL = Column("model", lambda row: row.model)
ACC = Column("acc", lambda row: max(row.values("best_val_acc"), default=None))
EACHTIME = Column("eachtime", lambda row: row.mean("epoch_s"), duration)
LAST_ACC = Column("last_acc", lambda row: row.values("val_acc"))
SPEEDUP = Column("speedup", lambda row: row.speedup(), times)
RECORD = (
    METHOD,
    Column("dataset", lambda row: row.alike("data")),
    MODEL,
    Column("device", lambda row: row.alike("device")),
    Column("lr", lambda row: row.alike("lr")),
    Column("batch_size", lambda row: row.alike("batch_size")),
    Column("data_worker", lambda row: row.alike("data_workers")),
    Column("buffer_size", lambda row: row.alike("buffer_size")),
    Column("epoch", lambda row: row.best.get("best_epoch"), str),
    ACC,
    EACHTIME,
)
RESULTS = (
    LAST_ACC,
    SPEEDUP,
    Column("train_s", lambda row: row.values("epoch_s")),
    Column("whole_s", lambda row: [summary["total_s"] / summary["epochs"] for summary in row.done]),
    Column("best_acc", lambda row: row.values("best_val_acc")),
    Column("bytes", lambda row: row.mean("bytes_per_epoch"), size),
    Column("bytes_ratio", lambda row: row.ratio("bytes_per_epoch"), lambda value: f"{value:.3f}"),
    Column("codec_s", lambda row: row.mean("codec_s_per_epoch")),
    Column("seeds", lambda row: row.seeds),
)
MEANING = {
    "epoch": "epoch and acc: the best epoch of all seeds, counted from 1, and its test accuracy in %",
    "eachtime": "eachtime: mean time of an epoch's training, without evaluation",
    "last_acc": "last_acc: mean test accuracy in % after the last epoch",
    "speedup": "speedup: train_s of the model's first row over that of the row",
    "train_s": "train_s: seconds of an epoch's training; whole_s: with evaluation and all else",
    "best_acc": "best_acc: mean of each seed's best epoch",
    "bytes": "bytes: on the wire in an epoch's training; bytes_ratio: to those of the model's first row",
    "codec_s": "codec_s: seconds of an epoch in codecs, all stages together",
}


def make_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each model and method, models apart, both in the order in which they come."""
    models: dict[str | None, dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        methods = models.setdefault(outcome.spec.model, {})
        methods.setdefault(outcome.spec.method.name, []).append(outcome)
    order = list(dict.fromkeys(outcome.spec.method.name for outcome in outcomes))
    rows: list[Row] = []
    for asked, methods in models.items():
        # A run that failed may not know its model by itself, where only an override names it.
        known = (outcome.model for mine in methods.values() for outcome in mine if outcome.summary)
        model = next(known, asked or "")
        first: Row | None = None
        for method in sorted(methods, key=order.index):
            rows.append(Row(model, method, methods[method], first))
            first = first or rows[-1]
    return rows


def by_model(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each model."""
    models = dict.fromkeys(row.model for row in rows)
    return {model: [row for row in rows if row.model == model] for model in models}


def _distinct(facts: Sequence[Summary | dict[str, str]], key: str) -> list[str]:
    """Return the values of a key, each once; what an older run did not say is unknown."""
    values = (one.get(key, "unknown") for one in facts)
    return list(dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values))


def write(out: Path, rows: Sequence[Row], beside: str | None = None) -> str:
    """Write table.md, table.csv and runs.csv; return the Markdown.

    `beside`: the record's table in Markdown; None where there is no record, whose columns are then left out.
    """
    shown = filled((METHOD, MODEL, *RESULTS) if beside is None else (*RECORD, *RESULTS), rows)
    lines = [[column.name for column in shown], *([column.cell(row) for column in shown] for row in rows)]
    text = aligned(lines, TEXT) + "\n" + "\n".join([meaning(shown, rows), *remarks(rows)]) + "\n"
    text += f"\n{beside}" if beside else ""
    (out / "table.md").write_text(text)
    _write_csv(out / "table.csv", [_plain(row) for row in rows])
    _write_csv(out / "runs.csv", [_run(outcome) for row in rows for outcome in row.outcomes])
    return text


def filled(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Leave out the columns that say nothing of any row."""
    return [column for column in columns if any(column.cell(row) != "-" for row in rows)]


def aligned(lines: Sequence[Sequence[str]], text: Collection[str]) -> str:
    """Return lines of cells, the head first, as a Markdown table. `text`: the columns that hold words."""
    head = [name.removeprefix("record: ") in text for name in lines[0]]
    widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * w if words else "-" * (w - 1) + ":" for words, w in zip(head, widths, strict=True)]
    said = ""
    for line in (lines[0], rule, *lines[1:]):
        cells = zip(line, head, widths, strict=True)
        said += f"| {' | '.join(c.ljust(w) if words else c.rjust(w) for c, words, w in cells)} |\n"
    return said


def _plain(row: Row) -> dict[str, Any]:
    """Return a row as plain values by column, those of a list as mean and deviation."""
    line: dict[str, Any] = {}
    for column in (*RECORD, *RESULTS[:-1]):
        value = column.value(row)
        if isinstance(value, list):
            line[column.name] = fmean(value) if value else None
            line[f"{column.name}_dev"] = stdev(value) if len(value) > 1 else None
        else:
            line[column.name] = value
    return line | {"finished": len(row.done), "runs": len(row.outcomes)}


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
    for key, value in (outcome.summary or {}).items():
        if key.endswith("_acc"):
            line[f"{key}_percent"] = 100 * value
        elif isinstance(value, (str, int, float)):
            line.setdefault(key, value)
    return line


def _write_csv(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    columns = dict.fromkeys(key for line in lines for key in line)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line.items()})


def meaning(shown: Sequence[Column], rows: Sequence[Row]) -> str:
    """Say in sentences what the columns are."""
    seeds = list(dict.fromkeys(outcome.spec.seed for row in rows for outcome in row.outcomes))
    several = len(seeds) > 1
    said = [f"{len(seeds)} seed{'s' * several} ({', '.join(map(str, seeds))})"]
    said += ["±: sample deviation over the seeds" if several else "One run has no deviation"]
    return ". ".join([*said, *(MEANING[column.name] for column in shown if column.name in MEANING)]) + "."


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
    runs = [outcome for row in rows for outcome in row.outcomes]
    busy = [(outcome.other_load, outcome.spec.title) for outcome in runs if (outcome.other_load or 0) > BUSY]
    if busy:
        most, title = max(busy)
        said.append(
            f"Other programs ran beside {len(busy)} of {len(runs)} runs and make their times uncertain: "
            f"they kept {most:.1f} cores busy at most, during {title}."
        )
    return said
