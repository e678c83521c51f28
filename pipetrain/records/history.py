"""The history of a run, epoch by epoch, and its tables, CSV rows and summary.json."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass
from itertools import count
from statistics import mean
from typing import Any

from pipetrain.checkpoint.progress import EpochFigures, best_epoch
from pipetrain.plan.memory import memory
from pipetrain.records.about import About
from pipetrain.runtime.held import Measured
from pipetrain.schedule.memory import PARTS, Peak, peak, peaks
from pipetrain.schedule.timeline import StageStats, StageTimes, total
from pipetrain.tasks import Metric

SPEEDS = ["lr", "samples_per_s", "epoch_s", "eval_s", "elapsed_s"]  # the last columns of metrics.csv
MOST_ROWS = 40  # of the table of epochs
NOTABLE = 1.15  # a rank is a straggler if it takes this many times the mean of all ranks


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of a run, for its records. `device` is a description such as `2 x cpu`."""

    device: str
    threads: int  # of each process
    allocator: str
    room: int | None = None  # bytes of GPU for each rank; None on a CPU


@dataclass(frozen=True, slots=True)
class Memory:
    """What the ranks held in a window of an epoch (counted from 1), after each of their actions."""

    epoch: int
    ranks: Sequence[Measured]

    @property
    def peaks(self) -> list[Peak]:
        """The peak of each stage."""
        found = {stage: peak(held) for rank in self.ranks for stage, held in rank.stages.items()}
        return [found[stage] for stage in sorted(found)]

    @property
    def allocated(self) -> list[int | None]:
        """The peak of the GPU's allocator on the rank of each stage."""
        found = {stage: rank.allocated for rank in self.ranks for stage in rank.stages}
        return [found[stage] for stage in sorted(found)]


class History:
    """The finished epochs of a run. Epochs that another pipeline trained have no statistics of stages."""

    def __init__(self, about: About) -> None:
        self._about = about
        self._plan = about.plan
        self._batches = about.batches  # per epoch
        self.simulated = about.plan.timeline()
        self.predicted = about.plan.stage_times(self.simulated)
        self.predicted_memory = memory(about.plan, self.simulated)
        self.memory: Memory | None = None
        """What was measured, once it was."""
        self.epochs: list[EpochFigures] = []

    @property
    def last(self) -> EpochFigures:
        return self.epochs[-1]

    @property
    def best(self) -> EpochFigures:
        """The first of the best epochs by the task's first metric."""
        return best_epoch(self.epochs)

    def until(self, epochs: int) -> History:
        """Return the history as it was after `epochs` epochs."""
        earlier = copy(self)
        earlier.epochs = self.epochs[:epochs]
        return earlier

    def measured_last(self) -> list[StageTimes]:
        """Return the stages' times over the newest epoch; empty if another pipeline trained it."""
        return self._measured(self.epochs[-1:])

    def measured(self) -> list[StageTimes]:
        """Return the stages' times over all epochs of this pipeline."""
        return self._measured(self.epochs)

    def _measured(self, epochs: Sequence[EpochFigures]) -> list[StageTimes]:
        seconds = self._seconds_covered(epochs)
        return stage_times(self._plan.placement, self._stages(epochs), seconds) if seconds else []

    def _stages(self, epochs: Sequence[EpochFigures]) -> list[StageStats]:
        """Return the summed statistics of each stage."""
        parts = [figures.stages for figures in epochs if figures.stages]
        return [total([stages[stage] for stages in parts]) for stage in range(self._plan.stages)]

    def _seconds_covered(self, epochs: Sequence[EpochFigures]) -> float:
        """Return the seconds of training that the stages' statistics cover."""
        return sum(figures.train_s * figures.updates / self._batches for figures in epochs)

    @property
    def straggler(self) -> Straggler | None:
        updates = sum(figures.updates for figures in self.epochs)
        return find_straggler(self._plan.placement, self.measured(), updates) if updates else None

    def stage_table(self) -> str:
        """Return a row per stage: its times beside the plan's, and the bytes sent."""
        seen = self.measured()
        return stage_table(seen, self.predicted[: len(seen)], self._stages(self.epochs)[: len(seen)])

    def memory_table(self) -> str:
        """Return a row per stage: the peak of what it held beside the plan's, and of each part."""
        assert self.memory is not None
        return memory_table(self.memory, peaks(self.predicted_memory))

    def table(self) -> str:
        """Return the epochs as a table: all, or of many the best and the last ones."""
        best = self.best
        shown = self.epochs if len(self.epochs) <= MOST_ROWS else [best, *self.epochs[-MOST_ROWS // 2 :]]
        names = [metric.name for metric in self._about.task.metrics]
        titles = [f"{of} {name}" for of in ("train", "val") for name in ("loss", *names)]
        lines = ["  ".join(["epoch", *(f"{title:>9}" for title in titles), "samples/s", "seconds"])]
        for figures in shown:
            cells = [f"{figures.epoch:5d}"]
            for tally in (figures.trained, figures.evaluated):
                values = self._about.task.values(tally)
                cells.append(f"{tally.mean_loss:.4f}")
                cells += [metric.text(values[metric.name]) for metric in self._about.task.metrics]
            row = [cells[0], *(cell.rjust(max(9, len(t))) for cell, t in zip(cells[1:], titles, strict=True))]
            row += [f"{figures.samples_per_s:9.1f}", f"{figures.train_s:7.1f}"]
            lines.append("  ".join(row) + ("  best" if figures is best else ""))
        return "\n".join(lines)

    def metrics_of(self, figures: EpochFigures) -> list[tuple[Metric, float, float]]:
        """Return each metric with its values of training and of evaluation."""
        task = self._about.task
        trained, evaluated = task.values(figures.trained), task.values(figures.evaluated)
        return [(metric, trained[metric.name], evaluated[metric.name]) for metric in task.metrics]

    def row(self, number: int) -> bytes:
        """Return a line of metrics.csv: the header as number 0, then the epochs."""
        if number == 0:
            names = ["loss", *(metric.name for metric in self._about.task.metrics)]
            return _line(["epoch", *(f"{of}_{name}" for of in ("train", "val") for name in names), *SPEEDS])
        figures = self.epochs[number - 1]
        metrics = self.metrics_of(figures)
        numbers = [figures.trained.mean_loss, *(trained for _, trained, _ in metrics)]
        numbers += [figures.evaluated.mean_loss, *(evaluated for *_, evaluated in metrics), figures.lr]
        numbers += [figures.samples_per_s, figures.train_s, figures.eval_s, figures.elapsed_s]
        return _line([str(figures.epoch), *(f"{number:.6g}" for number in numbers)])

    def update_rows(self, number: int) -> bytes:
        """Return a part of updates.csv: the header as number 0, then the rows of each epoch."""
        if number == 0:
            return _line(["update", "train_loss", "lr"])
        groups = self.epochs[number - 1].groups
        rows = (
            [str(update), *(f"{value:.6g}" for value in values.values())] for update, values in groups.items()
        )
        return b"".join(map(_line, rows))

    def summary(self, machine: Machine) -> dict[str, Any]:
        settings, facts, last, best = self._about.settings, self._about.data, self.last, self.best
        train_s = sum(figures.train_s for figures in self.epochs)
        straggler, stages, actual = self.straggler, self._stages(self.epochs), self.measured()
        epochs = sum(figures.updates for figures in self.epochs) / self._batches  # with stage statistics
        return {
            "model": settings.model,
            "data": facts.name,
            "data_note": facts.note,
            "schedule": settings.schedule,
            "stages": settings.ranks,
            "virtual_stages": self._plan.stages // settings.ranks,
            "partition": self._plan.cuts,
            "device": machine.device,
            "threads": machine.threads,
            "allocator": machine.allocator,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "precision": settings.precision,
            "memory_format": self._plan.numerics.memory_format,
            "compile": settings.compile,
            "batch_size": settings.batch_size,
            "microbatches": settings.microbatches,
            "buffer_size": settings.buffer_size,
            "codec_forward": str(settings.codecs.forward),
            "codec_backward": str(settings.codecs.backward),
            "window": settings.window,
            "data_workers": settings.workers,
            "lr": settings.lr,
            "epochs": len(self.epochs),
            "seed": settings.seed,
            "train_samples": facts.train,
            "test_samples": facts.test,
            **self._best_and_last(),
            "best_epoch": best.epoch,
            "val_loss": last.evaluated.mean_loss,
            "train_loss": last.trained.mean_loss,
            "metrics": [
                {"name": metric.name, "higher": metric.higher, "percent": metric.percent}
                for metric in self._about.task.metrics
            ],
            "task": str(self._about.task),
            "samples_per_s": sum(f.trained.samples for f in self.epochs) / train_s,
            "epoch_s": train_s / len(self.epochs),
            "total_s": last.elapsed_s,
            "bytes_per_epoch": sum(stats.bytes_sent for stats in stages) / epochs if epochs else None,
            "codec_s_per_epoch": sum(stats.codec_s for stats in stages) / epochs if epochs else None,
            "updates": max(last.losses, default=self._about.updates),
            "straggler": None if straggler is None else asdict(straggler),
            "simulated_bubble": self.simulated.bubble,
            "memory_bytes": self.memory and max(of.total for of in self.memory.peaks),
            "per_stage": [self._stage_summary(*of) for of in zip(count(), stages, actual, strict=False)],
        }

    def _best_and_last(self) -> dict[str, float]:
        """Return the metrics of the last epoch, and those of the best; the loss alone without metrics."""
        summary: dict[str, float] = {}
        for (metric, trained, last), (_, _, best) in zip(
            self.metrics_of(self.last), self.metrics_of(self.best), strict=True
        ):
            summary |= {f"val_{metric.name}": last, f"best_val_{metric.name}": best}
            summary[f"train_{metric.name}"] = trained
        return summary or {"best_val_loss": self.best.evaluated.mean_loss}

    def _stage_summary(self, stage: int, stats: StageStats, actual: StageTimes) -> dict[str, Any]:
        planned = self.predicted[stage]
        held = self._plan.stage_layers(stage)
        return {
            "stage": stage,
            "rank": self._plan.placement[stage],
            "layers": len(held),
            "params": sum(layer.params for layer in held),
            "peak_in_flight": stats.activations,
            "peak_versions": stats.versions,
            "max_staleness": stats.max_staleness,
            "mean_staleness": stats.mean_staleness,
            "staleness": {str(late): count for late, count in sorted(stats.staleness.items())},
            "busy_fraction": stats.busy_s / self._seconds_covered(self.epochs),
            "bytes_sent": stats.bytes_sent,
            "raw_bytes": stats.raw_bytes,
            "ratio": stats.ratio,
            "codec_s": stats.codec_s,
            "skipped_updates": stats.skipped,
            "bubble": actual.bubble,
            "predicted_bubble": planned.bubble,
            "stage_time_s": actual.stage_time_s,
            "predicted_stage_time_s": planned.stage_time_s,
            "wait": actual.wait,
            "predicted_wait": planned.wait,
            "memory": None if self.memory is None else _sizes(self.memory.peaks[stage]),
            "predicted_memory": _sizes(peaks(self.predicted_memory)[stage]),
            "allocated_bytes": None if self.memory is None else self.memory.allocated[stage],
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


def find_straggler(placement: Sequence[int], run: Sequence[StageTimes], updates: int) -> Straggler | None:
    """Return the slowest rank, if it is notably slower than the mean."""
    by_rank = [0.0] * (max(placement) + 1)
    for rank, stage in zip(placement, run, strict=True):
        by_rank[rank] += stage.stage_time_s or 0.0
    mean_s, slowest = mean(by_rank), max(by_rank)
    if slowest < NOTABLE * mean_s or not mean_s:
        return None
    return Straggler(by_rank.index(slowest), slowest, mean_s, (slowest - mean_s) * updates)


def stage_table(run: Sequence[StageTimes], plan: Sequence[StageTimes], stages: Sequence[StageStats]) -> str:
    """Return a row per stage: measured and planned times, staleness, and bytes sent."""
    lines = ["stage  bubble  (plan)  seconds a batch  (plan)    wait  (plan)  updates late  (most)"]
    lines[0] += "  MiB sent  ratio  codec s"
    for stage, (actual, planned, stats) in enumerate(zip(run, plan, stages, strict=True)):
        ratio = "-" if stats.ratio is None else f"{stats.ratio:.1f}"
        lines.append(
            f"{stage:5d}  {actual.bubble:6.1%}  {planned.bubble:6.1%}  {_seconds(actual.stage_time_s):>15}  "
            f"{_seconds(planned.stage_time_s):>6}  {actual.wait:6.1%}  {planned.wait:6.1%}  "
            f"{stats.mean_staleness:12.2f}  {stats.max_staleness:6d}  "
            f"{stats.bytes_sent / 2**20:8.1f}  {ratio:>5}  {stats.codec_s:7.2f}"
        )
    return "\n".join(lines)


def memory_table(measured: Memory, plan: Sequence[Peak]) -> str:
    """Return a row per stage: the MiB at the peak, in all and of each part, and in brackets as planned."""
    gpu = any(nbytes is not None for nbytes in measured.allocated)
    titles = ["stage", "MiB held", *PARTS, *(["allocator"] if gpu else [])]
    rows = [titles]
    for stage, (actual, planned) in enumerate(zip(measured.peaks, plan, strict=True)):
        cells = [(actual.total, planned.total)]
        cells += [(getattr(actual.parts, name), getattr(planned.parts, name)) for name in PARTS]
        row = [str(stage), *(f"{_mib(a)} ({_mib(b)})" for a, b in cells)]
        rows.append(row + ([_mib(measured.allocated[stage] or 0)] if gpu else []))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


def _sizes(of: Peak) -> dict[str, int]:
    return {"total": of.total, **of.parts.parts}


def _seconds(time: float | None) -> str:
    return "-" if time is None else f"{time:.4f}"


def _line(cells: Sequence[str]) -> bytes:
    return (",".join(cells) + "\r\n").encode()
