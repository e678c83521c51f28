"""What listens to the windows and epochs of a run, each with one idea.

All ranks have the same listeners in the same order, as some of them gather what all know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipetrain.checkpoint.epoch_record import EpochRecord, best_epoch
from pipetrain.checkpoint.window_stop import EarlyEnd
from pipetrain.checkpoint.writer import Keeper
from pipetrain.model.specs import Size
from pipetrain.records.history import About
from pipetrain.records.progress_bar import Bar
from pipetrain.records.rank_records import RankRecords
from pipetrain.records.recorder import Recorder
from pipetrain.records.tracer import Tracer
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.session import Session
from pipetrain.runtime.window_run import UNWATCHED, WindowWatch
from pipetrain.schedule.actions import Action, Op, parse_action
from pipetrain.schedule.check import check
from pipetrain.signals import STOPS, Signals
from pipetrain.trainer.passes import Pass, WindowListener, WindowResult
from pipetrain.trainer.run import Listener, Run

STOP = "stop"
AfterEpoch = Callable[[dict[str, float]], str | None]
"""Gets the row of an epoch on every rank; STOP on any ends the training after it."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of one pass."""

    shown_by: Bar | Recorder
    what: str
    total: int

    def advance(self) -> None:
        self.shown_by.tick(self.what, self.total)


class ShowsProgress(WindowListener):
    """Shows the steps of each pass, but for windows of less than `least` batches."""

    def __init__(self, shown_by: Bar | Recorder, session: Session, least: int = 1) -> None:
        self._shown_by, self._least = shown_by, least
        self._replicas = len(session.plan.placement[min(session.stages)])

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowWatch:
        if len(sizes) < self._least:
            return UNWATCHED
        total = len(sizes) if of.trains else -(-len(sizes) // self._replicas)  # the first has the most
        return WindowWatch(progress=(Steps(self._shown_by, of.title or of.kind, of.shown or total),))


class Records(ShowsProgress, Listener):
    """Lets rank 0's recorder show the progress, and record the epochs."""

    def __init__(self, recorder: Recorder, run: Run) -> None:
        super().__init__(recorder, run.session)
        self._recorder = recorder
        recorder.begin(run.history, run.again)

    def after_epoch(self, run: Run, ranks: RankRecords) -> None:
        peaks = [rank.peak_bytes for rank in ranks.all if rank.peak_bytes is not None]
        self._recorder.epoch(run.history[-1], peaks, [rank.stages for rank in ranks.all])


class MeasuresMemory(Listener):
    """Measures the memory of the second window of training, or of the only one.

    In the second there are gradients and the optimizer's state.
    """

    def __init__(self, about: About) -> None:
        self._about = about
        self._windows = 0

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowWatch:
        if not of.trains:
            return UNWATCHED
        self._windows += 1
        epoch, about = of.epoch + 1, self._about
        only = epoch == about.epochs and (of.begun or 0) + len(sizes) == about.batches_of(epoch)
        return WindowWatch(memory=self._windows == 2 or (self._windows == 1 and only))


class RecordsDecisions(Listener):
    """Checks the programs that a policy has decided on, and has rank 0's recorder write them."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._ran: list[list[Action]] = []  # in each window of the epoch

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowWatch:
        return WindowWatch(times=of.trains)

    def after_windows(self, run: Run, done: WindowResult) -> None:
        self._ran += [window.row.actions for window in done.windows if window.row]

    def after_epoch(self, run: Run, ranks: RankRecords) -> None:
        ran, self._ran = [list(map(str, actions)) for actions in self._ran], []
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

    def __init__(self, recorder: Recorder | None, about: About, groups: ProcessGroups) -> None:
        self._recorder = recorder
        self._tracer: Tracer | None = Tracer(about, groups)
        self._traced: list[bool] = []  # of the windows that run

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowWatch:
        traced = of.trains and self._tracer is not None and self._tracer.traces(len(sizes))
        self._traced.append(traced)
        return WindowWatch(times=traced)

    def after_windows(self, run: Run, done: WindowResult) -> None:
        for window, traced in zip(done.windows, self._traced, strict=True):
            if self._tracer and traced and window.row:
                self._tracer.add(done.of.epoch, window.sizes, window.row)
        self._traced = []

    def after_epoch(self, run: Run, ranks: RankRecords) -> None:
        if self._tracer and self._tracer.over:
            self.close(run)

    def close(self, run: Run) -> None:
        tracer, self._tracer = self._tracer, None
        if tracer:
            trace = tracer.collect(stopped=run.position.epoch < run.about.epochs)
            if self._recorder and trace.windows:
                self._recorder.trace(trace)


class AsksProgram(Listener):
    """Gives the program each epoch's row, on every rank; STOP on any of them ends the run after the epoch."""

    def __init__(self, after_epoch: AfterEpoch, run: Run) -> None:
        self._after_epoch = after_epoch
        self._later: EpochRecord | None = None
        with run.session.keeping_options():  # which it has changed before
            for record in run.history:  # what it knows of them it may have forgotten in a restart
                self._ask(run, record)

    def after_epoch(self, run: Run, ranks: RankRecords) -> None:
        if run.cut:  # saved first: what the program changes now is not of the epoch's rest
            self._later = run.history[-1]
        else:
            self._ask(run, run.history[-1])

    def close(self, run: Run) -> None:
        if self._later:
            self._ask(run, self._later)

    def _ask(self, run: Run, record: EpochRecord) -> None:
        enough = self._after_epoch(record.as_told()) == STOP
        if run.groups.most("whether epochs are enough", int(enough)):
            run.finish()


class StopsWindows(Listener):
    """Lets signals know of updates, which are then to be saved, and end a long window early."""

    def __init__(self, signals: Signals, early: EarlyEnd) -> None:
        self._signals, self._early = signals, early

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowWatch:
        self._early.begin_window(len(sizes), of.sample_s and of.sample_s * max(sizes).samples)
        return WindowWatch(progress=(self._signals,), stop_check=self._early.ends_window)


class Checkpoints(Listener):
    """Saves: every so often, at the best epoch, at the end, and when a signal asks for it."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._asked = False  # at the end of the epoch's training

    def after_windows(self, run: Run, done: WindowResult) -> None:
        stops = done.request in STOPS
        if not done.of.trains:
            due = done.early
        elif done.over and not stops:  # there is a checkpoint of the epoch's end
            due, self._asked = False, bool(done.request)
        else:
            due = self._keeper.due(run.position) or bool(done.request)
        if due:
            self._save(run)

    def after_epoch(self, run: Run, ranks: RankRecords) -> None:
        best = best_epoch(run.history) is run.history[-1]
        if self._keeper.due(run.position, run.over, best) or self._asked:
            self._save(run)
        self._asked = False

    def close(self, run: Run) -> None:
        self._keeper.close()

    def _save(self, run: Run) -> None:
        """Start to save; on all ranks at the same window, with the pipeline drained."""
        progress, rates = run.progress()
        tensors = {**run.data.random(run.position.batch), **rates}
        self._keeper.save(run.session, run.groups, run.position, progress, tensors)


def listeners_of(
    run: Run, recorder: Recorder | None = None, after_epoch: AfterEpoch = lambda row: None
) -> list[Listener]:
    """Return what listens to a run that begins. All ranks call it; rank 0 has the recorder."""
    traces = [Traces(recorder, run.about, run.groups)] if run.about.settings.trace else []
    keeper = run.keeper
    return [
        *([StopsWindows(keeper.signals, keeper.early)] if keeper else []),
        MeasuresMemory(run.about),
        *([RecordsDecisions(recorder)] if run.session.plan.draft.policy else []),
        *([Records(recorder, run)] if recorder else []),
        AsksProgram(after_epoch, run),
        *traces,
        *([Checkpoints(keeper)] if keeper else []),
    ]
