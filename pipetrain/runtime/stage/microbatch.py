"""Open microbatches of a stage, the batch until its update, and the observers of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from pipetrain.model.network import Tensors
from pipetrain.model.specs import as_tuple
from pipetrain.runtime.microbatch_feed import Target
from pipetrain.runtime.stage.objective import Counted
from pipetrain.runtime.stage.recompute import Recompute
from pipetrain.runtime.stage.split_backward import Deferred
from pipetrain.schedule.actions import Read


class Saving(NamedTuple):
    """What a forward saves for its backward: for two halves, or for a recompute."""

    split: bool = False
    recomputed: bool = False


WHOLE = Saving()


@dataclass(slots=True)
class Microbatch:
    """An open microbatch. Before its recompute there are no outputs, and after I no inputs either."""

    mb: int
    inputs: Tensors
    read: Read
    saving: Saving
    target: Target | None = None
    outputs: Tensors = ()
    grads: Tensors = ()  # of the outputs, if W is the whole backward
    deferred: Deferred | None = None  # the weight gradients to be made in W
    recompute: Recompute | None = None  # between the forward and its recompute
    counted: Counted | None = None  # at the last stage

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that it holds itself, besides what autograd saves."""
        yield from (*self.inputs, *self.outputs, *self.grads)
        if self.target is not None:
            yield from as_tuple(self.target.value)
        if self.recompute is not None:
            yield from self.recompute.tensors
        if self.deferred is not None:
            yield from self.deferred.tensors


@dataclass(slots=True)
class Batch:
    """The microbatches whose gradients make one update."""

    mbs: list[int] = field(default_factory=list)
    counted: list[Counted] = field(default_factory=list)  # at the last stage
    losses: Tensor | None = None  # [n], at the last stage: each times its share of the batch's loss
    skipped: Tensor | None = None  # a scalar, 1 if the update is skipped; None: no update ever is


class Observer:
    """A check or a statistic of a stage. It may raise TrainingStopped."""

    def around_forward(self, microbatch: Microbatch) -> AbstractContextManager[object] | None:
        """Return a context for the layers' forward of a microbatch, or None; a recompute has none."""

    def needs_outputs(self) -> bool:
        """Return whether it needs the layers' outputs of a microbatch that begins now."""
        return False

    def after_forward(self, microbatch: Microbatch, outputs: Tensors, result: Tensors) -> None:
        """Handle the outputs, or the loss, and the `result` of the layers."""

    def after_backward(self, microbatch: Microbatch, back: Tensors) -> None:
        """Handle the gradients of the inputs from a backward or I."""

    def after_reduce(self, batch: Batch) -> None:
        """Handle a batch's gradient and losses; setting `batch.skipped` skips the update."""

    def on_sums(self, batch: Batch, numbers: Tensor) -> None:
        """Handle numbers of other stages on which the update depends."""

    def partial_sums(self, batch: Batch, replica: int, replicas: int) -> Tensor | None:
        """Return numbers of a batch to be summed with those of the stage's other replicas."""
        return None

    def on_reduced(self, batch: Batch, numbers: Tensor) -> None:
        """Handle the sum over the replicas."""

    def before_step(self, batch: Batch) -> None:
        """Prepare for a batch's update, which may be skipped."""

    def check(self, wait: bool) -> None:
        """Raise an error that is known by now or, with `wait`, after all work of the device."""


@contextmanager
def around(observers: Sequence[Observer], microbatch: Microbatch) -> Iterator[None]:
    """Let a forward run in the contexts of its observers."""
    with ExitStack() as contexts:
        for observer in observers:
            if (context := observer.around_forward(microbatch)) is not None:
                contexts.enter_context(context)
        yield
