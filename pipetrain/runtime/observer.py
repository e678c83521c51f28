"""What looks at the passes of a stage: checks and statistics, none of which the stage knows by name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from pipetrain.runtime.microbatch import Batch, Microbatch, Tensors


class Observer:
    """Sees what a stage does, and may leave out an update; by default it does nothing."""

    def around_forward(self, microbatch: Microbatch) -> AbstractContextManager[object]:
        """Return a context for the layers' forward of a microbatch, not for one that is run again."""
        return nullcontext()

    def after_forward(self, microbatch: Microbatch, outputs: Tensors) -> None:
        """Look at the outputs, or the loss. Raises TrainingStopped."""

    def after_backward(self, microbatch: Microbatch, grads: Tensors, back: Tensors) -> None:
        """Look at a backward or I, from the gradients of the outputs to those of the inputs."""

    def after_reduce(self, batch: Batch) -> None:
        """Look at a batch's gradient and losses; `batch.skipped` leaves the update out."""

    def hear(self, batch: Batch, numbers: Tensor) -> None:
        """Look at numbers of other stages on which the update depends."""

    def before_step(self, batch: Batch) -> None:
        """Prepare for a batch's update, or for that it is left out."""

    def settle(self, wait: bool) -> None:
        """Raise what is known by now or, with `wait`, of all that the device was given."""
