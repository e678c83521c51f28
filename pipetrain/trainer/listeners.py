"""What listens to the windows and epochs of a run, each with one idea.

All ranks have the same listeners in the same order, as some of them gather what all know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipetrain.checkpoint.epoch_record import EpochRecord, best_epoch
from pipetrain.checkpoint.files import Manifest
from pipetrain.checkpoint.rank_state import snapshot
from pipetrain.checkpoint.writer import Writer
from pipetrain.errors import ChannelError, TrainingStopped
from pipetrain.exit import terminate
from pipetrain.model.specs import Size
from pipetrain.records.history import About, RankRecords
from pipetrain.records.recorder import Recorder
from pipetrain.records.tracer import Tracer
from pipetrain.runtime.window_record import NO_HOOKS, WindowHooks
from pipetrain.schedule.actions import Action, Op, parse_action
from pipetrain.schedule.check import check
from pipetrain.signals import STOPS, Signals, name_of, status_after
from pipetrain.trainer.progress import ShowsProgress
from pipetrain.trainer.run import Run
from pipetrain.trainer.window_loop import Listener, Pass, WindowResult
from pipetrain.trainer.window_stop import WindowStop

log = logging.getLogger("pipetrain")

STOP = "stop"


class Records(ShowsProgress):
    """Lets rank 0's recorder show the progress, and record the epochs."""

    def __init__(self, recorder: Recorder, run: Run) -> None:
        super().__init__(recorder, run.session)
        self._recorder, self._run = recorder, run
        recorder.begin(run.history, run.again)

    def after_epoch(self, ranks: RankRecords) -> None:
        peaks = [rank.peak_bytes for rank in ranks.all if rank.peak_bytes is not None]
        self._recorder.epoch(self._run.history[-1], peaks, [rank.stages for rank in ranks.all])


class MeasuresMemory(Listener):
    """Measures the memory of the second window of training, or of the only one.

    In the second there are gradients and the optimizer's state.
    """

    def __init__(self, about: About) -> None:
        self._about = about
        self._windows = 0

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowHooks:
        if not of.trains:
            return NO_HOOKS
        self._windows += 1
        epoch, about = of.epoch + 1, self._about
        only = epoch == about.epochs and (of.begun or 0) + len(sizes) == about.batches_of(epoch)
        return WindowHooks(memory=self._windows == 2 or (self._windows == 1 and only))


class RecordsDecisions(Listener):
    """Checks the programs that a policy has decided on, and has rank 0's recorder write them."""

    def __init__(self, recorder: Recorder | None, run: Run) -> None:
        self._recorder, self._run = recorder, run
        self._ran: list[list[Action]] = []  # in each window of the epoch

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowHooks:
        return WindowHooks(times=of.trains)

    def after_windows(self, done: WindowResult) -> None:
        self._ran += [window.row.actions for window in done.windows if window.row]

    def after_epoch(self, ranks: RankRecords) -> None:
        ran, self._ran = [list(map(str, actions)) for actions in self._ran], []
        run = self._run
        of_ranks = run.groups.gather("what a policy has decided", ran)
        if not self._recorder:
            return
        programs = [
            [list(map(parse_action, actions)) for actions in window] for window in zip(*of_ranks, strict=True)
        ]
        for program in programs:
            batches = sum(action.op is Op.STEP for action in program[0])
            check(program, batches, run.about.settings.microbatches, run.session.plan.cut.edges)
        self._recorder.programs(run.history[-1].epoch, programs)


class Traces(Listener):
    """Traces the first windows, and has rank 0's recorder write them."""

    def __init__(self, recorder: Recorder | None, run: Run) -> None:
        self._recorder, self._run = recorder, run
        self._tracer: Tracer | None = Tracer(run.about, run.groups)
        self._traced: list[bool] = []  # of the windows that run

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowHooks:
        traced = of.trains and self._tracer is not None and self._tracer.traces(len(sizes))
        self._traced.append(traced)
        return WindowHooks(times=traced)

    def after_windows(self, done: WindowResult) -> None:
        for window, traced in zip(done.windows, self._traced, strict=True):
            if self._tracer and traced and window.row:
                self._tracer.add(done.of.epoch, window.sizes, window.row)
        self._traced = []

    def after_epoch(self, ranks: RankRecords) -> None:
        if self._tracer and self._tracer.over:
            self.close()

    def close(self) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer:
            trace = tracer.collect(stopped=self._run.position.epoch < self._run.about.epochs)
            if self._recorder and trace.windows:
                self._recorder.trace(trace)


class AsksProgram(Listener):
    """Gives the program each epoch's row, on every rank; STOP on any of them ends the run after the epoch."""

    def __init__(self, after_epoch: Callable[[dict[str, float]], str | None], run: Run) -> None:
        self._after_epoch, self._run = after_epoch, run
        self._later: EpochRecord | None = None
        with run.session.keeping_options():  # which it has changed before
            for record in run.history:  # what it knows of them it may have forgotten in a restart
                self._ask(record)

    def after_epoch(self, ranks: RankRecords) -> None:
        if self._run.cut:  # saved first: what the program changes now is not of the epoch's rest
            self._later = self._run.history[-1]
        else:
            self._ask(self._run.history[-1])

    def close(self) -> None:
        if self._later:
            self._ask(self._later)

    def _ask(self, record: EpochRecord) -> None:
        enough = self._after_epoch(record.as_told()) == STOP
        if self._run.groups.maximum("whether epochs are enough", int(enough)):
            self._run.finish()


class Checkpoints(Listener):
    """Saves every `every` epochs or updates (None: never) and at the best epoch and the end; or at a signal.

    `manifest`: of each checkpoint, but for its position and progress. `seen`: the update at the end of the
    last window. `not_saved`: the update of the last save if it failed.
    """

    def __init__(
        self,
        run: Run,
        writer: Writer,
        signals: Signals,
        manifest: Manifest,
        every: int | None,
        unit: str,
        seen: int = 0,
    ) -> None:
        self._run, self.writer, self.signals, self._manifest = run, writer, signals, manifest
        self._every, self._unit, self._seen = every, unit, seen
        self._asked = False  # at the end of the epoch's training
        self.not_saved: int | None = None

    @property
    def look_every(self) -> int | None:
        """The updates between two saves, if that is how they are counted."""
        return self._every if self._unit == "updates" else None

    def after_windows(self, done: WindowResult) -> None:
        stops = done.request in STOPS
        if not done.of.trains:
            due = done.early
        elif done.over and not stops:  # there is a checkpoint of the epoch's end
            due, self._asked = False, bool(done.request)
        else:
            due = self._due() or bool(done.request)
        if due:
            self._save()

    def after_epoch(self, ranks: RankRecords) -> None:
        history = self._run.history
        if self._due(self._run.over or best_epoch(history) is history[-1]) or self._asked:
            self._save()
        self._asked = False

    def close(self) -> None:
        self.signals.drained.set()
        self.writer.close()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Run epochs; say what is saved where another rank has left."""
        try:
            with self.signals.losing():
                yield
        except ChannelError as error:
            if self.signals.saved and (by := self.signals.stopped_by):
                terminate(f"{error}, after {name_of(by)}; {self.signals.saved()}", status_after(by))
            raise
        finally:
            self.signals.drained.set()
            self.writer.leave()

    def _due(self, surely: bool = False) -> bool:
        """Return whether to save, `surely` if at all; called once per window."""
        at, before = self._run.position, self._seen
        self._seen = at.update
        if self._every is None or surely:
            return self._every is not None
        if self._unit == "updates":
            return at.update // self._every > before // self._every
        return at.batch == 0 and at.epoch % self._every == 0

    def _save(self) -> None:
        """Start to save; on all ranks at the same window, with the pipeline drained."""
        run = self._run
        progress, rates = run.progress()
        tensors = {**run.data.random(run.position.batch), **rates}
        manifest = replace(self._manifest, position=run.position, progress=progress)
        saving = self.writer.save(manifest, partial(snapshot, run.session, run.groups, tensors))
        saving.add_done_callback(partial(self._note, run.position.update))

    def _note(self, update: int, saving: Future[Path]) -> None:
        failure = saving.exception()
        self.not_saved = update if failure else None
        if isinstance(failure, TrainingStopped) and not self._run.groups.world.rank:
            log.warning(
                "pipetrain: the checkpoint of update %d was NOT saved: %s; training goes on, and the "
                "checkpoints before it are as they were",
                *(update, failure),
            )


def listeners_of(
    run: Run,
    recorder: Recorder | None = None,
    after_epoch: Callable[[dict[str, float]], str | None] | None = None,
    stop: WindowStop | None = None,
    checkpoints: Checkpoints | None = None,
) -> list[Listener]:
    """Return what listens to a run that begins. All ranks call it; rank 0 has the recorder."""
    listeners = [
        stop,
        MeasuresMemory(run.about),
        RecordsDecisions(recorder, run) if run.session.plan.draft.policy else None,
        Records(recorder, run) if recorder else None,
        AsksProgram(after_epoch, run) if after_epoch else None,
        Traces(recorder, run) if run.about.settings.trace else None,
        checkpoints,
    ]
    return [listener for listener in listeners if listener]
