"""Each stage's times: shares of training, and the table that holds them against the plan."""

from __future__ import annotations

import pytest

from pipetrain.prediction import StageTimes
from pipetrain.schedule.timeline import StageStats
from pipetrain.training.stage_table import find_straggler, measured, table


def test_bubble_and_wait_are_the_rank_s_and_seconds_the_stage_s():
    did = [StageStats(10, 1.0, 0.5), StageStats(10, 3.0, 1.0), StageStats(10, 2.0, 0.25)]
    stages = measured([0, 1, 0], did, 4.0)
    assert [s.bubble for s in stages] == pytest.approx([0.25, 0.25, 0.25])
    assert [s.wait for s in stages] == pytest.approx([0.1875, 0.25, 0.1875])
    assert [s.stage_time_s for s in stages] == pytest.approx([0.1, 0.3, 0.2])


def times(*seconds: float) -> list[StageTimes]:
    return [StageTimes(0.0, s, 0.0) for s in seconds]


def test_the_slowest_rank_is_pointed_out_with_what_it_costs():
    found = find_straggler([0, 1, 2], times(0.1, 0.4, 0.1), updates=10)
    assert found is not None
    assert (found.rank, found.batch_s, found.mean_s) == (1, 0.4, pytest.approx(0.2))
    assert found.cost_s == pytest.approx(2.0)
    assert found.sentence.startswith(
        "rank 1 is the straggler: 0.4000 s a batch, 2.00 times the mean of all ranks"
    )


def test_even_ranks_have_no_straggler_and_slices_of_a_rank_count_together():
    assert find_straggler([0, 1], times(0.2, 0.21), updates=10) is None
    assert find_straggler([0], times(0.2), updates=10) is None
    assert find_straggler([0, 1, 0, 1], times(0.1, 0.3, 0.3, 0.1), updates=10) is None


def test_the_table_has_a_row_a_stage_and_a_dash_for_what_is_not_known():
    seen = [StageTimes(0.305, 0.3966, 0.3), StageTimes(0.15, 0.4839, 0.14)]
    said = [StageTimes(0.231, None, 0.231), StageTimes(0.19, 0.5, 0.19)]
    sent = StageStats(staleness={0: 1, 2: 3}, bytes_sent=2**20, raw_bytes=4 * 2**20, codec_s=1.25)
    assert table(seen, said, [sent, StageStats()]).splitlines() == [
        "stage  bubble  (plan)  seconds a batch  (plan)    wait  (plan)  updates late  (most)  "
        "MiB sent  ratio  codec s",
        "    0   30.5%   23.1%           0.3966       -   30.0%   23.1%          1.50       2  "
        "     1.0    4.0     1.25",
        "    1   15.0%   19.0%           0.4839  0.5000   14.0%   19.0%          0.00       0  "
        "     0.0      -     0.00",
    ]
