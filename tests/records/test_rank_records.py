"""What ranks know of an epoch, added up as their stages have it."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from pipetrain.records.rank_records import RankRecord, RankRecords
from pipetrain.schedule.timeline import StageStats
from pipetrain.tasks.running_sums import Tally


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
