"""The statistics of each stage in some epochs, next to its plan: the straggler, and the final table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from pipetrain.config.placement import span
from pipetrain.schedule.actions import Placement
from pipetrain.schedule.text import aligned
from pipetrain.schedule.timeline import StageStats, StageTimes

LAUNCHING = 0.1  # notable share of a rank's time between its actions
NOTABLE = 1.15  # a rank is a straggler if it takes this many times the mean of all ranks
MIB = 2**20
HEAD = (
    "stage  rank  bubble  (plan)  seconds a batch  (plan)  wait  (plan)  updates late  (most)  MiB held  "
    "(plan)  allocator  MiB sent  ratio  codec s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """Every number of a stage in some epochs, measured and planned: a row of `per_stage` in summary.json.

    For a stage with several ranks, `rank` is the first, times are means, memory is that of the fullest, and
    bytes are sums. `rank_times_s`: each rank's seconds of computing a batch.
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
    allocated_bytes: int | None  # by the GPU's allocator

    def values(self, measured: bool) -> dict[str, float]:
        """Return the values for loggers, by names such as `bubble/stage0`; memory if it was `measured`."""
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
    """Return the times of each stage in `train_s` seconds; for several ranks, the means."""
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
    for stage in stages:
        for rank_name, time_s in stage.rank_times_s.items():
            by_rank[int(rank_name)] += time_s
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
    """Return a row per stage, measured and planned; below, a note on stages with several ranks."""

    def cell(value: float | None, form: str, unit: int = 1) -> str:
        return "-" if value is None else format(value / unit, form)

    rows = [HEAD.split("  ")]
    for stage in stages:
        rows.append(
            [
                *(str(stage.stage), span([*map(int, stage.rank_times_s)])),
                *(cell(bubble, ".1%") for bubble in (stage.bubble, stage.predicted_bubble)),
                *(cell(seconds, ".4f") for seconds in (stage.stage_time_s, stage.predicted_stage_time_s)),
                *(cell(wait, ".1%") for wait in (stage.wait, stage.predicted_wait)),
                *(f"{stage.mean_staleness:.2f}", str(stage.max_staleness)),
                *(cell(nbytes, ".1f", MIB) for nbytes in (stage.memory_bytes, stage.predicted_memory_bytes)),
                *(cell(stage.allocated_bytes, ".1f", MIB), cell(stage.bytes_sent, ".1f", MIB)),
                *(cell(stage.ratio, ".1f"), f"{stage.codec_s:.2f}"),
            ]
        )
    replicated = any(len(stage.rank_times_s) > 1 for stage in stages)
    note = "of several ranks: mean bubble, seconds and wait; MiB held by the fullest; MiB sent by all"
    return aligned(rows, right=True) + f"\n{note}" * replicated
