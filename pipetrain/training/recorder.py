"""What a run leaves behind, written by rank 0 as the run goes: a row and a point an epoch, and a summary.

Everything is derived from the figures that the trainer hands over once an epoch, so nothing here runs on the
engine's hot path but the progress bar's tick.
"""

from __future__ import annotations

import csv
import json
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.image
from omegaconf import DictConfig, OmegaConf
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from pipetrain.blueprint import Plan
from pipetrain.runtime.engine import StageRecord
from pipetrain.runtime.stage import Tally
from pipetrain.schedule.draw import as_figure

log = logging.getLogger("pipetrain")

METRICS = "epoch train_loss train_acc val_loss val_acc lr samples_per_s epoch_s eval_s elapsed_s".split()
SILENCE_S = 60.0  # off a terminal, an epoch that takes longer says how far it is this often


@dataclass(frozen=True, slots=True)
class EpochFigures:
    """An epoch (counted from 1) as all ranks together know it. Times in seconds, by stage where a mapping."""

    epoch: int
    trained: Tally
    evaluated: Tally
    lr: float  # of the last update
    train_s: float
    eval_s: float
    busy_s: dict[int, float]
    records: dict[int, StageRecord]

    @property
    def samples_per_s(self) -> float:
        """Training samples a second, evaluation not counted."""
        return self.trained.samples / self.train_s


@dataclass(frozen=True, slots=True)
class Identity:
    """What a run is called in its records."""

    data: str
    note: str
    device: str
    classes: int
    train_samples: int
    test_samples: int


class Recorder:
    """Writes metrics.csv, summary.json, TensorBoard events and the progress of one run into its folder."""

    def __init__(self, folder: Path, cfg: DictConfig, plan: Plan, identity: Identity, updates: int) -> None:
        self._folder = folder
        self._plan = plan
        self._identity = identity
        self._lr = plan.settings.lr
        self._epoch_updates = updates // plan.settings.epochs
        self._history: list[EpochFigures] = []
        self._start = self._spoke = time.perf_counter()
        self._ticks = 0
        self._bar: Any = None
        config = OmegaConf.to_yaml(cfg)
        (folder / "config.yaml").write_text(config)
        self._writer = SummaryWriter(str(folder))
        self._writer.add_text("config", f"```yaml\n{config}```")
        self._writer.add_text("data", f"{identity.data}. {identity.note}".strip())
        picture = folder / "timeline.png"
        as_figure(plan.window.simulation, picture)
        self._writer.add_image("timeline", matplotlib.image.imread(picture)[:, :, :3], dataformats="HWC")
        self._rows = (folder / "metrics.csv").open("w", newline="")
        self._csv = csv.writer(self._rows)
        self._csv.writerow(METRICS)

    def tick(self, epoch: int) -> None:
        """Count an update of the running epoch (from 0), and show how far it is."""
        self._ticks += 1
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = tqdm(
                    total=self._epoch_updates, desc=f"epoch {epoch + 1}", unit="update", leave=False
                )
            self._bar.update()
        elif time.perf_counter() - self._spoke > SILENCE_S:
            self._spoke = time.perf_counter()
            log.info("epoch %d: %d of %d updates", epoch + 1, self._ticks, self._epoch_updates)

    def epoch(self, figures: EpochFigures) -> None:
        """Write down a finished epoch, and say a line about it."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._ticks = None, 0
        self._history.append(figures)
        self._spoke = time.perf_counter()
        self._write_row(figures)
        self._write_scalars(figures)
        trained, evaluated = figures.trained, figures.evaluated
        log.info(
            "epoch %d/%d: train loss %.4f, acc %.2f %%; val loss %.4f, acc %.2f %%; %.0f samples/s, %.1f s",
            figures.epoch,
            self._plan.settings.epochs,
            trained.mean_loss,
            100 * trained.accuracy,
            evaluated.mean_loss,
            100 * evaluated.accuracy,
            figures.samples_per_s,
            figures.train_s + figures.eval_s,
        )

    def _write_row(self, figures: EpochFigures) -> None:
        trained, evaluated = figures.trained, figures.evaluated
        numbers = [trained.mean_loss, trained.accuracy, evaluated.mean_loss, evaluated.accuracy, figures.lr]
        numbers += [figures.samples_per_s, figures.train_s, figures.eval_s, time.perf_counter() - self._start]
        self._csv.writerow([figures.epoch, *(f"{number:.6g}" for number in numbers)])
        self._rows.flush()

    def _write_scalars(self, figures: EpochFigures) -> None:
        scalars = {
            "train/loss": figures.trained.mean_loss,
            "train/accuracy": figures.trained.accuracy,
            "val/loss": figures.evaluated.mean_loss,
            "val/accuracy": figures.evaluated.accuracy,
            "train/lr": figures.lr,
            "speed/samples_per_s": figures.samples_per_s,
        }
        for stage, record in figures.records.items():
            scalars[f"bubble/stage{stage}"] = self._bubble(stage, figures)
            scalars[f"staleness/stage{stage}"] = record.max_staleness
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, figures.epoch)
        self._writer.flush()

    def _bubble(self, stage: int, figures: EpochFigures) -> float:
        """Return the share of the epoch's training in which the stage's rank computed nothing."""
        rank = self._plan.placement[stage]
        busy = sum(figures.busy_s[s] for s, r in enumerate(self._plan.placement) if r == rank)
        return 1 - busy / figures.train_s

    def close(self) -> dict[str, Any]:
        """Write the summary and the hyper-parameters, and return the summary."""
        summary = self._summary()
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        simple = {k: v for k, v in summary.items() if isinstance(v, (str, int, float))}
        results = ("val_acc", "best_val_acc", "val_loss", "samples_per_s", "epoch_s")
        self._writer.add_hparams(
            {k: v for k, v in simple.items() if k not in results},
            {f"result/{k}": simple[k] for k in results},
            run_name=".",
        )
        self._writer.close()
        self._rows.close()
        return summary

    def _summary(self) -> dict[str, Any]:
        settings, last = self._plan.settings, self._history[-1]
        best = max(self._history, key=lambda figures: figures.evaluated.accuracy)
        train_s = sum(figures.train_s for figures in self._history)
        return {
            "model": settings.model,
            "data": self._identity.data,
            "data_note": self._identity.note,
            "schedule": settings.schedule,
            "stages": settings.ranks,
            "partition": self._plan.cuts,
            "device": self._identity.device,
            "batch_size": settings.batch_size,
            "microbatches": settings.microbatches,
            "buffer_size": settings.buffer_size,
            "window": settings.window,
            "data_workers": settings.workers,
            "lr": settings.lr,
            "epochs": len(self._history),
            "seed": settings.seed,
            "train_samples": self._identity.train_samples,
            "test_samples": self._identity.test_samples,
            "val_acc": last.evaluated.accuracy,
            "best_val_acc": best.evaluated.accuracy,
            "best_epoch": best.epoch,
            "val_loss": last.evaluated.mean_loss,
            "train_loss": last.trained.mean_loss,
            "train_acc": last.trained.accuracy,
            "samples_per_s": sum(f.trained.samples for f in self._history) / train_s,
            "epoch_s": train_s / len(self._history),
            "total_s": time.perf_counter() - self._start,
            "updates": self._epoch_updates * len(self._history),
            "simulated_bubble": self._plan.window.simulation.bubble,
            "per_stage": [self._stage_summary(stage, train_s) for stage in range(self._plan.stages)],
        }

    def _stage_summary(self, stage: int, train_s: float) -> dict[str, Any]:
        record = self._history[-1].records[stage]
        held = self._plan.layers[self._plan.slice(stage)]
        return {
            "stage": stage,
            "rank": self._plan.placement[stage],
            "layers": len(held),
            "params": sum(layer.params for layer in held),
            "peak_in_flight": record.peak_in_flight,
            "peak_versions": record.peak_versions,
            "max_staleness": record.max_staleness,
            "busy_fraction": record.busy_s / train_s,
            "bytes_sent": record.bytes_sent,
        }

    def table(self) -> str:
        """Return the epochs as a table: all of them, or the last ones and the best of many."""
        best = max(self._history, key=lambda figures: figures.evaluated.accuracy)
        shown = self._history if len(self._history) <= 40 else [best, *self._history[-20:]]
        lines = ["epoch  train loss  train acc  val loss  val acc  samples/s  seconds"]
        for figures in shown:
            trained, evaluated = figures.trained, figures.evaluated
            lines.append(
                f"{figures.epoch:5d}  {trained.mean_loss:10.4f}  {trained.accuracy:9.2%}  "
                f"{evaluated.mean_loss:8.4f}  {evaluated.accuracy:7.2%}  {figures.samples_per_s:9.1f}  {figures.train_s:7.1f}"
                + ("  best" if figures is best else "")
            )
        return "\n".join(lines)
