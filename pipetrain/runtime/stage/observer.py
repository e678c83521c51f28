"""What the checks and statistics of a stage are called with: microbatches, and batches until their update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor

from pipetrain.model.network import Tensors
from pipetrain.runtime.stage.microbatch import Batch, Microbatch


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
