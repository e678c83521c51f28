"""A training's epochs, and what follows from them: the stages' times beside the plan's, and summary.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import torch

from pipetrain.checkpoint.progress import EpochRecord, best_epoch
from pipetrain.data.sets import DataFacts
from pipetrain.plan.memory import memory
from pipetrain.plan.plan import Plan
from pipetrain.runtime.allocator import keep_freed_memory
from pipetrain.runtime.held import Measured
from pipetrain.schedule.memory import peaks
from pipetrain.schedule.timeline import StageStats, StageTimes, total
from pipetrain.settings import Settings
from pipetrain.tasks import Task

NOTABLE = 1.15  # a rank is a straggler if it takes this many times the mean of all ranks
_OF_SETTINGS = (
    "model", "schedule", "batch_size", "microbatches", "buffer_size", "window", "lr", "seed", "precision",
    "compile",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class About:
    """The conditions of a training of `settings.epochs` epochs of `batches` batches each.

    `settings.lr`: the peak rate. `device`: a description such as `2 x cpu`. `room`: bytes of GPU for each
    rank; None on a CPU.
    """

    settings: Settings
    plan: Plan
    task: Task
    data: DataFacts
    batches: int
    device: str = "cpu"
    room: int | None = None

    @property
    def updates(self) -> int:
        return self.settings.epochs * self.batches


@dataclass(frozen=True, slots=True)
class Straggler:
    """The slowest rank: its seconds of computing per batch, the mean of all ranks, and the total cost."""

    rank: int
    batch_s: float
    mean_s: float
    cost_s: float  # the time that an even distribution of the same work would have saved

    @property
    def sentence(self) -> str:
        times = self.batch_s / self.mean_s
        return (
            f"rank {self.rank} is the straggler: {self.batch_s:.4f} s a batch, {times:.2f} times the mean of "
            f"all ranks, which cost {self.cost_s:.1f} s in all; see partition=profile"
        )


class History:
    """The epochs of a training so far. Those that another pipeline trained have no statistics of stages."""

    def __init__(self, about: About) -> None:
        self.about = about
        self.records: list[EpochRecord] = []
        self.held: dict[int, Measured] = {}  # what the rank of each stage held in one window, once measured
        self.held_epoch = 0  # of that window
        self.simulated = about.plan.timeline()
        self.predicted = about.plan.stage_times(self.simulated)
        self.predicted_memory = memory(about.plan, self.simulated)

    @property
    def last(self) -> EpochRecord:
        return self.records[-1]

    @property
    def best(self) -> EpochRecord:
        return best_epoch(self.records)

    def measured(self, held: Sequence[Measured]) -> None:
        """Take what the ranks held in a window of the newest epoch."""
        if held:
            self.held = {stage: rank for rank in held for stage in rank.stages}
            self.held_epoch = self.last.epoch

    @property
    def peaks(self) -> list[dict[str, int]]:
        """The most that each stage held; empty if it was not measured."""
        return peaks([{stage: rank.stages[stage]} for stage, rank in self.held.items()])

    def stats(self, records: Sequence[EpochRecord]) -> list[StageStats]:
        """Return the summed statistics of each stage in some epochs."""
        parts = [record.stages for record in records if record.stages]
        return [total([stages[stage] for stages in parts]) for stage in range(self.about.plan.stages)]

    def times(self, records: Sequence[EpochRecord]) -> list[StageTimes]:
        """Return the stages' times in some epochs; empty if another pipeline trained them."""
        seconds = self._seconds_covered(records)
        return stage_times(self.about.plan.placement, self.stats(records), seconds) if seconds else []

    def _seconds_covered(self, records: Sequence[EpochRecord]) -> float:
        """Return the seconds of training that the stages' statistics cover."""
        return sum(record.train_s * record.updates / self.about.batches for record in records)

    @property
    def straggler(self) -> Straggler | None:
        updates = sum(record.updates for record in self.records)
        return (
            find_straggler(self.about.plan.placement, self.times(self.records), updates) if updates else None
        )

    def values(self, record: EpochRecord) -> dict[str, float]:
        """Return the values of an epoch for TensorBoard and trackers; of a stage they are `bubble/stage0`.

        Of an epoch that another pipeline trained there are none of stages.
        """
        values = {"speed/learning_rate": record.lr, "speed/samples_per_s": record.samples_per_s}
        titles = {metric.name: metric.title or metric.name for metric in self.about.task.metrics}
        for name, title in {"loss": "loss", **titles}.items():
            values |= {f"{title}/train": record.trained[name], f"{title}/val": record.evaluated[name]}
        for stage, actual in enumerate(self.times([record])):
            stats, planned = record.stages[stage], self.predicted[stage]
            of_stage: dict[str, float | None] = {
                "staleness": stats.max_staleness,
                "staleness_mean": stats.mean_staleness,
                "sent_mib": stats.bytes_sent / 2**20,
                "codec_s": stats.codec_s,
            }
            for suffix, times in (("", actual), ("_predicted", planned)):
                of_stage |= {f"bubble{suffix}": times.bubble, f"wait{suffix}": times.wait}
                of_stage[f"stage_time{suffix}"] = times.stage_time_s
            if self.held_epoch == record.epoch:
                of_stage["memory_mib"] = self.peaks[stage]["total"] / 2**20
                of_stage["memory_mib_predicted"] = peaks(self.predicted_memory)[stage]["total"] / 2**20
            known = {name: value for name, value in of_stage.items() if value is not None}
            values |= {f"{name}/stage{stage}": value for name, value in known.items()}
        return values

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json."""
        about, last, best = self.about, self.last, self.best
        settings, plan, facts = about.settings, about.plan, about.data
        train_s, stages = sum(record.train_s for record in self.records), self.stats(self.records)
        epochs = sum(record.updates for record in self.records) / about.batches  # with statistics of stages
        return {
            **{name: getattr(settings, name) for name in _OF_SETTINGS},
            "data": facts.name,
            "data_note": facts.note,
            "train_samples": facts.train,
            "test_samples": facts.test,
            "stages": settings.ranks,
            "virtual_stages": plan.stages // settings.ranks,
            "partition": plan.cuts,
            "device": about.device,
            "threads": torch.get_num_threads(),
            "allocator": keep_freed_memory(),
            "dtype": str(settings.dtype).removeprefix("torch."),
            "memory_format": plan.numerics.memory_format,
            "codec_forward": str(settings.codecs.forward),
            "codec_backward": str(settings.codecs.backward),
            "data_workers": settings.workers,
            "task": str(about.task),
            "metrics": [
                {"name": metric.name, "higher": metric.higher, "percent": metric.percent}
                for metric in about.task.metrics
            ],
            "epochs": len(self.records),
            "updates": max(last.losses, default=about.updates),
            **{f"train_{name}": value for name, value in last.trained.items()},
            **{f"val_{name}": value for name, value in last.evaluated.items()},
            **{f"best_val_{name}": value for name, value in best.evaluated.items()},
            "best_epoch": best.epoch,
            "samples_per_s": sum(record.samples for record in self.records) / train_s,
            "epoch_s": train_s / len(self.records),
            "total_s": last.elapsed_s,
            "bytes_per_epoch": sum(stats.bytes_sent for stats in stages) / epochs if epochs else None,
            "codec_s_per_epoch": sum(stats.codec_s for stats in stages) / epochs if epochs else None,
            "straggler": self.straggler and asdict(self.straggler),
            "simulated_bubble": self.simulated.bubble,
            "memory_bytes": max((held["total"] for held in self.peaks), default=None),
            "per_stage": [
                self._stage_summary(stage, stages[stage], times)
                for stage, times in enumerate(self.times(self.records))
            ],
        }

    def _stage_summary(self, stage: int, stats: StageStats, actual: StageTimes) -> dict[str, Any]:
        plan, planned, layers = self.about.plan, self.predicted[stage], self.about.plan.stage_layers(stage)
        return {
            "stage": stage,
            "rank": plan.placement[stage],
            "layers": len(layers),
            "params": sum(layer.params for layer in layers),
            "peak_in_flight": stats.activations,
            "peak_versions": stats.versions,
            "max_staleness": stats.max_staleness,
            "mean_staleness": stats.mean_staleness,
            "staleness": {str(late): count for late, count in sorted(stats.staleness.items())},
            "busy_fraction": stats.busy_s / self._seconds_covered(self.records),
            "bytes_sent": stats.bytes_sent,
            "raw_bytes": stats.raw_bytes,
            "ratio": stats.ratio,
            "codec_s": stats.codec_s,
            "skipped_updates": stats.skipped,
            **asdict(actual),
            **{f"predicted_{name}": value for name, value in asdict(planned).items()},
            "memory": self.peaks[stage] if self.held else None,
            "predicted_memory": peaks(self.predicted_memory)[stage],
            "allocated_bytes": self.held[stage].allocated if self.held else None,
        }


def stage_times(placement: Sequence[int], stages: Sequence[StageStats], train_s: float) -> list[StageTimes]:
    """Convert statistics over `train_s` seconds of training into fractions; bubble and wait are by rank."""
    busy, wait = ([0.0] * len(placement) for _ in range(2))
    for stats, rank in zip(stages, placement, strict=True):
        busy[rank] += stats.busy_s
        wait[rank] += stats.wait_s
    return [
        StageTimes(1 - busy[rank] / train_s, stats.busy_s / max(stats.updates, 1), wait[rank] / train_s)
        for stats, rank in zip(stages, placement, strict=True)
    ]


def find_straggler(placement: Sequence[int], run: Sequence[StageTimes], updates: int) -> Straggler | None:
    """Return the slowest rank, if it is notably slower than the mean."""
    by_rank = [0.0] * (max(placement) + 1)
    for rank, stage in zip(placement, run, strict=True):
        by_rank[rank] += stage.stage_time_s or 0.0
    mean_s, slowest = mean(by_rank), max(by_rank)
    if slowest < NOTABLE * mean_s or not mean_s:
        return None
    return Straggler(by_rank.index(slowest), slowest, mean_s, (slowest - mean_s) * updates)
