"""One rank's stages and their engine, which run the windows of the command line and of Pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from pipetrain.data.feed import WindowFeed
from pipetrain.errors import ActionFailed
from pipetrain.network.boundary import Value, cast_floats
from pipetrain.network.network import Network
from pipetrain.plan.blueprint import Plan, outputs_of
from pipetrain.plan.fitting import explained, is_out_of_memory
from pipetrain.rate import Rate
from pipetrain.runtime.assembly import make_engine, make_stages
from pipetrain.runtime.coded import Feedback
from pipetrain.runtime.engine import Ends, Observer
from pipetrain.runtime.engine import Progress as Tick
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.order import Order
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.tasks import ModelLoss, Task, prove_batch
from pipetrain.tasks.trial import ModelTrial


class Runner:
    """Trains and evaluates windows with this rank's stages of a whole `model`."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module | Network,
        task: Task,
        optimizer: OptimizerFactory,
        rate: Rate,
        mesh: Mesh,
    ) -> None:
        self.plan = plan
        self._task = task
        self._mesh = mesh
        self._batches = 0  # trained
        self.feedback = Feedback()
        self.stages = make_stages(plan, model, task, optimizer, rate, mesh)
        self.engine = make_engine(plan, self.stages, mesh, feedback=self.feedback)
        self.last = self.stages.get(plan.stages - 1)
        """The last stage, which counts; None if another rank holds it."""
        self._trial: ModelTrial | None = None

    def settle(self) -> None:
        """Find what the labels of a model count for that computes its loss. Raises ConfigError."""
        if self.last is not None and isinstance(self._task, ModelLoss):
            self._trial = ModelTrial(self._task, self.plan, self.last.module, self._mesh.device)
            self._trial.settle()

    def train(
        self,
        order: Order,
        sizes: Sequence[Sequence[int]],
        inputs: Iterator[Value] | None,
        targets: Iterator[Value] | None,
        tick: Tick = lambda stage: None,
        observe: Observer | None = None,
        ends: Ends | None = None,
    ) -> list[float]:
        """Train the batches of one window; return the mean loss of each update on the last stage's rank.

        `sizes`: the samples of each microbatch of each batch; `inputs`, `targets`: those of each microbatch,
        on the ranks of the first and the last stage. The others return nothing. See Engine.train for the
        rest.
        """
        feed = self._feed(sizes, inputs, targets, self._prove_batch)
        with self._explaining():
            self.engine.train(order, feed, self.plan.settings.microbatches, tick, observe, ends)
        return [] if self.last is None else self.last.take_losses()

    def evaluate(
        self,
        order: Order,
        sizes: Sequence[int],
        inputs: Iterator[Value] | None,
        targets: Iterator[Value] | None,
        tick: Tick = lambda stage: None,
        ends: Ends | None = None,
    ) -> None:
        """Predict microbatches of these `sizes` with the newest weights; the last stage counts."""
        with self._explaining():
            self.engine.evaluate(order, self._feed([[size] for size in sizes], inputs, targets), tick, ends)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Say of an action that ran out of memory what the plan predicted."""
        try:
            yield
        except ActionFailed as error:
            if not is_out_of_memory(error.__cause__):
                raise
            rank, device = self._mesh.world.rank, self._mesh.device
            raise explained(error, self.plan, rank, device) from error.__cause__

    def _prove_batch(self, targets: Value) -> None:
        """Try a user's task with the targets of batches 2, 4, 8, ..., as it was with the first ones."""
        self._batches += 1
        alone = self.plan.settings.microbatches == 1  # nothing is added up
        if alone or not self._task.is_own or self._batches.bit_count() > 1:
            return
        targets = cast_floats(targets, self.plan.settings.data_dtype)
        if self._trial is not None:
            self._trial.prove(targets)
        elif self._batches > 1:
            prove_batch(self._task, outputs_of(self.plan), targets, self._mesh.device)

    def _feed(
        self,
        sizes: Sequence[Sequence[int]],
        inputs: Iterator[Value] | None,
        targets: Iterator[Value] | None,
        prove: Callable[[Value], None] = lambda targets: None,
    ) -> WindowFeed:
        dtype = self.plan.settings.data_dtype
        return WindowFeed(sizes, inputs, targets, self._task.weight, self._mesh.device, dtype, prove)
