"""What is said of a run's epochs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipetrain.records.history import History, Machine, find_straggler, stage_table, stage_times
from pipetrain.schedule.timeline import StageStats, StageTimes
from tests.support.cases import Case, make_run
from tests.support.figures import figures

RUN = make_run(Case("pipedream", 2, ("partition=[4]",))).about


def rows(history: History) -> list[list[str]]:
    return [line.split() for line in history.table().splitlines()[1:]]


def test_a_table_has_every_epoch_of_a_few():
    history = History(RUN)
    for epoch, correct in ((1, 5), (2, 9), (3, 6)):
        history.epochs.append(figures(epoch, correct))
    assert [row[0] for row in rows(history)] == ["1", "2", "3"]
    assert [row[-1] for row in rows(history)] == ["2.0", "best", "2.0"]
    assert rows(history)[1][:7] == ["2", "1.0000", "50.00", "%", "3.0000", "90.00", "%"]
    widths = {len(line.removesuffix("  best")) for line in history.table().splitlines()}
    assert len(widths) == 1


@pytest.mark.parametrize("epochs", [40, 41, 100])
def test_a_table_of_many_has_the_last_ones_and_the_best(epochs):
    history = History(RUN)
    for epoch in range(1, epochs + 1):
        history.epochs.append(figures(epoch, correct=9 if epoch == 3 else 5))
    shown = [int(row[0]) for row in rows(history)]
    if epochs <= 40:
        assert shown == list(range(1, epochs + 1))
    else:
        assert shown == [3, *range(epochs - 19, epochs + 1)]
    assert [row[0] for row in rows(history) if row[-1] == "best"] == ["3"]


def test_what_counts_begins_after_a_resume_on_another_partition():
    history = History(RUN)
    history.epochs = [replace(figures(1), stages={}), figures(2)]
    assert [times.stage_time_s for times in history.measured()] == pytest.approx([1.5 / 4, 0.5 / 4])


def test_half_an_epoch_counts_for_a_half():
    """As after a resume on another partition in the middle of it: 2 of 4 batches, 1 of 2 s."""
    history = History(RUN)
    half = {stage: replace(stats, updates=2) for stage, stats in figures(1).stages.items()}
    history.epochs = [replace(figures(1), stages=half)]
    for times in (history.measured()[0], history.measured_last()[0]):
        assert (times.stage_time_s, times.wait) == (pytest.approx(1.5 / 2), pytest.approx(0.4 / 1.0))
    assert history.summary(Machine("2 x cpu", 1, "none"))["bytes_per_epoch"] == 3000.0


def test_a_run_of_which_another_pipeline_made_each_update_has_a_summary():
    """As where one was stopped before its last evaluation, and went on from there on another partition."""
    history = History(RUN)
    history.epochs = [
        replace(figures(1), stages={}),
        replace(figures(2), stages={0: StageStats(), 1: StageStats()}),
    ]
    summary = history.summary(Machine("2 x cpu", 1, "none"))
    assert (summary["epochs"], summary["updates"], summary["straggler"]) == (2, 8, None)
    assert [summary[key] for key in ("bytes_per_epoch", "codec_s_per_epoch", "per_stage")] == [None, None, []]
    assert history.measured() == history.measured_last() == []
    assert len(history.stage_table().splitlines()) == 1


# Each stage's times


def test_bubble_and_wait_are_the_rank_s_and_seconds_the_stage_s():
    did = [StageStats(10, 1.0, 0.5), StageStats(10, 3.0, 1.0), StageStats(10, 2.0, 0.25)]
    stages = stage_times([0, 1, 0], did, 4.0)
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
    assert stage_table(seen, said, [sent, StageStats()]).splitlines() == [
        "stage  bubble  (plan)  seconds a batch  (plan)    wait  (plan)  updates late  (most)  "
        "MiB sent  ratio  codec s",
        "    0   30.5%   23.1%           0.3966       -   30.0%   23.1%          1.50       2  "
        "     1.0    4.0     1.25",
        "    1   15.0%   19.0%           0.4839  0.5000   14.0%   19.0%          0.00       0  "
        "     0.0      -     0.00",
    ]
