"""The comparison as a table: Markdown to read, CSV to compute with.

The first eleven columns are those of the published record that this comparison is held against, with its
meaning: the best epoch and its accuracy, and the seconds of one training epoch. The best of several epochs on
the test set flatters, and of several seeds more so, so what follows says what to trust: the last epoch, and
means over the seeds with their deviation.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from pipetrain.comparison.runs import Outcome

FILES = ("table.md", "table.csv", "runs.csv")
FAIR = ("data", "device", "lr", "batch_size", "data_workers", "epochs", "updates")  # alike in every row


@dataclass(frozen=True, slots=True)
class Row:
    """A method's line. Accuracies in percent, times in seconds; None where there is nothing to say.

    `epoch` and `acc` are those of the run with the best accuracy; what ends in `_mean` or `_dev`, and
    `eachtime`, is over all finished runs.
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
    speedup: float | None
    finished: int
    runs: int


COLUMNS = tuple(field.name for field in fields(Row))[:-2]


def make_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """Return a row for each model and schedule, models apart, both in the order in which they come."""
    models = list(dict.fromkeys(outcome.spec.model for outcome in outcomes))
    schedules = list(dict.fromkeys(outcome.spec.schedule for outcome in outcomes))
    rows: list[Row] = []
    for model in models:
        of_model = [outcome for outcome in outcomes if outcome.spec.model == model]
        first: Row | None = None
        for schedule in schedules:
            row = _row([outcome for outcome in of_model if outcome.spec.schedule == schedule], first)
            first = first or row
            rows.append(row)
    return rows


def _row(outcomes: Sequence[Outcome], first: Row | None) -> Row:
    """Make the row of one model and schedule; `first` is the model's first, None where it is this one."""
    done = [outcome.summary for outcome in outcomes if outcome.summary is not None]
    best = max(done, key=lambda summary: summary["best_val_acc"], default=None)
    bests = [100 * summary["best_val_acc"] for summary in done]
    lasts = [100 * summary["val_acc"] for summary in done]
    epoch_s = fmean(summary["epoch_s"] for summary in done) if done else None
    against = first.eachtime if first else epoch_s
    return Row(
        method=outcomes[0].spec.schedule,
        dataset=_distinct(done, "data"),
        model=_distinct(done, "model") or outcomes[0].model,
        device=_distinct(done, "device"),
        lr=_distinct(done, "lr"),
        batch_size=_distinct(done, "batch_size"),
        data_worker=_distinct(done, "data_workers"),
        buffer_size=_distinct(done, "buffer_size"),
        epoch=best["best_epoch"] if best else None,
        acc=max(bests, default=None),
        eachtime=epoch_s,
        last_acc=fmean(lasts) if done else None,
        last_dev=stdev(lasts) if len(done) > 1 else None,
        acc_mean=fmean(bests) if done else None,
        acc_dev=stdev(bests) if len(done) > 1 else None,
        speedup=against / epoch_s if against and epoch_s else None,
        finished=len(done),
        runs=len(outcomes),
    )


def _distinct(summaries: Sequence[dict[str, Any]], key: str) -> str:
    values = (summary[key] for summary in summaries)
    return "; ".join(dict.fromkeys(f"{v:g}" if isinstance(v, float) else str(v) for v in values))


def write(out: Path, outcomes: Sequence[Outcome]) -> str:
    """Write table.md, table.csv and runs.csv; return the Markdown."""
    rows = make_rows(outcomes)
    text = markdown(rows) + "\n" + caption(outcomes)
    (out / "table.md").write_text(text)
    _write_csv(out / "table.csv", [{name: getattr(row, name) for name in _names()} for row in rows])
    _write_csv(out / "runs.csv", [_run(outcome) for outcome in outcomes])
    return text


def _names() -> list[str]:
    return [field.name for field in fields(Row)]


def _run(outcome: Outcome) -> dict[str, Any]:
    """Return a run's line of runs.csv: what it was, how it ended, and the plain values of its summary."""
    spec, summary = outcome.spec, outcome.summary or {}
    head: dict[str, Any] = {
        "run": spec.name,
        "state": "failed" if outcome.failure else "done",
        "schedule": spec.schedule,
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


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, its columns aligned for a terminal too."""
    cells = [list(COLUMNS)] + [[_cell(row, name) for name in COLUMNS] for row in rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    numbers = [name not in ("method", "dataset", "model", "device") for name in COLUMNS]
    adjust: list[Callable[[str, int], str]] = [str.rjust if number else str.ljust for number in numbers]
    lines = [
        "| " + " | ".join(a(c, w) for a, c, w in zip(adjust, line, widths, strict=True)) + " |"
        for line in cells
    ]
    rule = ["-" * (w - 1) + ":" if number else "-" * w for number, w in zip(numbers, widths, strict=True)]
    return "\n".join([lines[0], "| " + " | ".join(rule) + " |", *lines[1:]]) + "\n"


def _cell(row: Row, name: str) -> str:
    value = getattr(row, name)
    if name == "acc" and value is None:
        return "failed"
    if value is None:
        return "-"
    if name == "eachtime":
        return duration(value)
    if name == "speedup":
        return f"{value:.2f}x"
    return f"{value:.2f}" if isinstance(value, float) else str(value) or "-"


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


def caption(outcomes: Sequence[Outcome]) -> str:
    """Say what the table's numbers are made of, and what is not alike in rows that are compared."""
    seeds = list(dict.fromkeys(outcome.spec.seed for outcome in outcomes))
    n = len(seeds)
    over = f"n = {n} seeds ({', '.join(map(str, seeds))})" if n > 1 else f"n = 1 seed ({seeds[0]})"
    deviation = (
        "last_dev and acc_dev: sample deviations, sqrt(sum((x - mean)^2) / (n - 1))"
        if n > 1
        else "One run has no deviation"
    )
    lines = [
        f"{over}. epoch and acc: the best epoch of all seeds, counted from 1, and its test accuracy in %. "
        "eachtime: mean time of an epoch's training, without evaluation. last_acc: mean test accuracy after "
        f"the last epoch. acc_mean: mean of each seed's best. {deviation}. "
        "speedup: eachtime of the model's first row over that of the row.",
    ]
    unfinished = [row for row in make_rows(outcomes) if row.finished < row.runs]
    if unfinished:
        words = (
            f"{row.method} {row.model}".strip() + f" {row.runs - row.finished} of {row.runs}"
            for row in unfinished
        )
        lines.append(f"Failed runs, left out of the means: {', '.join(words)}.")
    for difference in _differences(outcomes):
        lines.append(f"Not alike in all rows: {difference}.")
    return "\n".join(lines) + "\n"


def _differences(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what should be the same for every schedule of a model, and is not."""
    found = []
    for model in dict.fromkeys(outcome.spec.model for outcome in outcomes):
        done = [o.summary for o in outcomes if o.spec.model == model and o.summary is not None]
        for key in FAIR:
            values = _distinct(done, key)
            if ";" in values:
                found.append(f"{key} ({model + ': ' if model else ''}{values})")
    return found
