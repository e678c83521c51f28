"""The training loop of one rank: epochs of windows, with an evaluation after each epoch.

Evaluation happens between windows, when the pipeline is drained, with the weights after the last update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipetrain.checkpoint.asking import Asked
from pipetrain.checkpoint.files import Manifest, Position, Tensors
from pipetrain.checkpoint.saver import Keeper, is_best
from pipetrain.checkpoint.state import load, saved_residuals, set_random_state
from pipetrain.data import Draw, loaded
from pipetrain.errors import TrainingStopped
from pipetrain.network.values import Value
from pipetrain.plan.program import window_lengths
from pipetrain.records.figures import EpochFigures, Loss, Progress, Stats, by_update, read_progress
from pipetrain.records.tracer import Tracer
from pipetrain.runtime.batches import counting
from pipetrain.runtime.held import Measured, Meter
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.order import Ends, evaluation_of, order_of
from pipetrain.runtime.session import Session, slots
from pipetrain.runtime.times import Observe
from pipetrain.schedule.actions import Action, Op, Program, parse_action
from pipetrain.schedule.check import check
from pipetrain.schedule.timeline import Row
from pipetrain.tally import Tally
from pipetrain.training.run import Run
from pipetrain.untrusted import DamagedCheckpoint, read_as

if TYPE_CHECKING:  # the recorder imports Matplotlib and TensorBoard, which training does not need
    from pipetrain.records.recorder import Recorder


Values = Iterator[Value] | None
Ran = list[list[Action]]  # the actions of a rank in each window of an epoch, kept if a policy decided them


@dataclass(frozen=True, slots=True)
class _Counted:
    """What the last stage's rank has counted in an epoch so far. `losses`: one an update."""

    trained: Tally
    losses: list[Loss]
    evaluated: Tally | None = None


@dataclass(frozen=True, slots=True)
class _RankProgress:
    """One rank's part of an epoch that is not over."""

    counted: _Counted | None
    stages: Stats


@dataclass(frozen=True, slots=True)
class _RankFigures:
    """One rank's figures of an epoch. Times in seconds. `ran`: the actions of each window, as text."""

    counted: _Counted | None
    train_s: float
    eval_s: float
    stages: Stats
    ran: list[list[str]]
    held: Measured | None  # of the window whose memory was measured, if it was of this epoch


class Trainer:
    """Trains one rank's stages; rank 0 has the recorder. A `keeper` saves, and stops when it was asked to."""

    def __init__(
        self, run: Run, mesh: Mesh, recorder: Recorder | None = None, keeper: Keeper | None = None
    ) -> None:
        self._run = run
        self._mesh = mesh
        self._recorder = recorder
        self._keeper = keeper
        self._rate = run.settings.rate(run.updates)
        # The whole model is built, as its initial weights depend on the order of layers, and then dropped.
        self.runner = Session(run.plan, run.take_network(), run.task, run.optimizer, self._rate, mesh)
        self.runner.settle()
        self.stages, self._engine = self.runner.stages, self.runner.engine
        # A seed per rank, for dropout; set after the model is built, whose weights use the seed itself.
        torch.manual_seed((run.settings.seed + 1_000_003 * (mesh.world.rank + 1)) % 2**63)
        self._position = Position()
        self._progress = Progress()  # as restored; only its history is extended
        self._elapsed_before = 0.0
        self._started = time.perf_counter()
        self._ran: Ran = []
        self._losses: list[float] = []  # of the epoch's updates so far, on the last stage's rank
        self._metered = False
        self._held: Measured | None = None

    def restore(self, folder: Path, manifest: Manifest) -> None:
        """Resume from a verified checkpoint. Raises DamagedCheckpoint.

        Random states belong to ranks, statistics to stages and residuals to edges: they are restored only for
        the same pipeline.
        """
        self._progress = read_progress(manifest)
        self._position = manifest.position
        self._prove_position(folder)
        tensors = Tensors(folder, list(manifest.parts))
        for stage in self.stages.values():
            load(stage, tensors, manifest.position.update, self._run.optimizer)
        if self._keeper:
            self._keeper.go_on(folder, self._position, self._progress)
        self._elapsed_before = self._progress.elapsed_s
        last = self.stages.get(self._run.plan.stages - 1)
        if last is not None:
            last.restore_tally(self._progress.trained)
            self._losses = list(self._progress.losses)
        if manifest.pipeline == self._run.plan.pipeline:
            self._engine.stats = {index: self._progress.stages[index] for index in self.stages}
            rank, device = self._mesh.world.rank, self._mesh.device
            set_random_state(tensors, rank, device)
            self.runner.feedback.residuals = saved_residuals(tensors, slots(self._run.plan, rank), device)
        else:  # the statistics are of other stages
            history = [replace(figures, stages={}) for figures in self._progress.history]
            self._progress = replace(self._progress, history=history, stages={})

    def _prove_position(self, folder: Path) -> None:
        epoch, batch, update = astuple(self._position)
        batches = len(self._run.sampler.batch_sizes)
        if update > epoch * batches + batch:  # fewer where batches were skipped
            raise DamagedCheckpoint(
                f"{folder} is of update {update}, and {epoch} epochs of {batches} updates and {batch} more "
                f"are others"
            )

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return self._position.update

    def fit(self) -> bool:
        """Train and evaluate all epochs; return False if stopped. Raises ChannelError and TrainingStopped."""
        self._started = time.perf_counter()
        settings = self._run.settings
        tracer = Tracer(self._run, self._mesh, self._position) if settings.trace else None
        if self._recorder:
            self._recorder.begin(self._progress.history)
        for epoch in range(self._position.epoch, settings.epochs):
            asked = self._epoch(epoch, tracer)
            if asked == "stop" and self._position.epoch < settings.epochs:
                break
            if tracer and tracer.over:
                self._trace(tracer)
                tracer = None
        if tracer:
            self._trace(tracer)
        if self._keeper:
            self._keeper.close()
        return self._position.epoch == settings.epochs

    def _trace(self, tracer: Tracer) -> None:
        trace = tracer.collect()
        if self._recorder and trace.windows:
            self._recorder.trace(trace)

    def _epoch(self, epoch: int, tracer: Tracer | None) -> Asked:
        """Train the rest of an epoch and evaluate; return a signal's request."""
        start = time.perf_counter() - self._progress.train_s
        asked = self._train(epoch, tracer, start)
        if asked == "stop":
            return asked
        trained = time.perf_counter()
        if not self.evaluate(epoch):
            self._save(trained - start)
            return "stop"
        self._report(epoch, trained - start, time.perf_counter() - trained)
        self._progress = Progress(self._progress.history)
        self._position = Position(epoch + 1, 0, self._position.update)
        over, best = epoch + 1 == self._run.settings.epochs, is_best(self._position, self._progress)
        if self._keeper and (self._keeper.due(self._position, over, best) or asked):
            self._save(0.0)
        return asked

    def _save(self, train_s: float) -> None:
        """Start to save a checkpoint; on all ranks at the same window, with the pipeline drained."""
        assert self._keeper is not None
        last = self.stages.get(self._run.plan.stages - 1)
        counted = None if last is None else _Counted(last.trained_so_far, self._losses)
        ranks = self._gather("what is known of the epoch", _RankProgress(counted, self._engine.stats))
        known = next(one.counted for one in ranks if one.counted is not None)
        progress = Progress(
            history=self._progress.history,
            trained=known.trained,
            train_s=train_s,
            elapsed_s=self._elapsed(),
            stages={stage: stats for one in ranks for stage, stats in one.stages.items()},
            losses=known.losses,
        )
        residuals, pipeline = self.runner.feedback.residuals, self._run.plan.pipeline
        self._keeper.save(self.stages, self._mesh, self._position, pipeline, progress, residuals)

    def _gather(self, what: str, mine: Any) -> list[Any]:
        """Return each rank's figures, of the type of `mine`. Raises ChannelError."""
        told = self._mesh.gather(what, asdict(mine))
        return [read_as(type(mine), one, f"{what} of rank {rank}") for rank, one in enumerate(told)]

    def _elapsed(self) -> float:
        """Return the seconds of the run, without pauses between a stop and a resume."""
        return self._elapsed_before + time.perf_counter() - self._started

    def evaluate(self, epoch: int) -> bool:
        """Predict every test sample, which updates the last stage's tally; return False if stopped early."""
        run = self._run
        ids = list(torch.split(torch.arange(run.facts.test), run.evaluation_sizes))
        tick = partial(self._tick, f"evaluation {epoch + 1}", len(ids))
        eval_s = [figures.eval_s / len(ids) for figures in self._progress.history[-1:]]
        order = evaluation_of(run.plan, len(ids), self._mesh.world.rank, self._ends(len(ids), *eval_s))
        self.runner.evaluate(order, run.evaluation_sizes, *self._read("test", ids, None), tick)
        return order.batches == len(ids)

    def _ends(self, batches: int, batch_s: float | None = None) -> Ends | None:
        """Return the callback that may end a window early; `batch_s`: seconds per batch in the last epoch."""
        if self._keeper is None:
            return None
        self._keeper.asking.begin_window(batches, batch_s)
        return self._keeper.asking.ends_window

    def _train(self, epoch: int, tracer: Tracer | None, began: float) -> Asked:
        run, start = self._run, self._position.batch
        samples = run.data.train if run.data else None
        draw, source = Draw(run.settings.seed, epoch), run.plan.placement[-1]
        batches = counting(run.sampler.epoch(epoch), samples, draw, run.task, self._mesh, source)
        ids = [ids for batch in batches[start:] for ids in batch]
        inputs, targets = self._read("train", ids, draw)
        tick = partial(self._tick, f"epoch {epoch + 1}", len(batches) - start)
        batch_s = [figures.train_s / len(batches) for figures in self._progress.history[-1:]]
        asked: Asked = ""
        for length in window_lengths(len(batches), run.settings.window, start):
            chosen = batches[start : start + length]
            only = epoch + 1 == run.settings.epochs and start + length == len(batches)
            meter = self._engine.meter = self._meter(only)
            self.runner.prove(length)
            order = order_of(run.plan, length, self._mesh.world.rank, self._ends(length, *batch_s))
            self._losses += self.runner.train(
                order,
                [[len(ids) for ids in batch] for batch in chosen],
                inputs,
                targets,
                tick,
                self._observer(tracer.observer(epoch, chosen) if tracer else None),
            )
            if meter:
                self._held, self._engine.meter = meter.close(), None
            start += order.batches
            self._position = Position(epoch, start, self.updates + order.batches)
            if self._keeper:
                asked = self._keeper.asking.after_window()
                between = start < len(batches) or asked == "stop"
                if between and (self._keeper.due(self._position) or asked):
                    self._save(time.perf_counter() - began)
                if asked == "stop":
                    break
        return asked

    def _meter(self, last: bool) -> Meter | None:
        """Return what measures the memory of the next window: once, and if it can, after an update.

        Then the optimizer has its state. `last`: there is no window after it. CUDA graphs do not tell.
        """
        if self._metered or self._run.settings.cuda_graphs or not (self._position.update or last):
            return None
        self._metered = True
        return Meter(self.stages, self._mesh.device)

    def _observer(self, traced: Observe | None) -> Observe | None:
        """Return what looks at a window, for which the host waits for the device; None if nothing does."""
        return partial(self._observe, traced) if traced or self._run.plan.policy else None

    def _observe(self, traced: Observe | None, row: Row) -> None:
        if traced:
            traced(row)
        if self._run.plan.policy:
            self._ran.append(row.actions)

    def _prove(self, epoch: int, programs: list[Program]) -> None:
        """Check the programs that a policy has decided on, and record them. Raises ScheduleError."""
        for program in programs:
            batches = sum(action.op is Op.STEP for action in program[0])
            check(program, batches, self._run.settings.microbatches, self._run.plan.cut.edges)
        if programs and self._recorder:
            self._recorder.programs(epoch + 1, programs)

    def _tick(self, what: str, total: int, stage: int) -> None:
        if self._keeper:
            self._keeper.asking.updated()
        if self._recorder and stage == min(self.stages):
            self._recorder.tick(what, total)

    def _read(self, split: str, ids: Sequence[Tensor], draw: Draw | None) -> tuple[Values, Values]:
        """Return the inputs and the targets of microbatches, each if this rank needs them."""
        settings, samples = self._run.settings, getattr(self._run.data, split, None)
        inputs = targets = None
        if 0 in self.stages:
            assert samples is not None
            inputs = loaded(partial(samples.inputs, draw=draw), ids, settings.workers, settings.timeout)
        if self._run.plan.stages - 1 in self.stages:
            assert samples is not None
            targets = loaded(partial(samples.targets, draw=draw), ids)
        return inputs, targets

    def _report(self, epoch: int, train_s: float, eval_s: float) -> None:
        """Gather an epoch's figures from all ranks, and record them."""
        counted = None
        last = self.stages.get(self._run.plan.stages - 1)
        if last is not None:
            tallies = last.take_trained(), last.take_evaluated()
            counted, self._losses = _Counted(tallies[0], self._losses, tallies[1]), []
        ran = [list(map(str, actions)) for actions in self._ran]
        mine = _RankFigures(counted, train_s, eval_s, self._engine.take_stats(), ran, self._held)
        self._ran, self._held = [], None
        ranks: list[_RankFigures] = self._gather(f"the figures of epoch {epoch + 1}", mine)
        if self._mesh.world.rank == 0:
            windows = zip(*(figures.ran for figures in ranks), strict=True)
            self._prove(epoch, [[list(map(parse_action, actions)) for actions in ran] for ran in windows])
        known = next(figures.counted for figures in ranks if figures.counted is not None)
        trained, evaluated, losses = known.trained, known.evaluated, known.losses
        assert evaluated is not None
        if self._run.settings.on_nan == "stop" and math.isnan(evaluated.mean_loss):
            raise TrainingStopped(
                f"the loss of the evaluation after update {self._position.update} is nan: the weights "
                f"are not finite, or the model's outputs for the test samples; lower lr, or see on_nan"
            )
        every, first = self._run.settings.log_every, self._position.update - len(losses) + 1
        means, peak = by_update(losses, first, every), self._run.settings.lr
        epoch_figures = EpochFigures(
            epoch=epoch + 1,
            trained=trained,
            evaluated=evaluated,
            score=self._run.task.score(evaluated),
            losses=means,
            rates={update: peak * self._rate(update - 1) for update in means},
            lr=peak * self._rate(self.updates - 1),
            train_s=max(figures.train_s for figures in ranks),
            eval_s=max(figures.eval_s for figures in ranks),
            stages={stage: stats for figures in ranks for stage, stats in figures.stages.items()},
            elapsed_s=self._elapsed(),
            ended=time.time(),
        )
        self._progress.history.append(epoch_figures)
        if self._recorder:
            held = [figures.held for figures in ranks if figures.held is not None]
            self._recorder.epoch(epoch_figures, held)
