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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
from omegaconf import DictConfig, OmegaConf
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from pipetrain.prediction import StageTimes, predict
from pipetrain.runtime.engine import StageRecord, mean_of
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import Program, format_program
from pipetrain.schedule.draw import as_figure
from pipetrain.training import stage_table
from pipetrain.training.figures import EpochFigures
from pipetrain.training.folder import METRICS, RAN, SUMMARY, TRACE
from pipetrain.training.run import Run
from pipetrain.training.tracer import MOST_ACTIONS, Trace, about_trace

log = logging.getLogger("pipetrain")

COLUMNS = ["epoch", "train_loss", "train_acc", "val_loss", "val_acc", "lr"]
COLUMNS += ["samples_per_s", "epoch_s", "eval_s", "elapsed_s"]
HYPER_PARAMETERS = ["data", "model", "schedule", "stages", "batch_size", "microbatches", "buffer_size"]
HYPER_PARAMETERS += ["lr", "epochs", "seed", "device", "data_workers", "codec_forward", "codec_backward"]
RESULTS = ["val_acc", "best_val_acc", "val_loss", "samples_per_s", "epoch_s"]
SILENCE_S = 60.0  # off a terminal, an epoch that takes longer says how far it is this often


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run runs on, for its records. `device` names the hardware, such as `2 x cpu`."""

    device: str
    threads: int  # of each process
    allocator: str


class Recorder:
    """Writes metrics.csv, summary.json, TensorBoard events and the progress of one run into its folder."""

    def __init__(self, folder: Path, cfg: DictConfig, run: Run, machine: Machine) -> None:
        self._folder = folder
        self._run = run
        self._plan = run.plan
        self._machine = machine
        self._predicted = predict(run.plan)
        self._history: list[EpochFigures] = []
        self._since = 0
        self._spoke = time.perf_counter()
        self._done = 0
        self._bar: Any = None
        self._writer = SummaryWriter(str(folder))
        self._rows = (folder / METRICS).open("w", newline="")
        self._csv = csv.writer(self._rows)
        self._csv.writerow(COLUMNS)
        self._rows.flush()
        self._introduce(OmegaConf.to_yaml(cfg, resolve=True))

    def _introduce(self, config: str) -> None:
        """Write down, and say, what is about to run, on which data and by which plan."""
        (self._folder / "config.yaml").write_text(config)
        self._writer.add_text("config", f"```yaml\n{config}```")
        self._writer.add_text("data", f"{self._run.data.name}. {self._run.data.note}".strip())
        picture = self._folder / "timeline.png"
        as_figure(self._plan.window.simulation, picture)
        self._writer.add_image("timeline", matplotlib.image.imread(picture)[:, :, :3], dataformats="HWC")
        settings, data = self._run.settings, self._run.data
        log.info(
            "pipetrain: %s on %s (%d train, %d test samples), schedule %s, %s",
            *(
                settings.model,
                data.name,
                len(data.train),
                len(data.test),
                settings.schedule,
                self._machine.device,
            ),
        )
        log.info(
            "%d stages, cut before layers %s; batch %d in %d microbatches; bubble %.1f %% on paper",
            *(self._plan.stages, self._plan.cuts, settings.batch_size, settings.microbatches),
            100 * self._plan.window.simulation.bubble,
        )
        log.info(
            "%s, %s, %d threads a process; %s%s",
            *(settings.precision, self._plan.numerics.memory_format, self._machine.threads),
            *(self._machine.allocator, "; the first microbatches compile the stages" * settings.compile),
        )
        log.info(
            "%d epochs, %d updates, seed %d; records in %s",
            *(settings.epochs, self._run.updates, settings.seed, self._folder),
        )

    def begin(self, history: Sequence[EpochFigures] = (), since: int | None = 0) -> None:
        """Write the epochs that are done down again, as if this process had trained them, and go on.

        The stages' times count from epoch number `since` on (from 0); None: from the next one.
        """
        self._since = len(history) if since is None else since
        for figures in history:
            self._write(figures)
        self._spoke = time.perf_counter()

    def tick(self, what: str, total: int) -> None:
        """Count one of `total` steps of `what`, and show how far it is."""
        self._done += 1
        if sys.stderr.isatty():
            if self._bar is None:
                self._bar = tqdm(total=total, desc=what, leave=False)
            self._bar.update()
        elif time.perf_counter() - self._spoke > SILENCE_S:
            self._spoke = time.perf_counter()
            log.info("%s: %d of %d", what, self._done, total)
        if self._done == total:
            self._done = 0
            if self._bar is not None:
                self._bar.close()
            self._bar = None

    def epoch(self, figures: EpochFigures) -> None:
        """Write down a finished epoch, and say a line about it."""
        self._spoke = time.perf_counter()
        self._write(figures)
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

    def _write(self, figures: EpochFigures) -> None:
        self._history.append(figures)
        self._write_row(figures)
        self._write_scalars(figures)

    def _write_row(self, figures: EpochFigures) -> None:
        trained, evaluated = figures.trained, figures.evaluated
        numbers = [trained.mean_loss, trained.accuracy, evaluated.mean_loss, evaluated.accuracy, figures.lr]
        numbers += [figures.samples_per_s, figures.train_s, figures.eval_s, figures.elapsed_s]
        self._csv.writerow([figures.epoch, *(f"{number:.6g}" for number in numbers)])
        self._rows.flush()

    def _write_scalars(self, figures: EpochFigures) -> None:
        scalars = {
            "loss/train": figures.trained.mean_loss,
            "accuracy/train": figures.trained.accuracy,
            "loss/val": figures.evaluated.mean_loss,
            "accuracy/val": figures.evaluated.accuracy,
            "speed/learning_rate": figures.lr,
            "speed/samples_per_s": figures.samples_per_s,
        }
        measured = self._measured(figures.busy_s, figures.wait_s, figures.train_s, epochs=1)
        for stage, (seen, said) in enumerate(zip(measured, self._predicted, strict=True)):
            record, before = figures.records[stage], self._before(stage)
            counts = {late: count for late, count in figures.staleness[stage].items() if count}
            scalars[f"staleness/stage{stage}"] = max(counts, default=0)
            scalars[f"staleness_mean/stage{stage}"] = mean_of(counts)
            self._write_distribution(f"staleness/stage{stage}", counts, figures)
            scalars[f"sent_mib/stage{stage}"] = (record.bytes_sent - before.bytes_sent) / 2**20
            scalars[f"codec_s/stage{stage}"] = record.codec_s - before.codec_s
            for suffix, times in (("", seen), ("_predicted", said)):
                scalars[f"bubble{suffix}/stage{stage}"] = times.bubble
                scalars[f"wait{suffix}/stage{stage}"] = times.wait
                if times.stage_time_s is not None:
                    scalars[f"stage_time{suffix}/stage{stage}"] = times.stage_time_s
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, figures.epoch, walltime=figures.ended)
        self._writer.flush()

    def _write_distribution(self, name: str, counts: Mapping[int, int], figures: EpochFigures) -> None:
        """Write a histogram with a bar for each whole number."""
        values = [value for value, count in counts.items() for _ in range(count)] or [0]
        edges = [value - 0.5 for value in range(max(values) + 2)]
        self._writer.add_histogram(
            f"distribution/{name}", np.array(values), figures.epoch, bins=edges, walltime=figures.ended
        )

    def _before(self, stage: int) -> StageRecord:
        """Return what a stage had done before the newest epoch."""
        earlier = self._history[self._since : -1]
        return earlier[-1].records[stage] if earlier else StageRecord()

    def _measured(
        self, busy_s: dict[int, float], wait_s: dict[int, float], train_s: float, epochs: int
    ) -> list[StageTimes]:
        updates = epochs * self._run.updates // self._run.settings.epochs
        return stage_table.measured(self._plan.placement, busy_s, wait_s, train_s, updates)

    def _measured_so_far(self) -> list[StageTimes]:
        """Return the stages' times over all epochs done."""
        records = self._history[-1].records
        return self._measured(
            {stage: record.busy_s for stage, record in records.items()},
            {stage: record.wait_s for stage, record in records.items()},
            sum(figures.train_s for figures in self._history[self._since :]),
            len(self._history) - self._since,
        )

    def trace(self, trace: Trace) -> None:
        """Write the traced windows down, with what is to be known to replay them."""
        path = self._folder / TRACE
        chrome.write(path, about_trace(self._run, trace, self._machine.device), trace.windows)
        number = f"{len(trace.windows)} window{'s' * (len(trace.windows) > 1)}"
        limit = "" if trace.complete else f"; it stopped there, at {MOST_ACTIONS} actions of a rank"
        log.info("trace of %s in %s%s; open it at https://ui.perfetto.dev", number, path, limit)

    def programs(self, epoch: int, programs: Sequence[Program]) -> None:
        """Write down what a policy made of an epoch (counted from 1): a program a window."""
        parts = [
            f"# epoch {epoch}, window {number} of {len(programs)}\n{format_program(program)}"
            for number, program in enumerate(programs, 1)
        ]
        (self._folder / RAN).write_text("\n".join(parts))

    def close(self) -> None:
        """Write the summary and the hyper-parameters, and say how the run ended and where it lies."""
        summary = self._summary()
        (self._folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
        self._writer.add_hparams(
            {key: summary[key] for key in HYPER_PARAMETERS},
            {f"result/{key}": summary[key] for key in RESULTS},
            run_name=".",
        )
        self._writer.close()
        self._rows.close()
        log.info("\n%s\n", self.table())
        log.info(
            "%s\n", stage_table.table(self._measured_so_far(), self._predicted, self._history[-1].records)
        )
        if (straggler := self._straggler()) is not None:
            log.info("%s\n", straggler.sentence)
        log.info(
            "%s on %s: val acc %.2f %% (best %.2f %%, epoch %d) in %.0f s",
            *(summary["model"], summary["data"], 100 * summary["val_acc"], 100 * summary["best_val_acc"]),
            *(summary["best_epoch"], summary["total_s"]),
        )
        if self._run.data.note:
            log.info("%s", self._run.data.note)
        log.info("run folder: %s", self._folder)
        log.info("look at it: tensorboard --logdir %s", self._folder)

    def stop(self) -> None:
        """End without a summary, for a run that was asked to stop."""
        if self._bar is not None:
            self._bar.close()
        self._writer.close()
        self._rows.close()
        log.info("stopped after a checkpoint; go on with: run_dir=%s resume=auto", self._folder)

    def _straggler(self) -> stage_table.Straggler | None:
        updates = self._run.updates // self._run.settings.epochs * (len(self._history) - self._since)
        return stage_table.find_straggler(self._plan.placement, self._measured_so_far(), updates)

    def _summary(self) -> dict[str, Any]:
        settings, data, last = self._run.settings, self._run.data, self._history[-1]
        best = max(self._history, key=lambda figures: figures.evaluated.accuracy)
        train_s = sum(figures.train_s for figures in self._history)
        straggler = self._straggler()
        since_s = sum(figures.train_s for figures in self._history[self._since :])
        records, counted = last.records.values(), len(self._history) - self._since
        return {
            "model": settings.model,
            "data": data.name,
            "data_note": data.note,
            "schedule": settings.schedule,
            "stages": settings.ranks,
            "virtual_stages": self._plan.stages // settings.ranks,
            "partition": self._plan.cuts,
            "device": self._machine.device,
            "threads": self._machine.threads,
            "allocator": self._machine.allocator,
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
            "epochs": len(self._history),
            "seed": settings.seed,
            "train_samples": len(data.train),
            "test_samples": len(data.test),
            "val_acc": last.evaluated.accuracy,
            "best_val_acc": best.evaluated.accuracy,
            "best_epoch": best.epoch,
            "val_loss": last.evaluated.mean_loss,
            "train_loss": last.trained.mean_loss,
            "train_acc": last.trained.accuracy,
            "samples_per_s": sum(f.trained.samples for f in self._history) / train_s,
            "epoch_s": train_s / len(self._history),
            "total_s": last.elapsed_s,
            "bytes_per_epoch": sum(record.bytes_sent for record in records) / counted,
            "codec_s_per_epoch": sum(record.codec_s for record in records) / counted,
            "updates": self._run.updates,
            "straggler": None if straggler is None else asdict(straggler),
            "simulated_bubble": self._plan.window.simulation.bubble,
            "per_stage": [
                self._stage_summary(stage, seen, since_s)
                for stage, seen in enumerate(self._measured_so_far())
            ],
        }

    def _stage_summary(self, stage: int, seen: StageTimes, train_s: float) -> dict[str, Any]:
        said = self._predicted[stage]
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
            "mean_staleness": record.mean_staleness,
            "staleness": {str(late): count for late, count in sorted(record.staleness.items())},
            "busy_fraction": record.busy_s / train_s,
            "bytes_sent": record.bytes_sent,
            "raw_bytes": record.raw_bytes,
            "ratio": record.ratio,
            "codec_s": record.codec_s,
            "skipped_updates": record.skipped,
            "bubble": seen.bubble,
            "predicted_bubble": said.bubble,
            "stage_time_s": seen.stage_time_s,
            "predicted_stage_time_s": said.stage_time_s,
            "wait": seen.wait,
            "predicted_wait": said.wait,
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
                f"{evaluated.mean_loss:8.4f}  {evaluated.accuracy:7.2%}  "
                f"{figures.samples_per_s:9.1f}  {figures.train_s:7.1f}"
                + ("  best" if figures is best else "")
            )
        return "\n".join(lines)
