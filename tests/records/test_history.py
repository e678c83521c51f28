"""What is said of a run's epochs."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from pipetrain.records.history import History, RankRecord, RankRecords, epoch_table
from pipetrain.records.stage_table import stage_table
from pipetrain.runtime.stage.memory_meter import PeakBytes
from pipetrain.schedule.timeline import StageStats
from pipetrain.tasks.running_sums import Tally
from tests.support.cases import Case, make_run
from tests.support.run_files import figures

RUN = make_run(Case("pipedream", 2, ("partition=[4]",))).about
SPREAD = make_run(Case("pipedream", 3, ("partition=[4]", "replicas=[2,1]"))).about


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


def test_of_several_ranks_each_has_its_time_the_stage_the_means_and_the_fullest_its_memory():
    did = [{0: StageStats(4, 1.0)}, {0: StageStats(4, 2.0)}, {1: StageStats(4, 0.5)}]
    made = History(SPREAD)
    made.add(figures(1), [PeakBytes({0: 5}), PeakBytes({0: 7}, 9), PeakBytes({1: 3})], did)
    names = ("rank", "rank_times_s", "stage_time_s", "bubble", "memory_bytes", "allocated_bytes")
    assert [[getattr(one, name) for name in names] for one in made.stages(made.records)] == [
        [0, {"0": 0.25, "1": 0.5}, 0.375, 0.25, 7, 9],
        [2, {"2": 0.125}, 0.125, 0.75, 3, None],
    ]
    values = made.epochs[0].values
    assert {name: value for name, value in values.items() if name.startswith("stage_time/")} == {
        "stage_time/stage0": 0.375,
        "stage_time/stage0-rank0": 0.25,
        "stage_time/stage0-rank1": 0.5,
        "stage_time/stage1": 0.125,
    }
    assert [made.summary()[name] for name in ("stages", "virtual_stages")] == [2, 1]
    made.add(figures(2))  # of a process before: the means alone are known
    assert made.stages(made.records)[0].rank_times_s == {"0": 2.5 / 8, "1": 3.5 / 8}
    assert made.summary()["straggler"]["rank"] == 1


def test_a_run_of_which_another_pipeline_made_each_update_has_a_summary():
    """As where one was stopped before its last evaluation, and went on from there on another partition."""
    nothing = {0: StageStats(), 1: StageStats()}
    summary = history(replace(figures(1), stages={}), replace(figures(2), stages=nothing)).summary()
    assert (summary["epochs"], summary["updates"], summary["straggler"]) == (2, 8, None)
    assert [summary[key] for key in ("bytes_per_epoch", "per_stage")] == [None, []]
    assert len(stage_table([]).splitlines()) == 1


def test_the_last_stage_counts_and_replicas_are_one_stage():
    """Three ranks, of which the last two are replicas: of four microbatches each has run two."""
    own = [
        RankRecord({0: StageStats(updates=2, busy_s=4.0)}, Tally(), []),
        RankRecord({1: StageStats(updates=2, busy_s=3.0)}, Tally(6.0, 2.0, 2), [3.0, 2.0], train_s=5.0),
        RankRecord(
            {1: StageStats(updates=2, busy_s=1.0)}, Tally(2.0, 2.0, 2), [3.0, 2.0], Tally(1.0, 4.0, 4)
        ),
    ]
    groups: Any = SimpleNamespace(gather=lambda what, mine: [asdict(one) for one in own])
    ranks = RankRecords.gather(groups, "the figures", own[0], (1, 2))
    assert ranks.all == own
    assert ranks.stages == {0: own[0].stages[0], 1: StageStats(updates=2, busy_s=2.0)}
    assert (ranks.trained, ranks.evaluated) == (Tally(8.0, 4.0, 4), Tally(1.0, 4.0, 4))
    assert ranks.losses == [3.0, 2.0]
