"""What each stage did in some epochs, beside its plan: who is slow, and the table that ends a training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pipetrain.config.placement import span
from pipetrain.schedule.actions import Placement
from pipetrain.schedule.draw import aligned
from pipetrain.schedule.timeline import StageStats, StageTimes

LAUNCHING = 0.1  # of a rank's time between its actions is notable
NOTABLE = 1.15  # a rank is a straggler if it takes this many times the mean of all ranks
MIB = 2**20
HEAD = (
    "stage  rank  bubble  (plan)  seconds a batch  (plan)  wait  (plan)  updates late  (most)  MiB held  "
    "(plan)  allocator  MiB sent  ratio  codec s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """Every number of a stage in some epochs, measured and planned: a row of `per_stage` in summary.json.

    Of a stage with several ranks `rank` is the first, times are the means of all, memory is that of the
    fullest, and bytes are the sums. `rank_times_s`: the seconds of computing a batch of each rank.
    """

    stage: int
    rank: int
    rank_times_s: dict[str, float]
    layers: int
    params: int
    peak_in_flight: int
    peak_versions: int
    max_staleness: int
    mean_staleness: float
    staleness: dict[str, int]
    busy_fraction: float
    bytes_sent: int
    raw_bytes: int
    ratio: float | None
    codec_s: float
    skipped_updates: int
    bubble: float
    stage_time_s: float
    wait: float
    predicted_bubble: float
    predicted_stage_time_s: float | None
    predicted_wait: float
    memory_bytes: int | None  # most in a window
    predicted_memory_bytes: int
    allocated_bytes: int | None  # by its GPU's allocator

    def values(self, measured: bool) -> dict[str, float]:
        """Return what loggers get, by names such as `bubble/stage0`; memory where it was just `measured`."""
        values = {
            "bubble": self.bubble,
            "wait": self.wait,
            "stage_time": self.stage_time_s,
            "bubble_predicted": self.predicted_bubble,
            "wait_predicted": self.predicted_wait,
            "stage_time_predicted": self.predicted_stage_time_s,
            "staleness": self.max_staleness,
            "staleness_mean": self.mean_staleness,
            "sent_mib": self.bytes_sent / MIB,
            "codec_s": self.codec_s,
        }
        if measured and self.memory_bytes is not None:
            values["memory_mib"] = self.memory_bytes / MIB
            values["memory_mib_predicted"] = self.predicted_memory_bytes / MIB
        by_name = {f"{name}/stage{self.stage}": value for name, value in values.items() if value is not None}
        ranks = self.rank_times_s if len(self.rank_times_s) > 1 else {}
        return by_name | {f"stage_time/stage{self.stage}-rank{rank}": time for rank, time in ranks.items()}


def stage_times(placement: Placement, stages: Sequence[StageStats], train_s: float) -> list[StageTimes]:
    """Return the times of each stage in `train_s` seconds; of several ranks, the means."""
    busy: dict[int, float] = defaultdict(float)
    wait: dict[int, float] = defaultdict(float)
    for stats, ranks in zip(stages, placement, strict=True):
        for rank in ranks:
            busy[rank] += stats.busy_s
            wait[rank] += stats.wait_s
    return [
        StageTimes(
            1 - fmean(busy[rank] for rank in ranks) / train_s,
            stats.busy_s / max(stats.updates, 1),
            fmean(wait[rank] for rank in ranks) / train_s,
        )
        for stats, ranks in zip(stages, placement, strict=True)
    ]


def straggler(stages: Sequence[StageRecord], updates: int) -> dict[str, float] | None:
    """Return the slowest rank, if it is notably slower than the mean of all.

    `batch_s`, `mean_s`: its seconds of computing a batch, and the mean of all ranks; `cost_s`: the time that
    an even distribution of the same work would have saved.
    """
    by_rank: dict[int, float] = defaultdict(float)
    for one in stages:
        for of, time_s in one.rank_times_s.items():
            by_rank[int(of)] += time_s
    mean_s = sum(by_rank.values()) / max(1, len(by_rank))
    rank, slowest = max(by_rank.items(), key=lambda item: item[1], default=(0, 0.0))
    if slowest <= NOTABLE * mean_s:
        return None
    return {"rank": rank, "batch_s": slowest, "mean_s": mean_s, "cost_s": (slowest - mean_s) * updates}


def launching(stages: Sequence[StageRecord]) -> StageRecord | None:
    """Return a stage whose ranks neither compute nor wait for most of the time, if it is notable."""
    most = max(stages, key=lambda stage: stage.bubble - stage.wait, default=None)
    return most if most and most.bubble - most.wait >= LAUNCHING else None


def stage_table(stages: Sequence[StageRecord]) -> str:
    """Return a row per stage, measured beside planned; below, what the numbers of several ranks are."""

    def cell(value: float | None, form: str, unit: int = 1) -> str:
        return "-" if value is None else format(value / unit, form)

    rows = [HEAD.split("  ")]
    for one in stages:
        rows.append(
            [
                *(str(one.stage), span([*map(int, one.rank_times_s)])),
                *(cell(bubble, ".1%") for bubble in (one.bubble, one.predicted_bubble)),
                *(cell(seconds, ".4f") for seconds in (one.stage_time_s, one.predicted_stage_time_s)),
                *(cell(wait, ".1%") for wait in (one.wait, one.predicted_wait)),
                *(f"{one.mean_staleness:.2f}", str(one.max_staleness)),
                *(cell(nbytes, ".1f", MIB) for nbytes in (one.memory_bytes, one.predicted_memory_bytes)),
                *(cell(one.allocated_bytes, ".1f", MIB), cell(one.bytes_sent, ".1f", MIB)),
                *(cell(one.ratio, ".1f"), f"{one.codec_s:.2f}"),
            ]
        )
    several = any(len(one.rank_times_s) > 1 for one in stages)
    note = "of several ranks: mean bubble, seconds and wait; MiB held by the fullest; MiB sent by all"
    return aligned(rows, right=True) + f"\n{note}" * several
