"""Rank 0's records of a run: CSV rows and TensorBoard points per epoch, a progress bar, and a summary.

All of it derives from the figures that the trainer hands over once per epoch, so a file that could not be
written can be made again, and only the progress bar is on the engine's hot path.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from pipetrain.checkpoint.progress import EpochFigures
from pipetrain.errors import NotRecorded
from pipetrain.plan.memory import says_whether_it_fits
from pipetrain.records import events
from pipetrain.records.about import About
from pipetrain.records.bar import Bar
from pipetrain.records.files import Files, Growing, why, write_whole
from pipetrain.records.folder import CONFIG, METRICS, RAN, RUNS, SUMMARY, TRACE, UPDATES
from pipetrain.records.history import History, Machine, Memory
from pipetrain.records.loggers import TENSORBOARD, Loggers, Points
from pipetrain.records.tracer import Trace, about_trace
from pipetrain.runtime.held import Measured
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import Program, format_program
from pipetrain.schedule.draw import as_png
from pipetrain.tally import Tally

log = logging.getLogger("pipetrain")


class Console:
    """Shows a training on rank 0: lines about its beginning and each epoch, a bar, tables at the end."""

    def __init__(self, about: About, machine: Machine) -> None:
        self._about = about
        self._plan = about.plan
        self._machine = machine
        self._history = History(about)
        self._bar = Bar()

    def begin(self, history: Sequence[EpochFigures] = ()) -> None:
        """Log the run's model, data and plan; `history`: the epochs that are already done."""
        self._history.epochs.extend(history)
        self._record(history)
        for line in self._introduction_lines():
            log.info("%s", line)
        self._bar.spoke()

    def _introduction_lines(self) -> list[str]:
        settings, data, plan, machine = self._about.settings, self._about.data, self._plan, self._machine
        sizes = f"{data.train} train, {data.test} test samples"
        bubble = f"{self._history.simulated.bubble:.1%} by the stages' {'times' if plan.costs else 'work'}"
        lines = [
            f"pipetrain: {settings.model} on {data.name} ({sizes}), schedule {settings.schedule}, "
            f"{machine.device}",
            f"{plan.stages} stages, cut before layers {plan.cuts}; batch {settings.batch_size} in "
            f"{settings.microbatches} microbatches; bubble {bubble}",
            f"{settings.precision}, {plan.numerics.memory_format}, threads a process: {machine.threads}",
            f"{settings.epochs} epochs, {self._about.updates} updates, seed {settings.seed}{self._where()}",
        ]
        if machine.room is not None:
            lines.append(says_whether_it_fits(settings, self._history.predicted_memory, machine.room))
        if settings.compile:
            lines.append("the first microbatches compile the stages, which takes minutes")
        return lines

    def _where(self) -> str:
        return ""

    def tick(self, what: str, total: int) -> None:
        """Count one of `total` steps of `what`, and show the progress."""
        self._bar.tick(what, total)

    def epoch(self, figures: EpochFigures, held: Sequence[Measured] = ()) -> None:
        """Note a finished epoch, and log a line about it.

        `held`: what each rank held in a window of it, if that was measured.
        """
        self._bar.spoke()
        self._history.epochs.append(figures)
        if held:
            self._history.memory = Memory(figures.epoch, held)
        self._record([figures])
        log.info(
            "epoch %d/%d: train loss %s; val loss %s; %.0f samples/s, %.1f s",
            figures.epoch,
            self._about.settings.epochs,
            self._told(figures.trained),
            self._told(figures.evaluated),
            figures.samples_per_s,
            figures.train_s + figures.eval_s,
        )

    def _record(self, epochs: Sequence[EpochFigures]) -> None:
        """Take epochs that are new in the history, before they are told."""

    def _told(self, tally: Tally) -> str:
        """Return a mean loss and the metrics, such as `0.3120, acc 91.20 %`."""
        values = self._about.task.values(tally)
        metrics = [f"{metric.name} {metric.text(values[metric.name])}" for metric in self._about.task.metrics]
        return ", ".join([f"{tally.mean_loss:.4f}", *metrics])

    def trace(self, trace: Trace) -> None:
        """Take the traced windows."""

    def programs(self, epoch: int, programs: Sequence[Program]) -> None:
        """Take the programs that a policy decided in an epoch (counted from 1), one per window."""

    def close(self) -> None:
        """Log the results. Raises NotRecorded for files that cannot be written."""
        log.info("\n%s\n", self._history.table())
        log.info("%s\n", self._history.stage_table())
        if self._history.memory is not None:
            log.info("%s\n", self._history.memory_table())
        if (straggler := self._history.straggler) is not None:
            log.info("%s\n", straggler.sentence)
        settings, data, total_s = self._about.settings, self._about.data, self._history.last.elapsed_s
        log.info("%s on %s: %s in %.0f s", settings.model, data.name, self._outcome_told(), total_s)
        if data.note:
            log.info("%s", data.note)

    def _outcome_told(self) -> str:
        """Return the last and the best value of the task's first metric, or of the loss."""
        last, best = self._history.last, self._history.best
        name, values = "loss", [f"{figures.evaluated.mean_loss:.4f}" for figures in (last, best)]
        for metric in self._about.task.metrics[:1]:
            name = metric.name
            of = (self._about.task.values(figures.evaluated)[name] for figures in (last, best))
            values = [metric.text(value) for value in of]
        return f"val {name} {values[0]} (best {values[1]}, epoch {best.epoch})"

    def stop(self, not_saved: int | None) -> None:
        """End a training that was stopped; see Recorder.stop."""
        self._bar.close()


class Recorder(Console):
    """Writes metrics.csv, summary.json, TensorBoard events and the progress of one run into its folder.

    The chosen trackers (see pipetrain.records.loggers) get the same figures.
    It writes nothing before `begin`.
    """

    def __init__(
        self,
        folder: Path,
        cfg: DictConfig,
        about: About,
        machine: Machine,
        files: Files,
        loggers: Loggers | None = None,
    ) -> None:
        super().__init__(about, machine)
        self._folder = folder
        self._loggers = loggers or Loggers()
        self._tensorboard = TENSORBOARD in cfg.logger
        self._files = files
        self._began = time.time()
        config, picture = (
            OmegaConf.to_yaml(cfg, resolve=True),
            as_png(
                self._history.simulated,
                f"{about.settings.model}, {about.settings.schedule}",
                about.plan.unit_of_time,
                self._history.predicted_memory,
            ),
        )
        files.text(folder / CONFIG, config)
        files.whole(folder / "timeline.png", lambda new: new.write_bytes(picture))
        self._introduction, self._outcome = events.introduction(about, config, picture), b""
        self._metrics = Growing(folder / METRICS, self._history.row)
        self._updates = Growing(folder / UPDATES, self._history.update_rows)
        name = events.file_name()
        self._events = Growing(folder / name, self._event)
        self._stages_events = [
            Growing(folder / f"stage{stage}" / name, partial(self._stage_event, stage))
            for stage in range(about.plan.stages)
        ]

    def _where(self) -> str:
        return f"; records in {self._folder}"

    def _record(self, epochs: Sequence[EpochFigures]) -> None:
        self._write()
        for left in reversed(range(len(epochs))):
            self._track(self._history.until(len(self._history.epochs) - left))

    def _write(self) -> None:
        """Update all files, including those that could not be written before."""
        parts = 1 + len(self._history.epochs)
        self._files.due(self._metrics.path, partial(self._metrics.grow, parts))
        self._files.due(self._updates.path, partial(self._updates.grow, parts))
        if self._tensorboard:
            self._files.due(self._events.path, partial(self._grow_events, parts))
        self._files.write()

    def _track(self, history: History) -> None:
        """Send a history's newest epoch to the trackers."""
        figures = history.last
        values, updates = events.scalars(history), events.updates(figures)
        self._loggers.log(Points(figures.epoch, figures.ended, values, updates))

    def _event(self, number: int) -> bytes:
        """Return a part of TensorBoard's file: introduction, epochs, outcome."""
        if number > len(self._history.epochs):
            return self._outcome
        return events.points(self._history.until(number)) if number else self._introduction

    def _stage_event(self, stage: int, number: int) -> bytes:
        """Return a part of a stage's file of TensorBoard: its beginning, or an epoch."""
        if not number:
            return events.beginning(self._began)
        return events.stage_points(self._history.until(number), stage)

    def _grow_events(self, parts: int) -> None:
        self._events.grow(parts + bool(self._outcome))
        for growing in self._stages_events:
            growing.grow(parts)

    def trace(self, trace: Trace) -> None:
        """Write the traced windows, with the conditions needed to replay them."""
        path, about = self._folder / TRACE, about_trace(self._about, trace, self._machine.device)
        number = "1 window" if len(trace.windows) == 1 else f"{len(trace.windows)} windows"
        limit = trace.cut and f"; it ends {trace.cut}"
        note = f"trace of {number} in {path}{limit}; open it at https://ui.perfetto.dev"
        self._files.whole(path, lambda new: chrome.write(new, about, trace.windows), note)
        self._files.write()

    def programs(self, epoch: int, programs: Sequence[Program]) -> None:
        """Write the programs that a policy decided in an epoch (counted from 1), one per window."""
        parts = [
            f"# epoch {epoch}, window {number} of {len(programs)}\n{format_program(program)}"
            for number, program in enumerate(programs, 1)
        ]
        self._files.text(self._folder / RAN, "\n".join(parts))

    def close(self) -> None:
        """Write the summary and hyper-parameters too. Raises NotRecorded."""
        summary = self._history.summary(self._machine)
        self._outcome = events.outcome(summary)
        self._write()
        super().close()
        log.info("run folder: %s", self._folder)
        if self._tensorboard:
            log.info("look at it: %s", _tensorboard(self._folder))
        failed = self._files.failed
        if not failed:
            path = self._folder / SUMMARY  # last: it marks the run as finished
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
        self._loggers.finish(summary)

    def stop(self, not_saved: int | None) -> None:
        """End without a summary. Raises NotRecorded if the checkpoint of the last update was `not_saved`."""
        super().stop(not_saved)
        self._write()
        if not_saved is not None:
            raise NotRecorded(
                f"ended, and the checkpoint of update {not_saved} was NOT saved, so what was trained since "
                f"the one before is lost; see the warning above, and go on with: "
                f"run_dir={self._folder} resume=auto"
            )
        log.info("stopped after a checkpoint; go on with: run_dir=%s resume=auto", self._folder)


def _tensorboard(folder: Path) -> str:
    """Return the command that shows a run in TensorBoard under its name."""
    if folder.parent.name == RUNS:
        return f"tensorboard --logdir {folder.parent}"
    return f"tensorboard --logdir_spec {folder.name}:{folder}"
