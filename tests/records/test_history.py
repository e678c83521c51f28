"""What is said of a run's epochs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipetrain.records.history import History, epoch_table
from pipetrain.records.stages import stage_table
from pipetrain.schedule.timeline import StageStats
from tests.support.cases import Case, make_run
from tests.support.figures import figures

RUN = make_run(Case("pipedream", 2, ("partition=[4]",))).about


def history(*records) -> History:
    made = History(RUN)
    for record in records:
        made.add(record)
    return made


def test_a_table_of_many_epochs_has_the_last_ones_and_the_best():
    made = history(*(figures(n, correct=9 if n == 3 else 5) for n in range(1, 42)))
    rows = [line.split() for line in epoch_table(made).splitlines()[1:]]
    assert [int(row[0]) for row in rows] == [3, *range(22, 42)]
    assert rows[0] == ["3", "0.6667", "75.00", "%", "3.0000", "90.00", "%", "20.0", "2.0", "best"]


def test_half_an_epoch_counts_for_a_half():
    """As after a resume on another partition in the middle of it: 2 of 4 batches, 1 of 2 s."""
    half = {stage: replace(stats, updates=2) for stage, stats in figures(1).stages.items()}
    made = history(replace(figures(1), stages={}), replace(figures(2), stages=half))
    first = made.stages(made.records)[0]
    assert (first.stage_time_s, first.wait) == (pytest.approx(1.5 / 2), pytest.approx(0.4 / 1.0))
    assert made.summary()["bytes_per_epoch"] == 3000.0


def test_a_run_of_which_another_pipeline_made_each_update_has_a_summary():
    """As where one was stopped before its last evaluation, and went on from there on another partition."""
    nothing = {0: StageStats(), 1: StageStats()}
    summary = history(replace(figures(1), stages={}), replace(figures(2), stages=nothing)).summary()
    assert (summary["epochs"], summary["updates"], summary["straggler"]) == (2, 8, None)
    assert [summary[key] for key in ("bytes_per_epoch", "per_stage")] == [None, []]
    assert len(stage_table([]).splitlines()) == 1
