"""A training's epochs, of all ranks, and what follows: statistics of its stages, summary.json, the table."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch

from pipetrain.checkpoint.epoch_record import EpochRecord, Stats, best_epoch
from pipetrain.config.settings import Settings
from pipetrain.data.splits import DataFacts
from pipetrain.plan.plan import Plan
from pipetrain.records.stage_table import StageRecord, stage_times, straggler
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.stage.memory_meter import PeakBytes
from pipetrain.schedule.memory import peaks
from pipetrain.schedule.text import aligned
from pipetrain.schedule.timeline import StageStats, of_replicas, total
from pipetrain.tasks import Task
from pipetrain.tasks.running_sums import Tally, summed
from pipetrain.typed_json import read_as

MOST_ROWS = 40  # of the table of epochs


@dataclass(frozen=True, slots=True)
class About:
    """The conditions of a training in epochs of `batches` batches; `updates` may end the last one early.

    `lr`: the optimizer's rate. `device`: a description such as `2 x cpu`. `room`: bytes of GPU for each rank;
    None on a CPU.
    """

    settings: Settings
    plan: Plan
    task: Task
    data: DataFacts
    batches: int
    lr: float
    device: str = "cpu"
    room: int | None = None

    @property
    def updates(self) -> int:
        return self.settings.updates(self.batches)

    @property
    def epochs(self) -> int:
        return -(-self.updates // self.batches)

    @property
    def evaluates(self) -> bool:
        return self.data.test > 0

    def batches_of(self, epoch: int) -> int:
        """Return the batches of an epoch, counted from 1."""
        return self.updates - (epoch - 1) * self.batches if epoch == self.epochs else self.batches

    def conditions(self) -> dict[str, Any]:
        """Return the conditions of the training in both summary.json and trace.json."""
        settings, plan = self.settings, self.plan
        same = ("model", "schedule", "ranks", "batch_size", "microbatches", "buffer_size", "window")
        return {
            **{name: getattr(settings, name) for name in (*same, "seed", "precision", "compile")},
            "lr": self.lr,
            "data": self.data.name,
            "parameters": sum(layer.params for layer in plan.layers),
            "placement": [ranks[0] if len(ranks) == 1 else list(ranks) for ranks in plan.placement],
            "partition": plan.cuts,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "memory_format": plan.numerics.memory_format,
            "codec_forward": str(settings.codecs.forward),
            "codec_backward": str(settings.codecs.backward),
            "correction": str(settings.correction),
            "device": self.device,
            "threads": torch.get_num_threads(),
        }


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's record of an epoch, partial or complete.

    `trained`, `losses` (one per update), `evaluated`: each rank of the last stage counts its microbatches.
    """

    stages: Stats
    trained: Tally
    losses: list[float]
    evaluated: Tally = field(default_factory=Tally)
    train_s: float = 0.0
    eval_s: float = 0.0
    peak_bytes: PeakBytes | None = None  # of the measured window, if it was in this epoch


class RankRecords(NamedTuple):
    """The records of all ranks; `last`: of the last stage's ranks."""

    all: list[RankRecord]
    last: list[RankRecord]

    @classmethod
    def gather(cls, groups: ProcessGroups, what: str, record: RankRecord, last: Sequence[int]) -> RankRecords:
        """Return all ranks' records, on every rank. `last`: the last stage's ranks. Raises ChannelError."""
        gathered = enumerate(groups.gather(what, asdict(record)))
        ranks = [read_as(RankRecord, data, f"{what} of rank {rank}") for rank, data in gathered]
        return cls(ranks, [ranks[rank] for rank in last])

    @property
    def trained(self) -> Tally:
        return summed([rank.trained for rank in self.last])

    @property
    def evaluated(self) -> Tally:
        return summed([rank.evaluated for rank in self.last])

    @property
    def losses(self) -> list[float]:
        """The mean loss of each update, which all ranks of the last stage have."""
        return self.last[0].losses

    @property
    def stages(self) -> Stats:
        """The statistics of each stage over its replicas."""
        parts: dict[int, list[StageStats]] = defaultdict(list)
        for rank in self.all:
            for stage, stats in rank.stages.items():
                parts[stage].append(stats)
        return {stage: of_replicas(replicas) for stage, replicas in parts.items()}


class Epoch(NamedTuple):
    """What is written for an epoch. `values`: by their names in loggers, as `loss/train`, `bubble/stage0`."""

    record: EpochRecord
    values: dict[str, float]


class History:
    """The epochs of a training so far. Epochs that another pipeline trained have no stage statistics."""

    def __init__(self, about: About) -> None:
        self.about = about
        self.epochs: list[Epoch] = []
        self.held: Sequence[PeakBytes] = ()  # by rank, in one window, once measured
        self._by_rank: dict[int, Sequence[Stats]] = {}  # by epoch of this process, then rank
        self.simulated = about.plan.timeline()
        self.predicted = about.plan.stage_times()
        self.predicted_memory = about.plan.memory()
        self._predicted_peaks = [peak["total"] for peak in peaks(self.predicted_memory)]

    @property
    def records(self) -> list[EpochRecord]:
        return [epoch.record for epoch in self.epochs]

    @property
    def best(self) -> EpochRecord | None:
        return best_epoch(self.records)

    def add(self, record: EpochRecord, peaks: Sequence[PeakBytes] = (), ranks: Sequence[Stats] = ()) -> None:
        """Add an epoch, with each rank's peak memory in one of its windows, and its statistics, if known."""
        self.held = peaks or self.held
        if ranks:
            self._by_rank[record.epoch] = ranks
        self.epochs.append(Epoch(record, self._values(record, bool(peaks))))

    def stages(self, records: Sequence[EpochRecord]) -> list[StageRecord]:
        """Return every number of each stage in some epochs; empty if another pipeline trained them."""
        plan, parts = self.about.plan, [record.stages for record in records if record.stages]
        seconds = sum(
            record.train_s * record.updates / self.about.batches_of(record.epoch) for record in records
        )
        if not seconds:
            return []
        stats = [total([stages[stage] for stages in parts]) for stage in range(plan.stages)]
        times = stage_times(plan.placement, stats, seconds)
        held = [[peak for peak in self.held if stage in peak.stages] for stage in range(plan.stages)]
        return [
            StageRecord(
                stage=stage,
                rank=plan.firsts[stage],
                rank_times_s={
                    str(rank): self._busy_s(stage, rank, records) / max(stat.updates, 1)
                    for rank in plan.placement[stage]
                },
                layers=len(plan.stage_layers(stage)),
                params=sum(layer.params for layer in plan.stage_layers(stage)),
                peak_in_flight=stat.activations,
                peak_versions=stat.versions,
                max_staleness=stat.max_staleness,
                mean_staleness=stat.mean_staleness,
                staleness={str(late): count for late, count in sorted(stat.staleness.items())},
                busy_fraction=stat.busy_s / seconds,
                bytes_sent=stat.bytes_sent,
                raw_bytes=stat.raw_bytes,
                ratio=stat.ratio,
                codec_s=stat.codec_s,
                skipped_updates=stat.skipped,
                **asdict(times[stage]),
                **{f"predicted_{name}": value for name, value in asdict(self.predicted[stage]).items()},
                memory_bytes=max((peak.stages[stage] for peak in held[stage]), default=None),
                predicted_memory_bytes=self._predicted_peaks[stage],
                allocated_bytes=max((peak.allocated or 0 for peak in held[stage]), default=0) or None,
            )
            for stage, stat in enumerate(stats)
        ]

    def _busy_s(self, stage: int, rank: int, records: Sequence[EpochRecord]) -> float:
        """Return the seconds in which a rank computed for a stage; the mean of its ranks if unknown."""
        by_record = [
            self._by_rank.get(record.epoch, {rank: record.stages})[rank]
            for record in records
            if record.stages
        ]
        return sum(stages[stage].busy_s for stages in by_record)

    def _values(self, record: EpochRecord, measured: bool) -> dict[str, float]:
        values = {"speed/samples_per_s": record.samples_per_s}
        titles = {metric.name: metric.title or metric.name for metric in self.about.task.metrics}
        for name, title in {"loss": "loss", **titles}.items():
            values[f"{title}/train"] = record.trained[name]
            if name in record.evaluated:
                values[f"{title}/val"] = record.evaluated[name]
        for stage in self.stages([record]):
            values |= stage.values(measured)
        return values

    def summary(self) -> dict[str, Any]:
        about, records, best, stages = self.about, self.records, self.best, self.stages(self.records)
        settings, plan, facts, metrics = about.settings, about.plan, about.data, about.task.metrics
        places = len(settings.places)
        last, train_s = records[-1], sum(record.train_s for record in records)
        updates = sum(record.updates for record in records)  # with stage statistics
        epochs = updates / about.batches
        return {
            **about.conditions(),
            "data_note": facts.note,
            "train_samples": facts.train,
            "test_samples": facts.test,
            "stages": places,
            "virtual_stages": plan.stages // places,
            "data_workers": settings.workers,
            "task": str(about.task),
            "metrics": [
                {key: getattr(metric, key) for key in ("name", "higher", "percent")} for metric in metrics
            ],
            "epochs": len(records),
            "updates": max(last.losses, default=about.updates),
            **{f"train_{name}": value for name, value in last.trained.items()},
            **{f"val_{name}": value for name, value in last.evaluated.items()},
            **{f"best_val_{name}": value for name, value in (best.evaluated if best else {}).items()},
            "best_epoch": best and best.epoch,
            "samples_per_s": sum(record.samples for record in records) / train_s,
            "epoch_s": train_s * about.batches / sum(about.batches_of(record.epoch) for record in records),
            "total_s": last.elapsed_s,
            "bytes_per_epoch": sum(stage.bytes_sent for stage in stages) / epochs if stages else None,
            "codec_s_per_epoch": sum(stage.codec_s for stage in stages) / epochs if stages else None,
            "straggler": straggler(stages, updates),
            "simulated_bubble": self.simulated.bubble,
            "memory_bytes": max((stage.memory_bytes or 0 for stage in stages), default=0) or None,
            "per_stage": [asdict(stage) for stage in stages],
        }


def epoch_table(history: History) -> str:
    """Return a row per epoch: all, or of many epochs the best and the last ones."""
    metrics, best, records = history.about.task.metrics, history.best, history.records
    many = len(records) > MOST_ROWS
    ends = records[-MOST_ROWS // 2 :] if many else records
    shown = [best, *ends] if many and best else ends
    texts = {"loss": "{:.4f}".format, **{metric.name: metric.text for metric in metrics}}
    parts = ["train", "val"] if any(record.evaluated for record in shown) else ["train"]
    rows = [["epoch", *(f"{part} {name}" for part in parts for name in texts), "samples/s", "seconds"]]
    for record in shown:
        row = [str(record.epoch)]
        for _, values in zip(parts, (record.trained, record.evaluated), strict=False):
            row += [text(values[name]) if name in values else "-" for name, text in texts.items()]
        rows.append([*row, f"{record.samples_per_s:.1f}", f"{record.train_s:.1f}"])
    head, *lines = aligned(rows, right=True).splitlines()
    marks = ("  best" if record is best else "" for record in shown)
    return "\n".join([head, *map("".join, zip(lines, marks, strict=True))])
