"""A run: the epochs of a training on one rank, their batches, where it stands, and what listens to it.

A loader is read again from the beginning of the epoch, in the state that it had then.
Evaluation happens between windows, when the pipeline is drained, with the weights after the last update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipetrain.checkpoint.epoch_record import EpochRecord, Progress, by_update
from pipetrain.checkpoint.files import Position
from pipetrain.checkpoint.rank_state import restore, restore_random
from pipetrain.checkpoint.resume import Source
from pipetrain.data.loader_facts import parts_of
from pipetrain.data.loader_state import LoaderStates
from pipetrain.data.reader import Loader
from pipetrain.data.sampling import Sampled
from pipetrain.errors import TrainingStopped
from pipetrain.records.history import About, RankRecord, RankRecords
from pipetrain.records.run_folder import RunFolder
from pipetrain.runtime.comm.collective_guard import CollectiveGuard
from pipetrain.runtime.microbatch_feed import Batches
from pipetrain.runtime.session import Session
from pipetrain.runtime.stage.memory_meter import PeakBytes
from pipetrain.schedule.timeline import of_another
from pipetrain.signals import STOPS, Signals, StopRequest
from pipetrain.tasks.running_sums import Tally
from pipetrain.trainer.training_setup import Training
from pipetrain.trainer.window_loop import MAX_UNSYNCED_S, Listener, Pass, WindowResult, Windows

EPOCH_RANDOM = "random/0/epoch"  # of rank 0 at the beginning of an epoch
LOADERS = "random/0/loaders"  # what its samples follow from, then or, at the end of one, now
RATES = "rates"  # of the epoch's updates so far, in a checkpoint


class EpochData:
    """Loaders, or samples by number, of which a run trains and evaluates epochs; the first decides the plan.

    `test`: None where nothing is evaluated. `batches`: of an epoch. `run_folder`: where checkpoints are, if
    there are any. `start`: where the first epoch begins.
    """

    def __init__(
        self,
        training: Training,
        train: Loader | Sampled,
        test: Loader | Sampled | None,
        batches: int,
        run_folder: RunFolder | None,
    ) -> None:
        self._training, self._train, self._test, self.batches = training, train, test, batches
        self.source = run_folder.source if run_folder else None
        self.start = self.source.manifest.position.placed(batches) if self.source else Position()
        keeps = run_folder and not training.rank and not isinstance(train, Sampled)
        self._states = LoaderStates(train=train, test=test) if keeps else None
        self._random: dict[str, Tensor] = {}  # at the beginning of the epoch
        self._ahead: Batches | None = None
        if isinstance(train, Sampled):
            assert isinstance(test, Sampled)
            training.begin_by_number(train, test)
        if self.source is not None:
            self._go_on(self.source)
        if not isinstance(train, Sampled):
            self._ahead = self.train(self.start.epoch, self.start.batch)

    def _go_on(self, source: Source) -> None:
        """Restore the random state with which the epoch began that the checkpoint is of."""
        tensors = source.tensors()

        def restore() -> None:
            if self._states is not None and LOADERS in tensors:
                with source.used():
                    self._states.restore(tensors[LOADERS])

        self._training.guard.on_first("the loaders' states", restore)
        restore_random(source, self._training.groups)
        if self.start.batch and EPOCH_RANDOM in tensors and not self._training.rank:
            torch.set_rng_state(tensors[EPOCH_RANDOM])

    def train(self, epoch: int, done: int) -> Batches:
        """Return the batches of an epoch, the first one is 0, after the first `done`."""
        begun, self._ahead = self._ahead, None
        if begun is not None:
            return begun
        for part in parts_of(self._train).values():
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        self._random = self._states_now()
        return self._training.batches(self._train, trains=True, epoch=epoch, done=done)

    def evaluate(self) -> Batches:
        """Return the batches of an evaluation."""
        assert self._test is not None, "nothing is evaluated"
        return self._training.batches(self._test)

    def random(self, done: int) -> dict[str, Tensor]:
        """Return the random states from which the epoch's batches come again, after the first `done`."""
        return self._random if done else self._states_now()

    def _states_now(self) -> dict[str, Tensor]:
        if self._states is None:
            return {}
        return {EPOCH_RANDOM: torch.get_rng_state(), LOADERS: self._states.read()}


class Run:
    """The epochs of a training, on one rank; `position` and `history` are alike on all.

    `history`: the finished epochs, those before a resume too. `again`: whether this process has trained
    before. `stopped_by`: the signal that has ended it.
    """

    def __init__(self, session: Session, guard: CollectiveGuard, about: About, data: EpochData) -> None:
        self.session, self.groups, self.about = session, guard.groups, about
        self._guard, self.data = guard, data
        self._last_ranks = session.plan.placement[-1]
        self.position = Position(update=session.updates)
        self.again = self.position.update > 0
        self.history: list[EpochRecord] = []
        self.stopped_by: StopRequest = ""
        self._enough = False  # the program has said so
        self._listeners: Sequence[Listener] = ()
        self._losses: list[float] = []  # of the epoch's updates so far
        self._rates: list[float] = []
        self._peak_bytes: PeakBytes | None = None  # of a window of it, if that was measured
        self._began = self._trained_at = self._started = time.perf_counter()
        self._train_s = 0.0  # of the epoch, before it was resumed
        self._elapsed_s = 0.0  # of the run, before that

    @property
    def over(self) -> bool:
        """Whether the last epoch recorded is the run's last one."""
        return self._enough or bool(self.history and self.history[-1].epoch == self.about.epochs)

    @property
    def cut(self) -> bool:
        """Whether `max_updates` has cut that epoch short, so that a longer training goes on with it."""
        return self.position.batch > 0

    def restore(self, source: Source) -> None:
        """Resume from a verified checkpoint. An epoch that `max_updates` has cut short is not over there.

        Random states belong to ranks, statistics to stages and residuals to edges: they are restored only for
        the same pipeline.
        """
        session, manifest, progress = self.session, source.manifest, source.manifest.progress
        names = ["loss", *(metric.name for metric in self.about.task.metrics)]
        epochs = [record for record in progress.history if record.epoch <= manifest.position.epoch]
        self.history = [record.named(names) for record in epochs]
        self.position = manifest.position.placed(self.about.batches)
        self._train_s, self._elapsed_s = progress.train_s, progress.elapsed_s
        restore(source, session, self.groups)
        self._count_from(progress.trained)
        self._losses, unknown = list(progress.losses), [math.nan] * len(progress.losses)
        self._rates = source.tensors().get(RATES, torch.tensor(unknown)).tolist()  # older ones have none
        if manifest.pipeline == session.plan.pipeline:
            stats = progress.stages
            session.engine.reset_stats(
                {
                    index: stats[index] if session.is_leader(index) else of_another(stats[index])
                    for index in session.stages
                }
            )
        else:  # the statistics are of other stages
            self.history = [replace(record, stages={}) for record in self.history]

    def _count_from(self, trained: Tally) -> None:
        """Let the first rank of the last stage go on from what all have counted, as after a resume."""
        if last := self.session.last:
            counts = trained if self.session.is_leader(self.session.plan.stages - 1) else Tally()
            last.counts.trained.restore(counts, last.device)

    # The loop of fit

    def begin(
        self,
        listeners: Sequence[Listener],
        signals: Signals | None = None,
        look_every: int | None = None,
        max_unsynced_s: float = MAX_UNSYNCED_S,
    ) -> None:
        """Begin to train, on all ranks at once. `look_every`: see Pass."""
        self._windows = Windows(self.session, self._guard, signals, listeners, max_unsynced_s)
        self._listeners, self._look_every = listeners, look_every
        self.groups.gather("the start of the epochs", None)  # so that no rank's time is that of its start
        self._started = time.perf_counter() - self._elapsed_s

    def remaining(self) -> Iterator[int]:
        """Yield each epoch that is left, from 0, until the run is stopped or the program has enough."""
        while not (self.stopped_by or self._enough) and self.position.epoch < self.about.epochs:
            yield self.position.epoch

    def windows(self, epoch: int) -> Iterator[WindowResult]:
        """Train the rest of an epoch, then evaluate; yield what ran, whenever the ranks have exchanged it."""
        self._trained_at = time.perf_counter()
        self._began = self._trained_at - self._train_s
        yield from self._windows.run(self._training(epoch))
        if self.about.evaluates:
            yield from self._windows.run(self._evaluation(epoch))

    def on_windows(self, done: WindowResult) -> None:
        """Count windows that ran, and let the listeners know; stop where a signal has asked for it."""
        self._count(done)
        for listener in self._listeners:
            listener.after_windows(done)
        if done.request in STOPS:
            self.stopped_by = done.request

    def on_epoch(self) -> None:
        """Record an epoch, and let the listeners know."""
        ranks = self._record_epoch()
        cut = self.about.batches_of(self.position.epoch + 1) < self.about.batches
        if not cut:
            self._leave_epoch()
        for listener in self._listeners:
            listener.after_epoch(ranks)
        if cut:  # a longer training goes on with it
            self._leave_epoch()
        # So that no rank's next epoch has the time in which another still records this one.
        self.groups.gather("the end of the epoch's records", None)

    def finish(self) -> None:
        """Let this epoch be the last one."""
        self._enough = True

    def close(self) -> bool:
        """End with the last epoch, or amid one; return whether all epochs are done."""
        for listener in self._listeners:
            listener.close()
        return not self.stopped_by

    # The current epoch

    def _count(self, done: WindowResult) -> None:
        """Count windows that have run."""
        for window in done.windows:
            self._peak_bytes = window.peak_bytes or self._peak_bytes
        if done.of.trains:
            self._losses += done.losses
            self._rates += done.rates
            at, batches = self.position, len(done.sizes)
            self.position = Position(at.epoch, at.batch + batches, at.update + batches)
            self._trained_at = time.perf_counter()

    def progress(self) -> tuple[Progress, dict[str, Tensor]]:
        """Return what a checkpoint keeps of the run, alike on all ranks, and tensors of rank 0."""
        last = self.session.last
        trained = last.peek_trained() if last else Tally()
        record = RankRecord(self.session.engine.stats, trained, self._losses)
        ranks = RankRecords.gather(self.groups, "what is known of the epoch", record, self._last_ranks)
        self._count_from(ranks.trained)
        progress = Progress(
            self.history,
            trained=ranks.trained,
            train_s=self._trained_at - self._began,
            elapsed_s=time.perf_counter() - self._started,
            stages=ranks.stages,
            losses=ranks.losses,
        )
        rates = {RATES: torch.tensor(self._rates, dtype=torch.float64)}
        return progress, {} if self.groups.world.rank else rates

    def _record_epoch(self) -> RankRecords:
        """Add the record of the epoch to the history; return what it was made of, from all ranks.

        Raises TrainingStopped for an evaluation that is not a number.
        """
        about, last, position = self.about, self.session.last, self.position
        train_s, eval_s = self._trained_at - self._began, time.perf_counter() - self._trained_at
        trained, evaluated = (last.peek_trained(), last.take_evaluated()) if last else (Tally(), Tally())
        stats, peak_bytes, self._peak_bytes = self.session.engine.stats, self._peak_bytes, None
        own_record = RankRecord(stats, trained, self._losses, evaluated, train_s, eval_s, peak_bytes)
        what = f"the figures of epoch {position.epoch + 1}"
        ranks = RankRecords.gather(self.groups, what, own_record, self._last_ranks)
        trained, evaluated = ranks.trained, ranks.evaluated
        if about.evaluates and about.settings.on_nan == "stop" and math.isnan(evaluated.mean_loss):
            raise TrainingStopped(
                f"the loss of the evaluation after update {position.update} is nan: the weights "
                f"are not finite, or the model's outputs for the test samples; lower lr, or see on_nan"
            )
        first = position.update - len(ranks.losses) + 1
        losses = by_update(ranks.losses, first, about.settings.log_every)
        rates = dict(enumerate(self._rates, first))
        record = EpochRecord(
            epoch=position.epoch + 1,
            trained=self._values(trained),
            evaluated=self._values(evaluated) if about.evaluates else {},
            score=about.task.score(evaluated) if about.evaluates else math.nan,
            samples=trained.samples,
            losses=losses,
            rates={update: rates[update] for update in losses},
            lr=[about.lr, *self._rates][-1],
            train_s=max(rank.train_s for rank in ranks.all),
            eval_s=max(rank.eval_s for rank in ranks.all),
            stages=ranks.stages,
            elapsed_s=time.perf_counter() - self._started,
            ended=time.time(),
        )
        self.history = [*self.history, record]
        return ranks

    def _values(self, tally: Tally) -> dict[str, float]:
        return {"loss": tally.mean_loss, **self.about.task.values(tally)}

    def _leave_epoch(self) -> None:
        """Go to the begin of the next epoch, with numbers of its own."""
        self.position = Position(self.position.epoch + 1, 0, self.position.update)
        self._losses, self._rates, self._train_s = [], [], 0.0
        self._began = self._trained_at
        self.session.engine.reset_stats()
        if self.session.last:
            self.session.last.take_trained()

    def _training(self, epoch: int) -> Pass:
        about, begun, last = self.about, self.position.batch, self.history[-1:]
        total = about.batches_of(epoch + 1)
        return Pass(
            kind="training",
            what=f"the training (epoch {epoch + 1})",
            batches=self.data.train(epoch, begun),
            window=about.settings.window,
            begun=begun,
            most=total - begun if total < about.batches else None,
            shown=total - begun,
            updates=about.updates,
            reads_ahead=True,
            look_every=self._look_every,
            title=f"epoch {epoch + 1}",
            epoch=epoch,
            sample_s=last[0].train_s / max(1, last[0].samples) if last else None,
        )

    def _evaluation(self, epoch: int) -> Pass:
        batches, last = self.data.evaluate(), self.history[-1:]
        return Pass(
            kind="evaluation",
            what=f"evaluation {epoch + 1}",
            batches=batches,
            window=batches.evaluated_at_once,
            reads_ahead=True,
            look_every=1,
            title=f"evaluation {epoch + 1}",
            epoch=epoch,
            sample_s=last[0].eval_s / max(1, self.about.data.test) if last else None,
        )

    # What a program gets

    def metrics(self) -> dict[str, float]:
        """Return what the last epoch's training has counted, as Pipeline.metrics does; {} before it."""
        if not self.history:
            return {}
        last = self.history[-1]
        return last.trained | {"learning_rate": last.lr, "samples_per_s": last.samples_per_s}

    def rows(self) -> list[dict[str, float]]:
        """Return a row for each epoch: what fit promises of it."""
        return [record.as_told() for record in self.history]
