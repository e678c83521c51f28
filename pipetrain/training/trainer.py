"""The life of a run on one rank: epochs of windows, an evaluation after each.

Evaluation happens between windows, when the pipeline is drained, so what is evaluated has a name: the weights
after the last update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipetrain.data import Split, Transform, inputs
from pipetrain.runtime.engine import StageRecord
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.tally import Tally
from pipetrain.training.assembly import make_engine, make_stages
from pipetrain.training.feed import WindowFeed
from pipetrain.training.figures import EpochFigures
from pipetrain.training.run import Run
from pipetrain.training.tracer import Tracer

if TYPE_CHECKING:  # the recorder draws, and training alone needs no library for that
    from pipetrain.training.recorder import Recorder


@dataclass(frozen=True, slots=True)
class _RankFigures:
    """What one rank knows of an epoch. Times in seconds."""

    tallies: tuple[Tally, Tally] | None  # of training and evaluation, where the last stage is
    train_s: float
    eval_s: float
    before: dict[int, StageRecord]  # what the records said before the epoch
    records: dict[int, StageRecord]


class Trainer:
    """Trains one rank's stages. Rank 0 has a recorder; the others send it what they know, once an epoch."""

    def __init__(self, run: Run, mesh: Mesh, recorder: Recorder | None = None) -> None:
        self._run = run
        self._mesh = mesh
        self._recorder = recorder
        self._rate = run.settings.rate(run.updates)
        model = run.build_model()  # whole, for the weights' sake; what is not ours is forgotten again
        self.stages = make_stages(run.plan, model, run.optimizer, self._rate, mesh)
        # For dropout, on each rank its own; after the model, whose weights take the seed as it is.
        torch.manual_seed((run.settings.seed + 1_000_003 * (mesh.world.rank + 1)) % 2**63)
        self._engine = make_engine(run.plan, self.stages, mesh)

    def fit(self) -> None:
        """Train for all epochs, evaluating after each. Raises ChannelError and TrainingStopped."""
        tracer = Tracer(self._run, self._mesh) if self._run.settings.trace else None
        if self._recorder:
            self._recorder.begin()
        for epoch in range(self._run.settings.epochs):
            before = {stage: replace(record) for stage, record in self._engine.records.items()}
            start = time.perf_counter()
            self._train(epoch, tracer)
            trained = time.perf_counter()
            self.evaluate(epoch)
            self._report(epoch, trained - start, time.perf_counter() - trained, before)
            if tracer and tracer.over:
                trace, tracer = tracer.collect(), None
                if self._recorder:
                    self._recorder.trace(trace)

    def evaluate(self, epoch: int) -> None:
        """Predict every test sample with the newest weights; the last stage's tally has the outcome."""
        run = self._run
        ids = list(torch.split(torch.arange(len(run.data.test)), run.evaluation_sizes))
        transform = replace(run.transform, augment=None)
        images = self._images(run.data.test, ids, transform)
        feed = WindowFeed([ids], run.data.test.labels, images, self._mesh.device)
        tick = partial(self._tick, f"evaluation {epoch + 1}", len(ids))
        self._engine.evaluate(run.plan.evaluation[self._mesh.world.rank], feed, tick)

    def _train(self, epoch: int, tracer: Tracer | None) -> None:
        run = self._run
        batches = run.sampler.epoch(epoch)
        ids = [ids for batch in batches for ids in batch]
        images = self._images(run.data.train, ids, replace(run.transform, epoch=epoch))
        window = run.settings.window or len(batches)
        for start in range(0, len(batches), window):
            chosen = batches[start : start + window]
            self._engine.train(
                run.plan.windows[len(chosen)].program[self._mesh.world.rank],
                WindowFeed(chosen, run.data.train.labels, images, self._mesh.device),
                run.settings.microbatches,
                partial(self._tick, f"epoch {epoch + 1}", len(batches)),
                tracer.observer(epoch, chosen) if tracer else None,
            )

    def _tick(self, what: str, total: int, stage: int) -> None:
        if self._recorder and stage == min(self.stages):
            self._recorder.tick(what, total)

    def _images(self, split: Split, ids: Sequence[Tensor], transform: Transform) -> Iterator[Tensor] | None:
        if 0 not in self.stages:
            return None
        return inputs(split, ids, transform, self._run.settings.workers, self._run.settings.timeout)

    def _report(self, epoch: int, train_s: float, eval_s: float, before: dict[int, StageRecord]) -> None:
        """Bring an epoch's figures together on rank 0, whichever rank knows them."""
        tallies = None
        last = self.stages.get(self._run.plan.stages - 1)
        if last is not None:
            tallies = last.take_tallies()
        mine = _RankFigures(tallies, train_s, eval_s, before, self._engine.records)
        gathered = self._mesh.gather(f"the figures of epoch {epoch + 1}", mine)
        if self._recorder is None:
            return
        ranks = [figures for figures in gathered if isinstance(figures, _RankFigures)]
        trained, evaluated = next(figures.tallies for figures in ranks if figures.tallies is not None)
        self._recorder.epoch(
            EpochFigures(
                epoch=epoch + 1,
                trained=trained,
                evaluated=evaluated,
                lr=self._rate((epoch + 1) * len(self._run.sampler.batch_sizes) - 1),
                train_s=max(figures.train_s for figures in ranks),
                eval_s=max(figures.eval_s for figures in ranks),
                busy_s={
                    stage: record.busy_s - figures.before[stage].busy_s
                    for figures in ranks
                    for stage, record in figures.records.items()
                },
                wait_s={
                    stage: record.wait_s - figures.before[stage].wait_s
                    for figures in ranks
                    for stage, record in figures.records.items()
                },
                records={stage: record for figures in ranks for stage, record in figures.records.items()},
            )
        )
