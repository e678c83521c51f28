"""The comparison as a table: Markdown to read, CSV to compute with.

The first eleven columns are those of the published record that this comparison is held against, with its
meaning: the best epoch and its accuracy, and the seconds of one training epoch. The best of several epochs on
the test set flatters, and of several seeds more so, so what follows says what to trust: the last epoch, and
means over the seeds with their deviation.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from comparison.runs import Outcome
from comparison.text import aligned, dash, duration, plus_minus, size

FILES = ("table.md", "table.csv", "runs.csv")
RECORD: tuple[str, ...] = (
    "method",
    "dataset",
    "model",
    "device",
    "lr",
    "batch_size",
    "data_worker",
    "buffer_size",
)
RECORD += ("epoch", "acc", "eachtime")
COLUMNS: tuple[str, ...] = (
    *RECORD,
    "seeds",
    "last_acc",
    "best_acc",
    "train_s",
    "whole_s",
    "bytes",
    "bytes_ratio",
    "codec_s",
)
COLUMNS += ("speedup",)
TEXT = ("method", "dataset", "model", "device")
# What should be alike in all runs of a model: keys of summary.json, and of what a run was made on, in words.
FAIR: tuple[str, ...] = ("model", "data", "device", "lr", "batch_size", "data_workers", "epochs", "updates")
FAIR += ("threads", "precision", "memory_format")
MADE = {"machine": "machine", "torch": "torch version", "pipetrain": "pipetrain revision"}


@dataclass(frozen=True, slots=True)
class Row:
    """A method's line. Accuracies in percent, times in seconds; None where there is nothing to say.

    `epoch` and `acc` are those of the run with the best accuracy; what ends in `_mean` or `_dev`, and
    `eachtime` and all after it, is over all finished runs. `whole_s`: an epoch with its evaluation.
    `bytes_epoch`: on the wire, of all stages, in training. `bytes_ratio`, `speedup`: against the first row.
    """

    method: str
    dataset: str
    model: str
    device: str
    lr: str
    batch_size: str
    data_worker: str
    buffer_size: str
    epoch: int | None
    acc: float | None
    eachtime: float | None
    last_acc: float | None
    last_dev: float | None
    acc_mean: float | None
    acc_dev: float | None
    train_dev: float | None
    whole_s: float | None
    bytes_epoch: float | None
    bytes_ratio: float | None
    codec_s: float | None
    speedup: float | None
    finished: int
    runs: int


def make_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each model and method, models apart, both in the order in which they come."""
    methods = list(dict.fromkeys(outcome.spec.method.name for outcome in outcomes))
    rows: list[Row] = []
    for model, of_model in _by_model(outcomes):
        first: Row | None = None
        for method in methods:
            mine = [outcome for outcome in of_model if outcome.spec.method.name == method]
            if mine:  # a comparison that was interrupted may not have come to it
                row = _row(model, mine, first)
                first = first or row
                rows.append(row)
    return rows


def _by_model(outcomes: Sequence[Outcome]) -> list[tuple[str, list[Outcome]]]:
    """Return the outcomes of each model under its name, which a run that failed may not know by itself."""
    groups: dict[str | None, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.spec.model, []).append(outcome)
    return [
        (next((outcome.model for outcome in group if outcome.summary), model or ""), group)
        for model, group in groups.items()
    ]


def _row(model: str, outcomes: Sequence[Outcome], first: Row | None) -> Row:
    """Make the row of one model and method; `first` is the model's first, None where it is this one."""
    done = [outcome.summary for outcome in outcomes if outcome.summary is not None]
    best = max(done, key=lambda summary: summary["best_val_acc"], default=None)
    bests = [100 * summary["best_val_acc"] for summary in done]
    lasts = [100 * summary["val_acc"] for summary in done]
    times = [summary["epoch_s"] for summary in done]
    epoch_s, sent = mean(times), mean([summary.get("bytes_per_epoch") for summary in done])
    against, sent_first = (first.eachtime, first.bytes_epoch) if first else (epoch_s, sent)
    return Row(
        method=outcomes[0].spec.method.name,
        dataset=_distinct(done, "data"),
        model=model,
        device=_distinct(done, "device"),
        lr=_distinct(done, "lr"),
        batch_size=_distinct(done, "batch_size"),
        data_worker=_distinct(done, "data_workers"),
        buffer_size=_distinct(done, "buffer_size"),
        epoch=best["best_epoch"] if best else None,
        acc=max(bests, default=None),
        eachtime=epoch_s,
        last_acc=mean(lasts),
        last_dev=deviation(lasts),
        acc_mean=mean(bests),
        acc_dev=deviation(bests),
        train_dev=deviation(times),
        whole_s=mean([summary["total_s"] / summary["epochs"] for summary in done]),
        bytes_epoch=sent,
        bytes_ratio=sent / sent_first if sent is not None and sent_first else None,
        codec_s=mean([summary.get("codec_s_per_epoch") for summary in done]),
        speedup=against / epoch_s if against and epoch_s else None,
        finished=len(done),
        runs=len(outcomes),
    )


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None where there is no value or one is not known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample deviation, or None of less than two values."""
    return stdev(values) if len(values) > 1 else None


def _distinct(summaries: Sequence[Mapping[str, Any]], key: str) -> str:
    return "; ".join(_values(summaries, key))


def _values(facts: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Return the values of a key, each once; what an older run did not say is unknown."""
    values = (one.get(key, "unknown") for one in facts)
    return list(dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values))


def write(out: Path, outcomes: Sequence[Outcome], beside: str = "") -> str:
    """Write table.md, with what is to stand `beside`, table.csv and runs.csv; return the Markdown."""
    rows = make_rows(outcomes)
    text = markdown(rows) + "\n" + caption(outcomes) + (f"\n{beside}" if beside else "")
    (out / "table.md").write_text(text)
    names = [field.name for field in fields(Row)]
    _write_csv(out / "table.csv", [{name: getattr(row, name) for name in names} for row in rows])
    _write_csv(out / "runs.csv", [_run(outcome) for outcome in outcomes])
    return text


def _run(outcome: Outcome) -> dict[str, Any]:
    """Return a run's line of runs.csv: what it was, how it ended, and the plain values of its summary."""
    spec, summary = outcome.spec, outcome.summary or {}
    head: dict[str, Any] = {
        "run": spec.name,
        "state": "failed" if outcome.failure else "done",
        "method": spec.method.name,
        "schedule": spec.method.schedule,
    }
    head |= {"seed": spec.seed, "nproc": spec.nproc, "wall_s": round(outcome.wall_s, 1)}
    for key, value in summary.items():
        if key.endswith("_acc"):
            head[f"{key}_percent"] = 100 * value
        elif isinstance(value, (str, int, float)):
            head.setdefault(key, value)
    return head


def _write_csv(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    columns = dict.fromkeys(key for line in lines for key in line)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        for line in lines:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line.items()})


def cells(row: Row) -> dict[str, str]:
    """Return a row as it is printed, by column. A dash where there is nothing to say."""
    record = {name: str(getattr(row, name)) or "-" for name in RECORD[:8]}
    return record | {
        "epoch": dash(row.epoch, "{}"),
        "acc": "failed" if row.acc is None else f"{row.acc:.2f}",
        "eachtime": dash(row.eachtime, duration),
        "seeds": str(row.runs) if row.finished == row.runs else f"{row.finished} of {row.runs}",
        "last_acc": plus_minus(row.last_acc, row.last_dev),
        "best_acc": plus_minus(row.acc_mean, row.acc_dev),
        "train_s": plus_minus(row.eachtime, row.train_dev),
        "whole_s": dash(row.whole_s, "{:.2f}"),
        "bytes": dash(row.bytes_epoch, size),
        "bytes_ratio": dash(row.bytes_ratio, "{:.3f}"),
        "codec_s": dash(row.codec_s, "{:.2f}"),
        "speedup": dash(row.speedup, "{:.2f}x"),
    }


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, its columns aligned for a terminal too."""
    lines = [list(COLUMNS)] + [[cells(row)[name] for name in COLUMNS] for row in rows]
    return aligned(lines, [name not in TEXT for name in COLUMNS])


def caption(outcomes: Sequence[Outcome]) -> str:
    """Say what the table's numbers are made of, and what is not alike in runs that are compared."""
    return "\n".join([meaning(outcomes), *remarks(outcomes)]) + "\n"


def meaning(outcomes: Sequence[Outcome]) -> str:
    """Say what the columns are, in sentences."""
    seeds = list(dict.fromkeys(outcome.spec.seed for outcome in outcomes))
    n = len(seeds)
    over = f"n = {n} seeds ({', '.join(map(str, seeds))})" if n > 1 else f"n = {n} seed ({seeds[0]})"
    deviation = (
        "±: sample deviation over the seeds, sqrt(sum((x - mean)^2) / (n - 1))"
        if n > 1
        else "One run has no deviation"
    )
    return (
        f"{over}. epoch and acc: the best epoch of all seeds, counted from 1, and its test accuracy in %. "
        "eachtime: mean time of an epoch's training, without evaluation. last_acc: mean test accuracy after "
        f"the last epoch. best_acc: mean of each seed's best. {deviation}. train_s: eachtime in seconds; "
        "whole_s: with evaluation and all else. bytes: on the wire in an epoch's training; "
        "bytes_ratio: to those of the model's first row. codec_s: seconds of an epoch in codecs, all "
        "stages together. "
        "speedup: eachtime of the model's first row over that of the row."
    )


def remarks(outcomes: Sequence[Outcome]) -> list[str]:
    """Say what failed, and what is not alike in runs that are compared: a sentence each."""
    lines = []
    unfinished = [row for row in make_rows(outcomes) if row.finished < row.runs]
    if unfinished:
        words = (
            f"{row.method} {row.model}".strip() + f" {row.runs - row.finished} of {row.runs}"
            for row in unfinished
        )
        lines.append(f"Failed runs, left out of the means: {', '.join(words)}.")
    return lines + [f"Not alike in all runs: {difference}." for difference in _differences(outcomes)]


def _differences(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what should be the same for every run of a model, and is not."""
    found = []
    for model, group in _by_model(outcomes):
        done = [outcome for outcome in group if outcome.summary is not None]
        values = {key: _values([outcome.summary or {} for outcome in done], key) for key in FAIR}
        values |= {name: _values([outcome.made for outcome in done], key) for key, name in MADE.items()}
        found += [f"{name} ({model}: {'; '.join(each)})" for name, each in values.items() if len(each) > 1]
    return found
