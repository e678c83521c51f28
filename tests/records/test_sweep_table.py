"""The table that ends a sweep: what its runs differ in, and what they came to."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from pipetrain.records.sweep_table import SweptRun, end_sweep, figures_of

STAGE = {"rank": 0, "bubble": 0.25, "mean_staleness": 0.5, "max_staleness": 1, "peak_versions": 2}
STAGES = [STAGE | {"memory_bytes": 2**20}, STAGE | {"memory_bytes": 2**21}]
STAGES += [
    STAGE | {"rank": 1, "bubble": 0.75, "mean_staleness": 0.2, "max_staleness": 0, "memory_bytes": 2**20}
]
ACC = {"name": "acc", "higher": True, "percent": True}


def run(folder: Path, overrides: str, why: str = "", **summary: Any) -> SweptRun:
    """A run of these overrides that left a summary, if anything is said of it."""
    folder.mkdir()
    if summary:
        (folder / "summary.json").write_text(json.dumps({"metrics": [ACC], "epoch_s": 1.5, **summary}))
    return SweptRun(overrides.split(), folder, why)


def test_a_sweep_ends_with_a_row_a_run_and_the_columns_that_differ(tmp_path):
    values = {"val_loss": 0.5, "val_acc": 0.8, "best_val_loss": 0.4, "best_val_acc": 0.9, "best_epoch": 2}
    runs = [
        run(
            tmp_path / "0", "model=mlp seed=0 +optim.lr=0.1", **values, per_stage=STAGES, simulated_bubble=0.2
        ),
        run(tmp_path / "1", "model=mlp seed=1 +optim.lr=0.1"),  # it was stopped
        run(tmp_path / "2", "model=mlp seed=2", **values),
    ]
    assert end_sweep(runs).splitlines() == [
        "run  seed  optim.lr  val loss  val acc  best val loss  best val acc  best epoch  epoch s  bubble  "
        "updates late  MiB",
        "0    0     0.1       0.5       80.00%   0.4            90.00%        2           1.50     50.0%   "
        "0.40          3.0",
        "2    2     -         0.5       80.00%   0.4            90.00%        2           1.50     -       "
        "-             -",
        f"all figures in {tmp_path}/sweep.csv",
    ]
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["run"], row["seed"], row["val_acc"], row["max_versions"]) for row in rows] == [
        ("0", "0", "0.8", "2"),
        ("2", "2", "0.8", ""),
    ]
    assert end_sweep(runs[1:]) == ""  # one that is done is no table


def test_a_run_that_was_refused_is_a_row_with_why(tmp_path):
    values = {"train_loss": 0.25, "train_acc": 0.5, "best_epoch": None}
    runs = [run(tmp_path / "0", "seed=0", **values), run(tmp_path / "1", "seed=-1", "seed=-1 must be ...")]
    assert end_sweep(runs).splitlines() == [
        "run  seed  train loss  train acc  best epoch  epoch s",
        "0    0     0.25        50.00%     -           1.50",
        "1    -1    -           -          -           -",
        "run 1: seed=-1 must be ...",
        f"all figures in {tmp_path}/sweep.csv",
    ]
    with (tmp_path / "sweep.csv").open() as file:
        assert [row["why"] for row in csv.DictReader(file)] == ["", "seed=-1 must be ..."]


def test_without_test_samples_it_is_the_training_that_is_compared(tmp_path):
    runs = [
        run(tmp_path / str(seed), f"seed={seed}", train_loss=0.25, train_acc=0.5, best_epoch=None)
        for seed in (0, 1)
    ]
    assert end_sweep(runs).splitlines()[:2] == [
        "run  seed  train loss  train acc  best epoch  epoch s",
        "0    0     0.25        50.00%     -           1.50",
    ]


def test_the_bubble_is_of_ranks_and_memory_of_the_fullest_one():
    figures = figures_of({"per_stage": STAGES, "simulated_bubble": 0.2})
    assert (figures["bubble"], figures["fullest_rank_mib"], figures["bubble_on_paper"]) == (50, 3, 20)
    several = STAGES[1] | {"rank_times_s": {"1": 0.1, "2": 0.1, "3": 0.1}}
    figures = figures_of({"per_stage": [several, STAGES[2] | {"rank": 0}], "simulated_bubble": 0.2})
    assert (figures["bubble"], figures["fullest_rank_mib"]) == ((3 * 0.25 + 0.75) / 4 * 100, 2)
    assert figures_of({"per_stage": []}) == figures_of({}) == {}
