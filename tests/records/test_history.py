"""What is said of a run's epochs and of its stages, and the tables of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipetrain.records.history import History, epoch_table, launching, stage_table, stage_times, straggler
from pipetrain.runtime.held import Measured
from pipetrain.schedule.timeline import StageStats, StageTimes
from tests.support.cases import Case, make_run
from tests.support.figures import figures

RUN = make_run(Case("pipedream", 2, ("partition=[4]",))).about


def history(*records) -> History:
    made = History(RUN)
    made.records.extend(records)
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
    assert (first["stage_time_s"], first["wait"]) == (pytest.approx(1.5 / 2), pytest.approx(0.4 / 1.0))
    assert made.summary()["bytes_per_epoch"] == 3000.0


def test_a_run_of_which_another_pipeline_made_each_update_has_a_summary():
    """As where one was stopped before its last evaluation, and went on from there on another partition."""
    nothing = {0: StageStats(), 1: StageStats()}
    summary = history(replace(figures(1), stages={}), replace(figures(2), stages=nothing)).summary()
    assert (summary["epochs"], summary["updates"], summary["straggler"]) == (2, 8, None)
    assert [summary[key] for key in ("bytes_per_epoch", "per_stage")] == [None, []]
    assert len(stage_table(summary["per_stage"]).splitlines()) == 1


# Each stage's times


def test_bubble_and_wait_are_the_rank_s_and_seconds_the_stage_s():
    did = [StageStats(10, 1.0, 0.5), StageStats(10, 3.0, 1.0), StageStats(10, 2.0, 0.25)]
    wanted = [(0.25, 0.1, 0.1875), (0.25, 0.3, 0.25), (0.25, 0.2, 0.1875)]
    found = [(s.bubble, s.stage_time_s, s.wait) for s in stage_times([0, 1, 0], did, 4.0)]
    assert found == [pytest.approx(one) for one in wanted]


@pytest.mark.parametrize(
    ("ranks", "seconds", "slowest"),
    [
        ([0, 1, 2], [0.1, 0.4, 0.1], {"rank": 1, "batch_s": 0.4, "mean_s": 0.2, "cost_s": 2.0}),
        ([0, 1], [0.2, 0.21], None),
        ([0, 1, 0, 1], [0.1, 0.3, 0.3, 0.1], None),
        ([], [], None),
    ],
)
def test_the_slowest_rank_is_pointed_out_with_what_it_costs(ranks, seconds, slowest):
    stages: list[dict[str, Any]] = [
        {"rank": rank, "stage_time_s": time_s} for rank, time_s in zip(ranks, seconds, strict=True)
    ]
    assert straggler(stages, updates=10) == (slowest and pytest.approx(slowest))


def test_time_between_the_actions_of_a_rank_is_the_reason_of_a_bubble_beside_the_plan_s():
    """As of a tiny model: it computes in 2 % of the time, waits in 40 %, and launches in the rest."""
    tiny = {"rank": 1, "bubble": 0.98, "wait": 0.4, "stage_time_s": 0.004}
    waiting = {"rank": 0, "bubble": 0.98, "wait": 0.95, "stage_time_s": 0.004}
    reason = {"rank": 1, "share": pytest.approx(0.58), "pass_s": pytest.approx(0.0005)}
    assert launching([waiting, tiny], microbatches=4) == reason
    assert launching([waiting], microbatches=4) is launching([], microbatches=4) is None


def test_the_table_has_a_row_a_stage_and_a_dash_for_what_is_not_known():
    late = {
        0: StageStats(4, 1.5, 0.4, staleness={0: 1, 2: 3}, bytes_sent=2**20, raw_bytes=2**22, codec_s=1.25)
    }
    made = history(replace(figures(1), stages=late | {1: StageStats(4, 0.5, 1.2)}))
    made.held = {0: Measured({0: 2**20}), 1: Measured({1: 3 * 2**19}, 2**21)}
    made.predicted = [StageTimes(0.231, None, 0.231), StageTimes(0.19, 0.5, 0.19)]
    assert stage_table(made.stages(made.records)).splitlines() == [
        "stage  bubble  (plan)  seconds a batch  (plan)   wait  (plan)  updates late  (most)  "
        "MiB held  (plan)  allocator  MiB sent  ratio  codec s",
        "    0   25.0%   23.1%           0.3750       -  20.0%   23.1%          1.50       2  "
        "     1.0     0.7          -       1.0    4.0     1.25",
        "    1   75.0%   19.0%           0.1250  0.5000  60.0%   19.0%          0.00       0  "
        "     1.5     0.1        2.0       0.0      -     0.00",
    ]
