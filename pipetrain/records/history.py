"""A training's epochs, and what follows from them: the numbers of its stages, summary.json, the tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pipetrain.checkpoint.progress import EpochRecord, best_epoch
from pipetrain.data.sets import DataFacts
from pipetrain.plan.memory import memory
from pipetrain.plan.plan import Plan
from pipetrain.rate import LearningRate
from pipetrain.runtime.held import Measured
from pipetrain.schedule.draw import aligned
from pipetrain.schedule.memory import peaks
from pipetrain.schedule.timeline import StageStats, StageTimes, total
from pipetrain.settings import Settings
from pipetrain.tasks import Task

LAUNCHING = 0.1  # of a rank's time between its actions is notable
NOTABLE = 1.15  # a rank is a straggler if it takes this many times the mean of all ranks
MIB = 2**20
MOST_ROWS = 40  # of the table of epochs
STAGES = (
    "stage  bubble  (plan)  seconds a batch  (plan)  wait  (plan)  updates late  (most)  MiB held  (plan)  "
    "allocator  MiB sent  ratio  codec s"
)
_CHARTED = {
    "bubble": ("bubble", 1),
    "wait": ("wait", 1),
    "stage_time": ("stage_time_s", 1),
    "bubble_predicted": ("predicted_bubble", 1),
    "wait_predicted": ("predicted_wait", 1),
    "stage_time_predicted": ("predicted_stage_time_s", 1),
    "staleness": ("max_staleness", 1),
    "staleness_mean": ("mean_staleness", 1),
    "sent_mib": ("bytes_sent", MIB),
    "codec_s": ("codec_s", 1),
}
"""Names in TensorBoard and trackers -> a number of a stage, and its unit."""


@dataclass(frozen=True, slots=True)
class About:
    """The conditions of a training of epochs of `batches` batches each; `updates` may end the last one early.

    `device`: a description such as `2 x cpu`. `room`: bytes of GPU for each rank; None on a CPU.
    """

    settings: Settings
    plan: Plan
    task: Task
    data: DataFacts
    batches: int
    rate: LearningRate
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
        """Return the batches of an epoch, the first one is 1."""
        return self.updates - (epoch - 1) * self.batches if epoch == self.epochs else self.batches

    def conditions(self) -> dict[str, Any]:
        """Return what summary.json and trace.json both say of the training."""
        settings, plan = self.settings, self.plan
        same = ("model", "schedule", "ranks", "batch_size", "microbatches", "buffer_size", "window")
        return {
            **{name: getattr(settings, name) for name in (*same, "seed", "precision", "compile")},
            "lr": self.rate.peak,
            "data": self.data.name,
            "parameters": sum(layer.params for layer in plan.layers),
            "placement": plan.placement,
            "partition": plan.cuts,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "memory_format": plan.numerics.memory_format,
            "codec_forward": str(settings.codecs.forward),
            "codec_backward": str(settings.codecs.backward),
            "device": self.device,
            "threads": torch.get_num_threads(),
        }


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
        self._predicted_peaks = [of["total"] for of in peaks(self.predicted_memory)]

    @property
    def last(self) -> EpochRecord:
        return self.records[-1]

    @property
    def best(self) -> EpochRecord | None:
        return best_epoch(self.records)

    def measured(self, held: Sequence[Measured]) -> None:
        """Take what the ranks held in a window of the newest epoch."""
        if held:
            self.held = {stage: rank for rank in held for stage in rank.stages}
            self.held_epoch = self.last.epoch

    def stages(self, records: Sequence[EpochRecord]) -> list[dict[str, Any]]:
        """Return every number of each stage in some epochs; empty if another pipeline trained them."""
        plan, parts = self.about.plan, [record.stages for record in records if record.stages]
        seconds = sum(one.train_s * one.updates / self.about.batches_of(one.epoch) for one in records)
        if not seconds:
            return []
        stats = [total([stages[stage] for stages in parts]) for stage in range(plan.stages)]
        times = stage_times(plan.placement, stats, seconds)
        return [
            {
                "stage": stage,
                "rank": plan.placement[stage],
                "layers": len(plan.stage_layers(stage)),
                "params": sum(layer.params for layer in plan.stage_layers(stage)),
                "peak_in_flight": of.activations,
                "peak_versions": of.versions,
                "max_staleness": of.max_staleness,
                "mean_staleness": of.mean_staleness,
                "staleness": {str(late): count for late, count in sorted(of.staleness.items())},
                "busy_fraction": of.busy_s / seconds,
                "bytes_sent": of.bytes_sent,
                "raw_bytes": of.raw_bytes,
                "ratio": of.ratio,
                "codec_s": of.codec_s,
                "skipped_updates": of.skipped,
                **asdict(times[stage]),
                **{f"predicted_{name}": value for name, value in asdict(self.predicted[stage]).items()},
                "memory_bytes": self.held[stage].stages[stage] if self.held else None,
                "predicted_memory_bytes": self._predicted_peaks[stage],
                "allocated_bytes": self.held[stage].allocated if self.held else None,
            }
            for stage, of in enumerate(stats)
        ]

    def values(self, record: EpochRecord) -> dict[str, float]:
        """Return the values of an epoch for TensorBoard and trackers; of a stage they are `bubble/stage0`.

        Of an epoch that another pipeline trained there are none of stages.
        """
        values = {"speed/learning_rate": record.lr, "speed/samples_per_s": record.samples_per_s}
        titles = {metric.name: metric.title or metric.name for metric in self.about.task.metrics}
        for name, title in {"loss": "loss", **titles}.items():
            values[f"{title}/train"] = record.trained[name]
            if name in record.evaluated:
                values[f"{title}/val"] = record.evaluated[name]
        for stage in self.stages([record]):
            of_stage = {name: (stage[key], unit) for name, (key, unit) in _CHARTED.items()}
            if self.held_epoch == record.epoch:
                of_stage["memory_mib"] = stage["memory_bytes"], MIB
                of_stage["memory_mib_predicted"] = stage["predicted_memory_bytes"], MIB
            for name, (value, unit) in of_stage.items():
                if value is not None:
                    values[f"{name}/stage{stage['stage']}"] = value / unit
        return values

    def summary(self) -> dict[str, Any]:
        about, last, best, stages = self.about, self.last, self.best, self.stages(self.records)
        settings, plan, facts, metrics = about.settings, about.plan, about.data, about.task.metrics
        train_s = sum(record.train_s for record in self.records)
        updates = sum(record.updates for record in self.records)  # with statistics of stages
        epochs = updates / about.batches
        return {
            **about.conditions(),
            "data_note": facts.note,
            "train_samples": facts.train,
            "test_samples": facts.test,
            "stages": settings.ranks,
            "virtual_stages": plan.stages // settings.ranks,
            "data_workers": settings.workers,
            "task": str(about.task),
            "metrics": [{key: getattr(one, key) for key in ("name", "higher", "percent")} for one in metrics],
            "epochs": len(self.records),
            "updates": max(last.losses, default=about.updates),
            **{f"train_{name}": value for name, value in last.trained.items()},
            **{f"val_{name}": value for name, value in last.evaluated.items()},
            **{f"best_val_{name}": value for name, value in (best.evaluated if best else {}).items()},
            "best_epoch": best and best.epoch,
            "samples_per_s": sum(record.samples for record in self.records) / train_s,
            "epoch_s": train_s * about.batches / sum(about.batches_of(one.epoch) for one in self.records),
            "total_s": last.elapsed_s,
            "bytes_per_epoch": sum(one["bytes_sent"] for one in stages) / epochs if stages else None,
            "codec_s_per_epoch": sum(one["codec_s"] for one in stages) / epochs if stages else None,
            "straggler": straggler(stages, updates),
            "simulated_bubble": self.simulated.bubble,
            "memory_bytes": max((one["memory_bytes"] for one in stages if self.held), default=None),
            "per_stage": stages,
        }


def stage_times(placement: Sequence[int], stages: Sequence[StageStats], train_s: float) -> list[StageTimes]:
    """Convert statistics over `train_s` seconds of training into fractions; bubble and wait are by rank."""
    busy: dict[int, float] = defaultdict(float)
    wait: dict[int, float] = defaultdict(float)
    for stats, rank in zip(stages, placement, strict=True):
        busy[rank] += stats.busy_s
        wait[rank] += stats.wait_s
    return [
        StageTimes(1 - busy[rank] / train_s, stats.busy_s / max(stats.updates, 1), wait[rank] / train_s)
        for stats, rank in zip(stages, placement, strict=True)
    ]


def straggler(stages: Sequence[Mapping[str, Any]], updates: int) -> dict[str, float] | None:
    """Return the slowest rank, if it is notably slower than the mean of all.

    `batch_s`, `mean_s`: its seconds of computing a batch, and the mean of all ranks; `cost_s`: the time that
    an even distribution of the same work would have saved.
    """
    by_rank: dict[int, float] = defaultdict(float)
    for stage in stages:
        by_rank[stage["rank"]] += stage["stage_time_s"]
    mean_s = sum(by_rank.values()) / max(1, len(by_rank))
    rank, slowest = max(by_rank.items(), key=lambda item: item[1], default=(0, 0.0))
    if slowest <= NOTABLE * mean_s:
        return None
    return {"rank": rank, "batch_s": slowest, "mean_s": mean_s, "cost_s": (slowest - mean_s) * updates}


def launching(stages: Sequence[Mapping[str, Any]], microbatches: int) -> dict[str, float] | None:
    """Return the rank with most time in which it neither computes nor waits, if that is notable.

    `share`: of its time; `pass_s`: seconds that its forwards and backwards compute on average.
    """
    most = max(stages, key=lambda stage: stage["bubble"] - stage["wait"], default=None)
    if most is None or (share := most["bubble"] - most["wait"]) < LAUNCHING:
        return None
    return {"rank": most["rank"], "share": share, "pass_s": most["stage_time_s"] / (2 * microbatches)}


# The tables that end a training on the console


def epoch_table(history: History) -> str:
    """Return a row per epoch: all, or of many the best and the last ones."""
    metrics, best = history.about.task.metrics, history.best
    many = len(history.records) > MOST_ROWS
    ends = history.records[-MOST_ROWS // 2 :] if many else history.records
    shown = [best, *ends] if many and best else ends
    texts = {"loss": "{:.4f}".format, **{metric.name: metric.text for metric in metrics}}
    parts = ["train", "val"] if any(record.evaluated for record in shown) else ["train"]
    rows = [["epoch", *(f"{of} {name}" for of in parts for name in texts), "samples/s", "seconds"]]
    for record in shown:
        row = [str(record.epoch)]
        for _, values in zip(parts, (record.trained, record.evaluated), strict=False):
            row += [text(values[name]) if name in values else "-" for name, text in texts.items()]
        rows.append([*row, f"{record.samples_per_s:.1f}", f"{record.train_s:.1f}"])
    head, *lines = aligned(rows, right=True).splitlines()
    marks = ("  best" if record is best else "" for record in shown)
    return "\n".join([head, *map("".join, zip(lines, marks, strict=True))])


def stage_table(stages: Sequence[dict[str, Any]]) -> str:
    """Return a row per stage of History.stages: times and memory, measured and planned, staleness, bytes."""
    rows = [STAGES.split("  ")]
    for stage in stages:
        times = [
            "-" if stage[of + name] is None else format(stage[of + name], form)
            for name, form in (("bubble", ".1%"), ("stage_time_s", ".4f"), ("wait", ".1%"))
            for of in ("", "predicted_")
        ]
        late = [f"{stage['mean_staleness']:.2f}", str(stage["max_staleness"])]
        held = [
            "-" if stage[name] is None else f"{stage[name] / MIB:.1f}"
            for name in ("memory_bytes", "predicted_memory_bytes", "allocated_bytes")
        ]
        ratio = "-" if stage["ratio"] is None else f"{stage['ratio']:.1f}"
        sent = [f"{stage['bytes_sent'] / MIB:.1f}", ratio, f"{stage['codec_s']:.2f}"]
        rows.append([str(stage["stage"]), *times, *late, *held, *sent])
    return aligned(rows, right=True)
