"""The table that ends a sweep: a row per run, with the overrides in which the runs differ.

It is made from the summary.json of each run, so a run that was finished before is in it too.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from pipetrain.records.files import as_csv
from pipetrain.schedule.text import aligned

MIB = 2**20
FILE = "sweep.csv"
Summary = Mapping[str, Any]


def figures_of(summary: Summary) -> dict[str, float]:
    """Return the measurements of a run's pipeline, over all its stages and ranks."""
    stages = summary.get("per_stage") or []
    if not stages:
        return {}
    mib: dict[int, float] = defaultdict(float)
    bubble: dict[int, float] = {}
    for stage in stages:
        for rank in stage.get("rank_times_s") or [stage["rank"]]:
            mib[int(rank)] += (stage["memory_bytes"] or 0.0) / MIB
            bubble[int(rank)] = stage["bubble"]
    return {
        "bubble": 100 * fmean(bubble.values()),
        "bubble_on_paper": 100 * summary["simulated_bubble"],
        "mean_staleness": fmean(stage["mean_staleness"] for stage in stages),
        "max_staleness": max(stage["max_staleness"] for stage in stages),
        "max_versions": max(stage["peak_versions"] for stage in stages),
        "fullest_rank_mib": max(mib.values()),
    }


class SweptRun(NamedTuple):
    """A run of a sweep, and `why` it was refused or failed."""

    overrides: Sequence[str]
    folder: Path
    why: str = ""


def end_sweep(runs: Sequence[SweptRun]) -> str:
    """Return the table of some runs, and write it next to their folders as CSV; "" for fewer than two."""
    rows: list[dict[str, str]] = []
    lines: list[dict[str, Any]] = []
    of_runs = [dict(word.lstrip("+~").partition("=")[::2] for word in run.overrides) for run in runs]
    varied = [
        key
        for key in dict.fromkeys(k for words in of_runs for k in words)
        if len({words.get(key) for words in of_runs}) > 1
    ]
    for overrides, (_, folder, why) in zip(of_runs, runs, strict=True):
        chosen = {"run": folder.name, **{key: overrides.get(key, "-") for key in varied}}
        if why:
            rows.append(chosen)
            lines.append(chosen | {"why": why})
            continue
        with suppress(OSError, ValueError):  # a stopped run has none
            summary = json.loads((folder / "summary.json").read_text())
            rows.append(chosen | _shown(summary))
            plain = {key: value for key, value in summary.items() if isinstance(value, str | int | float)}
            lines.append(chosen | plain | figures_of(summary))
    if len(rows) < 2:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    file = runs[0].folder.parent / FILE
    with suppress(OSError):
        file.write_text(as_csv(lines), newline="")
    table = aligned([names, *([row.get(name, "-") for name in names] for row in rows)])
    failed = "".join(f"run {run.folder.name}: {run.why}\n" for run in runs if run.why)
    return f"{table}\n{failed}all figures in {file}"


def _shown(summary: Summary) -> dict[str, str]:
    """Return the cells of a run: loss and metrics after the last and the best epoch, and its costs."""
    percent = {"loss": False} | {metric["name"]: metric["percent"] for metric in summary["metrics"]}
    cells = {}
    for part in ("val", "best_val") if "val_loss" in summary else ("train",):
        for name, share in percent.items():
            value = summary[f"{part}_{name}"]
            cells[f"{part.replace('_', ' ')} {name}"] = f"{value:.2%}" if share else f"{value:.4g}"
    cells |= {"best epoch": str(summary["best_epoch"] or "-"), "epoch s": f"{summary['epoch_s']:.2f}"}
    if figures := figures_of(summary):
        cells["bubble"] = f"{figures['bubble']:.1f}%"
        cells["updates late"] = f"{figures['mean_staleness']:.2f}"
        cells["MiB"] = f"{figures['fullest_rank_mib']:.1f}"
    return cells
