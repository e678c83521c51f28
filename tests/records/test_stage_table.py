"""What is said of each stage: its times, who is slow and why, and the table."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pipetrain.records.stage_table import StageRecord, launching, stage_table, stage_times, straggler
from pipetrain.runtime.stage.memory_meter import PeakBytes
from pipetrain.schedule.timeline import StageStats, StageTimes
from tests.records.test_history import history
from tests.support.run_files import figures

(STAGE, _) = history(figures(1)).stages([figures(1)])


def stage(**values: Any) -> StageRecord:
    return replace(STAGE, **values)


def test_bubble_and_wait_are_the_rank_s_and_seconds_the_stage_s():
    did = [StageStats(10, 1.0, 0.5), StageStats(10, 3.0, 1.0), StageStats(10, 2.0, 0.25)]
    wanted = [(0.25, 0.1, 0.1875), (0.25, 0.3, 0.25), (0.25, 0.2, 0.1875)]
    found = [(s.bubble, s.stage_time_s, s.wait) for s in stage_times([(0,), (1,), (0,)], did, 4.0)]
    assert found == [pytest.approx(one) for one in wanted]
    several = stage_times([(0, 1), (1,)], [StageStats(10, 1.0, 0.5), StageStats(10, 2.0, 0.0)], 4.0)
    assert [(s.bubble, s.wait) for s in several] == [(1 - (1 + 3) / 2 / 4, 0.125), (0.25, 0.125)]


@pytest.mark.parametrize(
    ("times", "slowest"),
    [
        ([{"0": 0.1}, {"1": 0.4}, {"2": 0.1}], {"rank": 1, "batch_s": 0.4, "mean_s": 0.2, "cost_s": 2.0}),
        ([{"0": 0.2}, {"1": 0.21}], None),
        ([{"0": 0.1}, {"1": 0.3}, {"0": 0.3}, {"1": 0.1}], None),
        ([], None),
        ([{"0": 0.1, "1": 0.4}, {"2": 0.1}], {"rank": 1, "batch_s": 0.4, "mean_s": 0.2, "cost_s": 2.0}),
    ],
)
def test_the_slowest_rank_is_pointed_out_with_what_it_costs(times, slowest):
    stages = [stage(rank_times_s=by_rank) for by_rank in times]
    assert straggler(stages, updates=10) == (slowest and pytest.approx(slowest))


def test_time_between_the_actions_of_a_rank_is_the_reason_of_a_bubble_beside_the_plan_s():
    """As of a tiny model: it computes in 2 % of the time, waits in 40 %, and launches in the rest."""
    tiny = stage(rank=1, bubble=0.98, wait=0.4)
    waiting = stage(rank=0, bubble=0.98, wait=0.95)
    assert launching([waiting, tiny]) is tiny
    assert launching([waiting]) is launching([]) is None


def test_the_table_has_a_row_a_stage_and_a_dash_for_what_is_not_known():
    late = {
        0: StageStats(4, 1.5, 0.4, staleness={0: 1, 2: 3}, bytes_sent=2**20, raw_bytes=2**22, codec_s=1.25)
    }
    made = history(replace(figures(1), stages=late | {1: StageStats(4, 0.5, 1.2)}))
    made.held = [PeakBytes({0: 2**20}), PeakBytes({1: 3 * 2**19}, 2**21)]
    made.predicted = [StageTimes(0.231, None, 0.231), StageTimes(0.19, 0.5, 0.19)]
    rows = [
        "stage  rank  bubble  (plan)  seconds a batch  (plan)   wait  (plan)  updates late  (most)  "
        "MiB held  (plan)  allocator  MiB sent  ratio  codec s",
        "    0     0   25.0%   23.1%           0.3750       -  20.0%   23.1%          1.50       2  "
        "     1.0     0.7          -       1.0    4.0     1.25",
        "    1     1   75.0%   19.0%           0.1250  0.5000  60.0%   19.0%          0.00       0  "
        "     1.5     0.1        2.0       0.0      -     0.00",
    ]
    first, second = made.stages(made.records)
    assert stage_table([first, second]).splitlines() == rows
    *several, note = stage_table([first, replace(second, rank_times_s={"1": 0.25, "2": 0.0})]).splitlines()
    assert [row.split()[1] for row in several] == ["rank", "0", "1-2"]
    assert note.startswith("of several ranks: mean bubble, seconds and wait; MiB held by the fullest")
