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
from pathlib import Path
from typing import Any

import matplotlib.image
from omegaconf import DictConfig, OmegaConf
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from pipetrain.runtime.record import mean_of
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import Program, format_program
from pipetrain.schedule.draw import as_figure
from pipetrain.training.figures import EpochFigures
from pipetrain.training.folder import CONFIG, METRICS, RAN, SUMMARY, TRACE
from pipetrain.training.history import History, Machine
from pipetrain.training.run import Run
from pipetrain.training.tracer import Trace, about_trace

log = logging.getLogger("pipetrain")

COLUMNS = ["epoch", "train_loss", "train_acc", "val_loss", "val_acc", "lr"]
COLUMNS += ["samples_per_s", "epoch_s", "eval_s", "elapsed_s"]
HYPER_PARAMETERS = ["data", "model", "schedule", "stages", "batch_size", "microbatches", "buffer_size"]
HYPER_PARAMETERS += ["lr", "epochs", "seed", "device", "data_workers", "codec_forward", "codec_backward"]
RESULTS = ["val_acc", "best_val_acc", "val_loss", "samples_per_s", "epoch_s"]
SILENCE_S = 60.0  # off a terminal, an epoch that takes longer says how far it is this often


class Recorder:
    """Writes metrics.csv, summary.json, TensorBoard events and the progress of one run into its folder."""

    def __init__(self, folder: Path, cfg: DictConfig, run: Run, machine: Machine) -> None:
        self._folder = folder
        self._run = run
        self._plan = run.plan
        self._machine = machine
        self._history = History(run)
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
        (self._folder / CONFIG).write_text(config)
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

    def begin(self, history: Sequence[EpochFigures] = (), since: int = 0) -> None:
        """Write the epochs that are done down again, as if this process had trained them, and go on.

        The stages' times count from epoch number `since` on (from 0).
        """
        self._history.since = since
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
        self._history.epochs.append(figures)
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
        # An epoch that was trained by another pipeline says nothing of these stages.
        measured = self._history.measured_last() if self._history.counted else []
        for stage, (seen, said) in enumerate(zip(measured, self._history.predicted, strict=False)):
            record, before = figures.records[stage], self._history.before(stage)
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
        counts = counts or {0: 1}
        bars = range(max(counts) + 1)
        self._writer.add_histogram_raw(
            f"distribution/{name}",
            min=min(counts),
            max=max(counts),
            num=sum(counts.values()),
            sum=sum(value * count for value, count in counts.items()),
            sum_squares=sum(value**2 * count for value, count in counts.items()),
            bucket_limits=[value + 0.5 for value in bars],
            bucket_counts=[counts.get(value, 0) for value in bars],
            global_step=figures.epoch,
            walltime=figures.ended,
        )

    def trace(self, trace: Trace) -> None:
        """Write the traced windows down, with what is to be known to replay them."""
        path = self._folder / TRACE
        chrome.write(path, about_trace(self._run, trace, self._machine.device), trace.windows)
        number = f"{len(trace.windows)} window{'s' * (len(trace.windows) > 1)}"
        limit = trace.cut and f"; it ends {trace.cut}"
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
        summary = self._history.summary(self._machine)
        self._writer.add_hparams(
            {key: summary[key] for key in HYPER_PARAMETERS},
            {f"result/{key}": summary[key] for key in RESULTS},
            run_name=".",
        )
        self._writer.close()
        self._rows.close()
        log.info("\n%s\n", self._history.table())
        log.info("%s\n", self._history.stage_table())
        if (straggler := self._history.straggler) is not None:
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
        # Whole or not at all, and last: it says that the run is finished.
        new = self._folder / f"{SUMMARY}.new"
        new.write_text(json.dumps(summary, indent=2) + "\n")
        new.replace(self._folder / SUMMARY)

    def stop(self) -> None:
        """End without a summary, for a run that was asked to stop."""
        if self._bar is not None:
            self._bar.close()
        self._writer.close()
        self._rows.close()
        log.info("stopped after a checkpoint; go on with: run_dir=%s resume=auto", self._folder)
