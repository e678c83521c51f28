"""What a run leaves behind, written by rank 0 as the run goes: a row and a point an epoch, and a summary.

Everything is derived from the figures that the trainer hands over once an epoch, so nothing here runs on the
engine's hot path but the progress bar's tick, and what could not be written can be made again.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from pipetrain.errors import NotRecorded
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import Program, format_program
from pipetrain.schedule.draw import as_png
from pipetrain.training import events
from pipetrain.training.figures import EpochFigures
from pipetrain.training.files import Files, Growing, why, write_whole
from pipetrain.training.folder import CONFIG, METRICS, RAN, SUMMARY, TRACE, UPDATES
from pipetrain.training.history import History, Machine
from pipetrain.training.run import Run
from pipetrain.training.tracer import Trace, about_trace

log = logging.getLogger("pipetrain")

SILENCE_S = 10.0  # off a terminal, an epoch that takes longer says how far it is this often


class Recorder:
    """Writes metrics.csv, summary.json, TensorBoard events and the progress of one run into its folder.

    It writes nothing before `begin`.
    """

    def __init__(self, folder: Path, cfg: DictConfig, run: Run, machine: Machine, files: Files) -> None:
        self._folder = folder
        self._run = run
        self._plan = run.plan
        self._machine = machine
        self._files = files
        self._history = History(run)
        self._spoke = time.perf_counter()
        self._done = 0
        self._bar: Any = None
        config, picture = OmegaConf.to_yaml(cfg, resolve=True), as_png(self._history.simulated)
        files.text(folder / CONFIG, config)
        files.whole(folder / "timeline.png", lambda new: new.write_bytes(picture))
        self._introduction, self._outcome = events.introduction(run, config, picture), b""
        self._metrics = Growing(folder / METRICS, self._history.row)
        self._updates = Growing(folder / UPDATES, self._history.update_rows)
        self._events = Growing(folder / events.file_name(), self._event)

    def _introduce(self) -> None:
        """Say what is about to run, on which data and by which plan."""
        settings, data, plan, machine = self._run.settings, self._run.data, self._plan, self._machine
        sizes = f"{len(data.train)} train, {len(data.test)} test samples"
        bubble = f"{self._history.simulated.bubble:.1%} by the stages' {'times' if plan.costs else 'work'}"
        lines = [
            f"pipetrain: {settings.model} on {data.name} ({sizes}), schedule {settings.schedule}, "
            f"{machine.device}",
            f"{plan.stages} stages, cut before layers {plan.cuts}; batch {settings.batch_size} in "
            f"{settings.microbatches} microbatches; bubble {bubble}",
            f"{settings.precision}, {plan.numerics.memory_format}, threads a process: {machine.threads}",
            f"{settings.epochs} epochs, {self._run.updates} updates, seed {settings.seed}; "
            f"records in {self._folder}",
        ]
        if settings.compile:
            lines.append("the first microbatches compile the stages, which takes minutes")
        for line in lines:
            log.info("%s", line)

    def begin(self, history: Sequence[EpochFigures] = ()) -> None:
        """Say what is about to run, and write the finished epochs, as if this process had trained them."""
        self._introduce()
        self._history.epochs.extend(history)
        self._write()
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
        self._history.epochs.append(figures)
        self._write()
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

    def _write(self) -> None:
        """Bring all files up to date, those too that could not be written before."""
        parts = 1 + len(self._history.epochs)
        self._files.due(self._metrics.path, partial(self._metrics.grow, parts))
        self._files.due(self._updates.path, partial(self._updates.grow, parts))
        self._files.due(self._events.path, partial(self._events.grow, parts + bool(self._outcome)))
        self._files.write()

    def _event(self, number: int) -> bytes:
        """Return a part of TensorBoard's file: what it begins with, an epoch each, what it ends with."""
        if number > len(self._history.epochs):
            return self._outcome
        return events.points(self._history.until(number)) if number else self._introduction

    def trace(self, trace: Trace) -> None:
        """Write the traced windows down, with what is to be known to replay them."""
        path, about = self._folder / TRACE, about_trace(self._run, trace, self._machine.device)
        number = f"{len(trace.windows)} window{'s' * (len(trace.windows) > 1)}"
        limit = trace.cut and f"; it ends {trace.cut}"
        said = f"trace of {number} in {path}{limit}; open it at https://ui.perfetto.dev"
        self._files.whole(path, lambda new: chrome.write(new, about, trace.windows), said)
        self._files.write()

    def programs(self, epoch: int, programs: Sequence[Program]) -> None:
        """Write down what a policy made of an epoch (counted from 1), with its row: a program a window."""
        parts = [
            f"# epoch {epoch}, window {number} of {len(programs)}\n{format_program(program)}"
            for number, program in enumerate(programs, 1)
        ]
        self._files.text(self._folder / RAN, "\n".join(parts))

    def close(self) -> None:
        """Write the summary and the hyper-parameters, and say how the run ended and where it lies.

        Raises NotRecorded where not all of its files can be written.
        """
        summary = self._history.summary(self._machine)
        self._outcome = events.outcome(summary)
        self._write()
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
        log.info("look at it: %s", _tensorboard(self._folder))
        failed = self._files.failed
        if not failed:
            path = self._folder / SUMMARY  # last: it says that the run is finished
            try:
                write_whole(path, lambda new: new.write_text(json.dumps(summary, indent=2) + "\n"))
            except OSError as error:
                failed = {path: why(error)}
        if failed:
            raise NotRecorded(
                f"the run has finished, but {', '.join(path.name for path in failed)} cannot be written: "
                f"{'; '.join(dict.fromkeys(failed.values()))}; make room and start it again with "
                f"run_dir={self._folder} resume=auto"
            )

    def stop(self, not_saved: int | None) -> None:
        """End without a summary, for a run that was asked to stop, or could not save what it has come to.

        Raises NotRecorded where the checkpoint of its last update was `not_saved`.
        """
        if self._bar is not None:
            self._bar.close()
        self._write()
        if not_saved is not None:
            raise NotRecorded(
                f"ended, and the checkpoint of update {not_saved} was NOT saved, so what was trained since "
                f"the one before is lost; see to what was said of it, and go on with: "
                f"run_dir={self._folder} resume=auto"
            )
        log.info("stopped after a checkpoint; go on with: run_dir=%s resume=auto", self._folder)


def _tensorboard(folder: Path) -> str:
    """Return the command that shows a run under its name, which TensorBoard takes from below its logdir."""
    if folder.parent.name == "runs":
        return f"tensorboard --logdir {folder.parent}"
    return f"tensorboard --logdir_spec {folder.name}:{folder}"
