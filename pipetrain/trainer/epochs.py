"""The epochs of a training on one rank: windows, an evaluation after each epoch, figures, checkpoints, stops.

Evaluation happens between windows, when the pipeline is drained, with the weights after the last update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pipetrain.checkpoint.epoch_record import EpochRecord, Progress, best_epoch, by_update
from pipetrain.checkpoint.files import Position
from pipetrain.checkpoint.rank_state import restore
from pipetrain.checkpoint.resume import Source
from pipetrain.checkpoint.writer import Keeper
from pipetrain.errors import TrainingStopped
from pipetrain.model.specs import Size
from pipetrain.records.history import About
from pipetrain.records.rank_records import RankRecord, RankRecords
from pipetrain.records.recorder import Recorder
from pipetrain.records.tracer import Tracer
from pipetrain.runtime.clock import Observe
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.engine import Tick
from pipetrain.runtime.feed import Batches
from pipetrain.runtime.order import StopCheck
from pipetrain.runtime.stage.memory_meter import Meter, PeakBytes
from pipetrain.schedule.actions import Action, Op, Program, parse_action
from pipetrain.schedule.check import check
from pipetrain.schedule.timeline import Row, of_another
from pipetrain.signals import STOPS, StopRequest
from pipetrain.tasks.running_sums import Tally
from pipetrain.trainer.windows import Windows

STOP = "stop"
RATES = "rates"  # of the epoch's updates so far, in a checkpoint
AfterEpoch = Callable[[dict[str, float]], str | None]
"""Gets the row of an epoch on every rank; STOP on any ends the training after it."""


class Passes(Protocol):
    """The passes over the data."""

    def train(self, epoch: int, done: int) -> Batches:
        """Return the batches of an epoch, the first one is 0, after the first `done`."""

    def evaluate(self) -> Batches:
        """Return the batches of an evaluation."""

    def random(self, done: int) -> dict[str, Tensor]:
        """Return the random states from which the epoch's batches come again, after the first `done`."""


class Epochs:
    """Trains one rank's stages; rank 0 has the recorder. A `keeper` saves, and stops when it was asked to."""

    def __init__(
        self,
        windows: Windows,
        groups: ProcessGroups,
        passes: Passes,
        about: About,
        recorder: Recorder | None = None,
        keeper: Keeper | None = None,
        after_epoch: AfterEpoch = lambda row: None,
    ) -> None:
        self._windows, self.session = windows, windows.session
        self._after_epoch = after_epoch
        self._enough = False  # it has said so
        self.stopped_by: StopRequest = ""
        self._groups = groups
        self._passes = passes
        self._about = about
        self._recorder = recorder
        self._keeper = keeper
        self._position = Position(update=self.session.updates)
        self._again = self._position.update > 0  # this process has trained before
        self._progress = Progress()  # of the epochs before this one
        self._started = time.perf_counter()  # without pauses between a stop and a resume
        self._ran: list[list[Action]] = []  # in each window of the epoch, where a policy decides
        self._losses: list[float] = []  # of the epoch's updates so far
        self._rates: list[float] = []
        self._trained = 0  # windows
        self._peak_bytes: PeakBytes | None = None

    @property
    def updates(self) -> int:
        return self._position.update

    @property
    def history(self) -> list[EpochRecord]:
        """The finished epochs, those before a resume too."""
        return self._progress.history

    def restore(self, source: Source) -> None:
        """Resume from a verified checkpoint. An epoch that `max_updates` has cut short is not over there.

        Random states belong to ranks, statistics to stages and residuals to edges: they are restored only for
        the same pipeline.
        """
        session, manifest = self.session, source.manifest
        names = ["loss", *(metric.name for metric in self._about.task.metrics)]
        epoch = manifest.position.epoch
        history = [record.named(names) for record in manifest.progress.history if record.epoch <= epoch]
        self._progress = replace(manifest.progress, history=history)
        self._position = manifest.position.placed(self._about.batches)
        restore(source, session, self._groups)
        if self._keeper:
            self._keeper.seen = self._position.update
        self._count_from(self._progress.trained)
        self._losses, unknown = list(self._progress.losses), [math.nan] * len(self._progress.losses)
        self._rates = source.tensors().get(RATES, torch.tensor(unknown)).tolist()  # older ones have none
        if manifest.pipeline == session.plan.pipeline:
            stats = self._progress.stages
            session.engine.stats = {
                index: stats[index] if session.is_leader(index) else of_another(stats[index])
                for index in session.stages
            }
        else:  # the statistics are of other stages
            history = [replace(figures, stages={}) for figures in self.history]
            self._progress = replace(self._progress, history=history, stages={})

    def _count_from(self, trained: Tally) -> None:
        """Let the first rank of the last stage go on from what all have counted, as after a resume."""
        if last := self.session.last:
            mine = trained if self.session.is_leader(self.session.plan.stages - 1) else Tally()
            last.counts.trained.restore(mine, last.device)

    def run(self) -> bool:
        """Train and evaluate all epochs; return False if stopped. Raises ChannelError and TrainingStopped."""
        tracer = Tracer(self._about, self._groups) if self._about.settings.trace else None
        epochs = self._about.epochs
        if self._recorder:
            self._recorder.begin(self.history, self._again)
        with self.session.keeping_options():  # which it has changed before
            for record in self.history:  # what it knows of them it may have forgotten in a restart
                self._ask(record)
        self._groups.gather("the start of the epochs", None)  # so that no rank's time is that of its start
        self._started = time.perf_counter() - self._progress.elapsed_s
        for epoch in range(self._position.epoch, epochs):
            if self._enough:
                break
            request = self._epoch(epoch, tracer)
            if request in STOPS and self._position.epoch < epochs:
                self.stopped_by = request
                break
            if tracer and tracer.over:
                self._trace(tracer)
                tracer = None
        if tracer:
            self._trace(tracer)
        if self._keeper:
            self._keeper.close()
        return self._enough or self._position.epoch == epochs

    def _ask(self, record: EpochRecord) -> None:
        """Ask the program whether an epoch was the last one; one rank's word is enough."""
        enough = self._after_epoch(record.as_told()) == STOP
        self._enough = bool(self._groups.most("whether epochs are enough", int(enough))) or self._enough

    def _trace(self, tracer: Tracer) -> None:
        trace = tracer.collect(stopped=self._position.epoch < self._about.epochs)
        if self._recorder and trace.windows:
            self._recorder.trace(trace)

    def _epoch(self, epoch: int, tracer: Tracer | None) -> StopRequest:
        """Train the rest of an epoch and evaluate; return a signal's request."""
        start = time.perf_counter() - self._progress.train_s
        request = self._train(epoch, tracer, start)
        if request in STOPS:
            return request
        trained = time.perf_counter()
        if stopped_by := self.evaluate(epoch):
            self._save(trained - start)
            return stopped_by
        self._report(epoch, trained - start, time.perf_counter() - trained)
        ended = Position(epoch + 1, 0, self._position.update)
        cut = self._about.batches_of(epoch + 1) < self._about.batches
        if not cut:  # else a longer training goes on with the epoch
            self._reset()
            self._position = ended
            self._ask(self.history[-1])
        over = self._enough or epoch + 1 == self._about.epochs
        best = best_epoch(self.history) is self.history[-1]
        if self._keeper and (self._keeper.due(self._position, over, best) or request):
            self._save(trained - start if cut else 0.0)
        if cut:  # what the program changes now is not of the epoch's rest
            self._ask(self.history[-1])
        self._position = ended
        return request

    def _reset(self) -> None:
        """Begin the figures of another epoch."""
        self._progress = Progress(self.history)
        self._losses, self._rates = [], []
        self.session.engine.take_stats()
        if self.session.last:
            self.session.last.take_trained()

    def _train(self, epoch: int, tracer: Tracer | None, began: float) -> StopRequest:
        about, first, updates = self._about, self._position.batch, self._position.update
        batches = self._passes.train(epoch, first)
        total, window = about.batches_of(epoch + 1), about.settings.window
        request: StopRequest = ""
        tick = partial(self._tick, f"epoch {epoch + 1}", total - first)
        batch_s = [figures.train_s / total for figures in self.history[-1:]]

        def length(done: int) -> int | None:
            most, left = window and window - (first + done) % window, total - first - done
            return most if total == about.batches else min(most or left, left)  # the loader goes on

        @contextmanager
        def around(sizes: Sequence[Size]) -> Iterator[tuple[Observe | None, StopCheck | None]]:
            meter = self._meter(epoch + 1 == about.epochs and first + len(sizes) == total)
            self.session.engine.watcher = meter
            observe = self._observer(tracer.observer(epoch, sizes) if tracer else None)
            yield observe, self._stop_check(len(sizes), *batch_s)
            self._trained += 1
            if meter:
                self._peak_bytes, self.session.engine.watcher = meter.close(), None

        def until(done: int) -> int:
            return self._keeper.left(updates + done) if self._keeper else total

        what = f"the training (epoch {epoch + 1})"
        for done in self._windows.train(
            what, batches, length, lambda batches: tick, around, until, about.updates
        ):
            self._losses += done.losses
            self._rates += done.rates
            batch, update = self._position.batch + len(done.sizes), self._position.update + len(done.sizes)
            self._position, request = Position(epoch, batch, update), done.request
            if self._keeper and (not done.over or request in STOPS):
                if self._keeper.due(self._position) or request:
                    self._save(time.perf_counter() - began)
                if request in STOPS:
                    break
        return request

    def evaluate(self, epoch: int) -> StopRequest:
        """Evaluate all test samples, which the last stage counts; return what ended it early."""
        if not self._about.evaluates:
            return ""
        batches, what = self._passes.evaluate(), f"evaluation {epoch + 1}"
        replicas = len(self.session.plan.placement[min(self.session.stages)])
        batch_s = [record.eval_s / max(1, self._about.data.test) for record in self.history[-1:]]

        def around(sizes: Sequence[Size]) -> AbstractContextManager[tuple[None, StopCheck | None]]:
            return nullcontext(
                (None, self._stop_check(len(sizes), *(s * max(sizes).samples for s in batch_s)))
            )

        def ticks(batches: int) -> Tick:
            return partial(self._tick, what, -(-batches // replicas))  # of which the first has the most

        return self._windows.evaluate(what, batches, batches.evaluated_at_once, ticks, around)

    def _save(self, train_s: float) -> None:
        """Start to save a checkpoint; on all ranks at the same window, with the pipeline drained."""
        assert self._keeper is not None
        session, last = self.session, self.session.last
        trained = last.peek_trained() if last else Tally()
        mine = RankRecord(session.engine.stats, trained, self._losses)
        ranks = self._gather("what is known of the epoch", mine)
        progress = replace(
            self._progress,
            trained=ranks.trained,
            train_s=train_s,
            elapsed_s=time.perf_counter() - self._started,
            stages=ranks.stages,
            losses=ranks.losses,
        )
        self._count_from(progress.trained)
        rates = {} if self._groups.world.rank else {RATES: torch.tensor(self._rates, dtype=torch.float64)}
        more = {**self._passes.random(self._position.batch), **rates}
        self._keeper.save(session, self._groups, self._position, progress, more)

    def _gather(self, what: str, mine: RankRecord) -> RankRecords:
        """Return each rank's record. Raises ChannelError."""
        return RankRecords.gather(self._groups, what, mine, self.session.plan.placement[-1])

    def _stop_check(self, batches: int, batch_s: float | None = None) -> StopCheck | None:
        """Return the callback that may end a window early; `batch_s`: seconds per batch in the last epoch."""
        if self._keeper is None:
            return None
        self._keeper.early.begin_window(batches, batch_s)
        return self._keeper.early.ends_window

    def _meter(self, last: bool) -> Meter | None:
        """Return what measures the memory of the next window if it is the second, or the only one (`last`).

        In the second there are gradients and the optimizer's state. CUDA graphs do not tell.
        """
        stages = self.session.stages
        measured = self._trained == 1 or (last and not self._trained)
        if not measured or any(stage.captured for stage in stages.values()):
            return None
        return Meter(stages, self._groups.device)

    def _observer(self, traced: Observe | None) -> Observe | None:
        """Return what looks at a window, for which the host waits for the device; None if nothing does."""
        if not self.session.plan.draft.policy:
            return traced

        def observe(row: Row) -> None:
            if traced:
                traced(row)
            self._ran.append(row.actions)

        return observe

    def _prove(self, epoch: int, programs: list[Program]) -> None:
        """Check the programs that a policy has decided on, and record them. Raises ScheduleError."""
        for program in programs:
            batches = sum(action.op is Op.STEP for action in program[0])
            check(program, batches, self._about.settings.microbatches, self.session.plan.cut.edges)
        if programs and self._recorder:
            self._recorder.programs(epoch + 1, programs)

    def _tick(self, what: str, total: int, stage: int) -> None:
        if self._keeper:
            self._keeper.signals.updated = True
        if self._recorder and stage == min(self.session.stages):
            self._recorder.tick(what, total)

    def _report(self, epoch: int, train_s: float, eval_s: float) -> None:
        """Gather an epoch's figures from all ranks, and record them."""
        last = self.session.last
        trained, evaluated = (last.peek_trained(), last.take_evaluated()) if last else (Tally(), Tally())
        ran, stats = [list(map(str, actions)) for actions in self._ran], self.session.engine.stats
        mine = RankRecord(stats, trained, self._losses, evaluated, train_s, eval_s, ran, self._peak_bytes)
        self._ran, self._peak_bytes = [], None
        ranks = self._gather(f"the figures of epoch {epoch + 1}", mine)
        if self._groups.world.rank == 0:
            windows = zip(*(rank.ran for rank in ranks.all), strict=True)
            self._prove(epoch, [[list(map(parse_action, actions)) for actions in ran] for ran in windows])
        trained, evaluated, evaluates = ranks.trained, ranks.evaluated, self._about.evaluates
        if evaluates and self._about.settings.on_nan == "stop" and math.isnan(evaluated.mean_loss):
            raise TrainingStopped(
                f"the loss of the evaluation after update {self._position.update} is nan: the weights "
                f"are not finite, or the model's outputs for the test samples; lower lr, or see on_nan"
            )
        every, first = self._about.settings.log_every, self._position.update - len(ranks.losses) + 1
        means, rates = by_update(ranks.losses, first, every), dict(enumerate(self._rates, first))
        record = EpochRecord(
            epoch=epoch + 1,
            trained=self._values(trained),
            evaluated=self._values(evaluated) if evaluates else {},
            score=self._about.task.score(evaluated) if evaluates else math.nan,
            samples=trained.samples,
            losses=means,
            rates={update: rates[update] for update in means},
            lr=[self._about.lr, *self._rates][-1],
            train_s=max(rank.train_s for rank in ranks.all),
            eval_s=max(rank.eval_s for rank in ranks.all),
            stages=ranks.stages,
            elapsed_s=time.perf_counter() - self._started,
            ended=time.time(),
        )
        self._progress = replace(self._progress, history=[*self.history, record])
        if self._recorder:
            peaks = [rank.peak_bytes for rank in ranks.all if rank.peak_bytes is not None]
            self._recorder.epoch(record, peaks, [rank.stages for rank in ranks.all])

    def _values(self, tally: Tally) -> dict[str, float]:
        return {"loss": tally.mean_loss, **self._about.task.values(tally)}

    def metrics(self) -> dict[str, float]:
        """Return what the last epoch's training has counted, as Pipeline.metrics does; {} before it."""
        if not self.history:
            return {}
        last = self.history[-1]
        return last.trained | {"learning_rate": last.lr, "samples_per_s": last.samples_per_s}

    def rows(self) -> list[dict[str, float]]:
        """Return a row for each epoch: what fit promises of it."""
        return [record.as_told() for record in self.history]
