"""The life of a run on one rank: epochs of windows, an evaluation after each.

Evaluation happens between windows, when the pipeline is drained, so what is evaluated has a name: the weights
after the last update.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain.boundary import named_layers
from pipetrain.data import Split, Transform, inputs
from pipetrain.runtime.clock import Clock
from pipetrain.runtime.engine import Engine, Limits, StageRecord
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.stage import Stage
from pipetrain.runtime.tally import Tally
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
        self.stages = {
            stage: self._make_stage(stage, model)
            for stage, rank in enumerate(run.plan.placement)
            if rank == mesh.world.rank
        }
        # For dropout, on each rank its own; after the model, whose weights take the seed as it is.
        torch.manual_seed((run.settings.seed + 1_000_003 * (mesh.world.rank + 1)) % 2**63)
        self._engine = Engine(
            self.stages,
            mesh.channel(run.settings.buffer_size, run.plan.numerics.channels_last),
            run.plan.placement,
            run.plan.boundaries,
            run.plan.evaluated,
            {stage: Limits(*run.plan.peaks(stage)[:2]) for stage in self.stages},
            Clock(mesh.device),
        )

    def _make_stage(self, index: int, model: nn.Sequential) -> Stage:
        run = self._run
        layers = named_layers(model)[run.plan.slice(index)]
        last = index == run.plan.stages - 1
        smoothing = run.settings.label_smoothing
        return Stage(
            index,
            nn.Sequential(OrderedDict(layers)).to(self._mesh.device),
            run.optimizer,
            self._rate,
            loss=partial(functional.cross_entropy, label_smoothing=smoothing) if last else None,
            single_input=run.plan.boundaries[run.settings.batch_size // run.settings.microbatches][
                index
            ].single,
            copy_input=run.plan.copies_input(index),
            numerics=run.plan.numerics,
            compile=run.settings.compile,
        )

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
