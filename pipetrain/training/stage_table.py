"""Each stage's times, measured against predicted: for the summary, for TensorBoard, and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from pipetrain.prediction import StageTimes
from pipetrain.schedule.timeline import StageStats


def measured(placement: Sequence[int], stages: Sequence[StageStats], train_s: float) -> list[StageTimes]:
    """Turn what the stages did in `train_s` seconds of training into shares of it.

    Bubble and wait are of a stage's rank, which may hold other stages too.
    """
    busy, wait = ([0.0] * len(placement) for _ in range(2))
    for stats, rank in zip(stages, placement, strict=True):
        busy[rank] += stats.busy_s
        wait[rank] += stats.wait_s
    return [
        StageTimes(1 - busy[rank] / train_s, stats.busy_s / max(stats.updates, 1), wait[rank] / train_s)
        for stats, rank in zip(stages, placement, strict=True)
    ]


NOTABLE = 1.15  # times the mean of all ranks, from which on the slowest one is pointed out


@dataclass(frozen=True, slots=True)
class Straggler:
    """The slowest rank: seconds that it computes a batch, the mean of all ranks, and what it costs in all."""

    rank: int
    batch_s: float
    mean_s: float
    cost_s: float  # what the run would have saved, had the same work been spread evenly

    @property
    def sentence(self) -> str:
        """Say it on one line."""
        times = self.batch_s / self.mean_s
        return (
            f"rank {self.rank} is the straggler: {self.batch_s:.4f} s a batch, {times:.2f} times the mean of "
            f"all ranks, which cost {self.cost_s:.1f} s in all; see partition=profile"
        )


def find_straggler(placement: Sequence[int], run: Sequence[StageTimes], updates: int) -> Straggler | None:
    """Find the rank that holds the others up, if one is notably slower than their mean."""
    by_rank = [0.0] * (max(placement) + 1)
    for rank, stage in zip(placement, run, strict=True):
        by_rank[rank] += stage.stage_time_s or 0.0
    mean_s, slowest = mean(by_rank), max(by_rank)
    if slowest < NOTABLE * mean_s or not mean_s:
        return None
    return Straggler(by_rank.index(slowest), slowest, mean_s, (slowest - mean_s) * updates)


def table(run: Sequence[StageTimes], plan: Sequence[StageTimes], stages: Sequence[StageStats]) -> str:
    """Return a row a stage: measured, what the plan said, how late its gradients were, and what it sent."""
    lines = ["stage  bubble  (plan)  seconds a batch  (plan)    wait  (plan)  updates late  (most)"]
    lines[0] += "  MiB sent  ratio  codec s"
    for stage, (seen, said, stats) in enumerate(zip(run, plan, stages, strict=True)):
        ratio = "-" if stats.ratio is None else f"{stats.ratio:.1f}"
        lines.append(
            f"{stage:5d}  {seen.bubble:6.1%}  {said.bubble:6.1%}  {_seconds(seen.stage_time_s):>15}  "
            f"{_seconds(said.stage_time_s):>6}  {seen.wait:6.1%}  {said.wait:6.1%}  "
            f"{stats.mean_staleness:12.2f}  {stats.max_staleness:6d}  "
            f"{stats.bytes_sent / 2**20:8.1f}  {ratio:>5}  {stats.codec_s:7.2f}"
        )
    return "\n".join(lines)


def _seconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.4f}"
