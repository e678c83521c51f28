"""Rank 0's records of a training: what it shows, and what it writes into a run's folder after each epoch.

Every file is made from the epochs so far: a file that could not be written is written with the next epoch.
Only the progress bar is on the engine's hot path.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import yaml

from pipetrain.checkpoint.epoch_record import EpochRecord, Stats
from pipetrain.config.placement import spans
from pipetrain.errors import NotRecorded
from pipetrain.plan.memory_fit import fit_sentence
from pipetrain.plan.text import choices, describe
from pipetrain.records import run_folder as folder
from pipetrain.records.files import Files, as_csv
from pipetrain.records.history import About, History, epoch_table
from pipetrain.records.progress_bar import Bar
from pipetrain.records.run_folder import RunFolder
from pipetrain.records.stage_table import launching, stage_table
from pipetrain.records.tracer import Trace, about_trace
from pipetrain.records.trackers import Trackers
from pipetrain.runtime.stage.memory_meter import PeakBytes
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import Program, format_program
from pipetrain.schedule.plot import as_png
from pipetrain.schedule.text import counted

log = logging.getLogger("pipetrain")

TENSORBOARD = "tensorboard"  # among the loggers


class Recorder:
    """Shows a training; with a `run_folder`, writes its records there and passes its epochs to loggers."""

    def __init__(self, about: About, run_folder: RunFolder | None = None) -> None:
        self._about = about
        self._history = History(about)
        self._bar = Bar()
        self._brief = 0  # number of epochs after which no tables are shown
        self._path = run_folder.path if run_folder else None
        self._go_on = run_folder.go_on if run_folder else ""
        self._files = Files(self._path)
        self._tensorboard: Any = None
        self._trackers: Trackers | None = None
        if run_folder is not None:
            self._introduce(run_folder)

    def _introduce(self, run: RunFolder) -> None:
        """Start the loggers, and write the files that are known before the first epoch."""
        about, history, plan = self._about, self._history, self._about.plan
        self._trackers = Trackers(run.config, run.path, run.run)
        text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
        title = f"{about.settings.model}, {about.settings.schedule}"
        picture = as_png(history.simulated, title, plan.unit_of_time, history.predicted_memory)
        self._files.text(folder.CONFIG, text)
        self._files.whole("timeline.png", lambda new: new.write_bytes(picture))
        self._files.text("plan.txt", describe(plan, room=about.room))
        if plan.choices:
            self._files.text(folder.PROFILE_FILE, json.dumps(plan.table.times.to_json(), indent=1) + "\n")
            log.info("%s", choices(plan))
        if TENSORBOARD in run.config["logger"]:
            from pipetrain.records.tensorboard import TensorBoard  # imports Matplotlib

            facts = f"{about.data.name}. {about.data.note}".strip()
            texts = {"config": f"```yaml\n{text}```", "data": facts}
            self._tensorboard = TensorBoard(run.path, texts, picture)

    def leave(self) -> None:
        """Close the loggers, however the training has ended."""
        if self._trackers:
            self._trackers.close()

    def begin(self, records: Sequence[EpochRecord] = (), again: bool = False) -> None:
        """Log the run's model, data and plan; `records`: of the epochs already done.

        `again`: this Pipeline has trained before, so a single further epoch ends without the tables.
        """
        for record in records:
            self._history.add(record)
        self._brief = len(records) + 1 if again else 0  # epochs
        self._write()
        about, settings, data, plan = self._about, self._about.settings, self._about.data, self._about.plan
        on = f" on ranks {spans(plan.placement)}" * plan.replicated
        bubble = f"{self._history.simulated.bubble:.1%} by the stages' {'times' if plan.costs else 'work'}"
        where, threads = f"; records in {self._path}" if self._path else "", torch.get_num_threads()
        dtype = (
            settings.precision if settings.dtype == torch.float32 else str(settings.dtype).partition(".")[2]
        )
        cuts = f", cut before layers {plan.cuts}" if plan.cuts else ""
        lines = [
            f"pipetrain: {settings.model} on {data.name} ({data.train} train, {data.test or 'no'} test "
            f"samples), schedule {settings.schedule}, {about.device}",
            f"{counted(plan.stages, 'stage')}{on}{cuts}; batch {settings.batch_size} in "
            f"{counted(settings.microbatches, 'microbatch')}; bubble {bubble}",
            f"{dtype}, {plan.numerics.memory_format}, threads a process: {threads}",
            f"{counted(about.epochs, 'epoch')}, {counted(about.updates, 'update')}, seed "
            f"{settings.seed}{where}",
        ]
        if about.room is not None:
            lines.append(fit_sentence(self._history.predicted_memory, about.room))
        if settings.compile:
            lines.append("the first microbatches compile the stages, which takes minutes")
        for line in lines:
            log.info(line)
        self._bar.spoke()

    def tick(self, what: str, total: int) -> None:
        self._bar.tick(what, total)

    def epoch(
        self, record: EpochRecord, peaks: Sequence[PeakBytes] = (), ranks: Sequence[Stats] = ()
    ) -> None:
        """Record a finished epoch, and log a line about it.

        `peaks`: what each rank held in a measured window of it, if any; `ranks`: each rank's statistics.
        """
        self._bar.spoke()
        self._history.add(record, peaks, ranks)
        self._write()
        about, batches = self._about, self._about.batches_of(record.epoch)
        part = f" ({batches} of {about.batches} batches)" if batches < about.batches else ""
        evaluated = f"val loss {self._text(record.evaluated)}; " if record.evaluated else ""
        log.info(
            f"epoch {record.epoch}/{about.epochs}{part}: train loss {self._text(record.trained)}; {evaluated}"
            f"{record.samples_per_s:.0f} samples/s, {record.train_s + record.eval_s:.1f} s"
        )

    def _text(self, values: Mapping[str, float]) -> str:
        """Return a mean loss and the metrics, such as `0.3120, acc 91.20 %`."""
        metrics = [f"{metric.name} {metric.text(values[metric.name])}" for metric in self._about.task.metrics]
        return ", ".join([f"{values['loss']:.4f}", *metrics])

    def _write(self, summary: Mapping[str, Any] | None = None) -> None:
        if records := self._history.records:
            self._files.text(folder.METRICS, as_csv([record.as_row() for record in records]))
            updates = [row for record in records for row in record.update_rows()]
            self._files.text(folder.UPDATES, as_csv(updates))
        if self._tensorboard:
            self._files.due("events", lambda _: self._tensorboard.write(self._history.epochs, summary))
        self._files.write()
        if self._trackers:
            self._trackers.write(self._history.epochs)

    def trace(self, trace: Trace) -> None:
        """Write the traced windows, with the facts about their run."""
        self._files.whole(
            folder.TRACE, partial(chrome.write, about=about_trace(self._about, trace), windows=trace.windows)
        )
        self._files.write()
        if self._path is not None and folder.TRACE not in self._files.failed:
            limit = f"; it ends {trace.cut}" if trace.cut else ""
            where = f"{self._path / folder.TRACE}{limit}; open it at https://ui.perfetto.dev"
            log.info(f"trace of {counted(len(trace.windows), 'window')} in {where}")

    def programs(self, epoch: int, programs: Sequence[Program]) -> None:
        parts = [
            f"# epoch {epoch}, window {number} of {len(programs)}\n{format_program(program)}"
            for number, program in enumerate(programs, 1)
        ]
        self._files.text(folder.RAN, "\n".join(parts))

    def close(self) -> None:
        """Log the results, and write the summary. Raises NotRecorded for files that cannot be written."""
        summary = self._history.summary()
        self._write(summary)
        self._log_results(summary)
        if not self._files.failed:  # last: it marks the run as finished
            self._files.text(folder.SUMMARY, json.dumps(summary, indent=2) + "\n")
            self._files.write()
        if failed := self._files.failed:
            raise NotRecorded(
                f"the run has finished, but {', '.join(failed)} cannot be written: "
                f"{'; '.join(dict.fromkeys(failed.values()))}; make room and start it again with "
                f"{self._go_on}"
            )
        if self._trackers:
            self._trackers.close(summary)

    def _log_results(self, summary: Mapping[str, Any]) -> None:
        history, about = self._history, self._about
        if len(history.epochs) != self._brief:
            self._log_tables(summary)
        metric = about.task.deciding
        name, text = (metric.name, metric.text) if metric else ("loss", "{:.4f}".format)
        last, best = history.epochs[-1].record, history.best
        result = f"train {name} {text(last.trained[name])} (not evaluated)"
        if last.evaluated:
            first = f"best {text(best.evaluated[name])}, epoch {best.epoch}" if best else "no best"
            result = f"val {name} {text(last.evaluated[name])} ({first})"
        log.info(f"{about.settings.model} on {about.data.name}: {result} in {last.elapsed_s:.0f} s")
        if about.data.note:
            log.info(about.data.note)
        if (run := self._path) is not None:
            log.info(f"run folder: {run}")
            if self._tensorboard:
                among = run.parent.name == folder.RUNS
                shown = f"--logdir {run.parent}" if among else f"--logdir_spec {run.name}:{run}"
                log.info(f"look at it: tensorboard {shown}")

    def _log_tables(self, summary: Mapping[str, Any]) -> None:
        stages = self._history.stages(self._history.records)
        log.info("\n%s\n", epoch_table(self._history))
        log.info("%s\n", stage_table(stages))
        if most := launching(stages):
            ranks = len(most.rank_times_s)
            pass_s = most.stage_time_s * ranks / (2 * self._about.settings.microbatches)
            who = f"rank {most.rank}" if ranks == 1 else f"a rank of stage {most.stage}"
            log.info(
                f"{who} neither computes nor waits in {most.bubble - most.wait:.1%} of the time, "
                f"which is a bubble that no plan has: it launches forwards and backwards, of "
                f"{1e3 * pass_s:.2g} ms, and reads batches; larger microbatches have less of the one, data "
                f"workers of the other\n"
            )
        if slow := summary["straggler"]:
            log.info(
                f"rank {slow['rank']} is the straggler: {slow['batch_s']:.4f} s a batch, "
                f"{slow['batch_s'] / slow['mean_s']:.2f} times the mean of all ranks, which cost "
                f"{slow['cost_s']:.1f} s in all; see partition=profile\n"
            )

    def stop(self, not_saved: int | None) -> None:
        """End a training that was stopped. `not_saved`: the update of a checkpoint that was lost."""
        self._bar.close()
        self._files.write()
        if not_saved is not None:
            raise NotRecorded(
                f"ended, and the checkpoint of update {not_saved} was NOT saved, so what was trained since "
                f"the one before is lost; see the warning above, and go on with: {self._go_on}"
            )
        log.info(f"stopped after a checkpoint; go on with: {self._go_on}")
