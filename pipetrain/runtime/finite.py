"""Numbers that are not finite: they stop the training, or leave out the update.

In host memory each activation and gradient is looked at before it is sent on, and each loss and weight's
gradient before the update. On a GPU one reduction checks the gradient of a batch; its result is looked at
with the losses when they have come to the host, for which nothing waits within a window, unless updates are
left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipetrain.errors import TrainingStopped
from pipetrain.network.numerics import numbers_of
from pipetrain.network.values import differentiable
from pipetrain.runtime.buffers import Buffers, Copies
from pipetrain.runtime.microbatch import Batch, Microbatch, Observer, Tensors
from pipetrain.runtime.origin import DATA, NOTHING, origin_of_gradient, origin_of_loss, origin_of_outputs
from pipetrain.runtime.stage import Stage

LOWER = "try a lower optim.lr, or a warmup"
WAYS_OUT = {
    DATA: "look for NaN and infinite numbers there",
    NOTHING: "give weight=, a function of the targets that says what they count for",
}


def not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1 if a number of tensors on a GPU is not finite, else 0, as torch.amp.GradScaler finds it."""
    found = torch.zeros((), device=tensors[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), found, torch.ones_like(found))
    return found


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers of real, detached tensors are finite. On a GPU the host waits for them."""
    if tensors and tensors[0].is_cuda:
        return not not_finite(tensors).item()
    return all(map(_finite_in_host_memory, tensors))


def _finite_in_host_memory(tensor: Tensor) -> bool:
    """By NumPy, so there is no kernel, and 15 times as fast as torch.isfinite."""
    if tensor.dtype is torch.bfloat16:  # unknown to NumPy; infinities and NaN have all exponent bits set
        return not bool((tensor.view(torch.int16).numpy() & 0x7F80 == 0x7F80).any())
    return bool(np.isfinite(tensor.numpy()).all())


class StopOnNaN(Observer):
    """Stops the training at a number of a stage that is not finite, and names the layer where it began."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        # What numbers of an update are, the numbers on the host, and the torch.cuda.Event of their arrival.
        self._coming: deque[tuple[list[str], int, Tensor, Any]] = deque()

    def around_forward(self, microbatch: Microbatch) -> AbstractContextManager[object]:
        target = microbatch.target
        if target is not None and target.share and not target.weight and not self._stage.rehearses:
            raise TrainingStopped(
                f"in the batch of microbatch {microbatch.mb}, update {self._stage.weights.updates}, none of "
                f"the targets counts: leave it out of the data, or set on_nan=skip, which leaves out the "
                f"update"
            )
        return nullcontext()

    def after_forward(self, microbatch: Microbatch, outputs: Tensors) -> None:
        if self._stage.objective is not None:
            origin = partial(origin_of_loss, self._stage, microbatch, outputs[0])
            self._check(f"the loss of microbatch {microbatch.mb} is {{}}", outputs, origin)
            return
        made = tuple(t for t in outputs if t.requires_grad)  # not, for example, a mask of -inf
        origin = partial(origin_of_outputs, self._stage, microbatch)
        self._check(f"the activation of microbatch {microbatch.mb} is not finite", made, origin)

    def after_backward(self, microbatch: Microbatch, grads: Tensors, back: Tensors) -> None:
        origin = partial(origin_of_gradient, self._stage, microbatch, grads)
        self._check(f"the gradient of microbatch {microbatch.mb} is not finite", back, origin)

    def after_reduce(self, batch: Batch) -> None:
        gradients = {name: numbers_of(grad) for name, grad in self._stage.weights.gradients().items()}
        losses = [] if batch.losses is None else [batch.losses.detach()]
        what = [f"the loss of microbatch {mb} is {{}}" for mb in batch.mbs] if losses else []
        if any(grad.is_cuda for grad in gradients.values()):
            spoilt = not_finite([*gradients.values()]).atanh()  # of 1, infinite
            numbers = torch.cat([*losses, spoilt.reshape(1)])
            self._await([*what, "the gradient is not finite"], numbers)
            self.settle(wait=False)
            return
        values = [number for loss in losses for number in loss.tolist()]
        for name, grad in reversed(gradients.items()):  # a backward begins at the last one
            if not all_finite([grad]):
                what.append(f"the gradient of {name} is not finite")
                values.append(math.nan)
        self._judge(what, values, self._stage.weights.updates)

    def settle(self, wait: bool) -> None:
        while self._coming and (wait or self._coming[0][-1].query()):
            what, update, numbers, arrived = self._coming.popleft()
            arrived.synchronize()
            self._judge(what, numbers.tolist(), update)

    def _await(self, what: list[str], numbers: Tensor) -> None:
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._coming.append((what, self._stage.weights.updates, host, arrived))

    def _check(self, what: str, tensors: Tensors, origin: Callable[[], str]) -> None:
        """Stop the training if tensors in host memory are not finite; `origin` then finds the layer.

        On a GPU each check would be kernels, and the numbers would come when the weights have changed.
        """
        numbers = [numbers_of(t.detach()) for t in tensors if differentiable(t)]
        if self._stage.rehearses or any(t.is_cuda for t in numbers) or all_finite(numbers):
            return
        said, where = what.format(numbers[0].sum().item()), origin()
        first = f" (first in {where})" if where else ""
        self._judge([said + first], [math.nan], self._stage.weights.updates)

    def _judge(self, what: Sequence[str], values: Sequence[float], update: int) -> None:
        """Stop the training at the first of an update's numbers that is not finite."""
        bad = [said.format(v) for said, v in zip(what, values, strict=True) if not math.isfinite(v)]
        if not bad or self._stage.rehearses:
            return
        late = self._stage.weights.updates - update
        when = f"{late} updates later" if late else "before the update"
        way_out = next((way for cause, way in WAYS_OUT.items() if cause in bad[0]), LOWER)
        raise TrainingStopped(
            f"{bad[0]} at stage {self._stage.index}, update {update}: stopped {when}; {way_out}"
        )


class SkipOnNaN(Observer):
    """Leaves out an update whose gradient is not finite, with its changes of the `buffers`, and counts on."""

    def __init__(self, stage: Stage, buffers: Buffers) -> None:
        self._stage = stage
        self._buffers = buffers
        self._before: dict[int, Copies] = {}  # each forward

    def around_forward(self, microbatch: Microbatch) -> AbstractContextManager[object]:
        self._before[microbatch.mb] = self._buffers.copies()
        return nullcontext()

    def after_reduce(self, batch: Batch) -> None:
        gradients = [numbers_of(gradient) for gradient in self._stage.weights.gradients().values()]
        before = self._before[batch.mbs[0]] if not gradients else ()  # without any the buffers tell
        spoilt = any(not torch.equal(now.isfinite(), old.isfinite()) for now, old in before)
        batch.skipped = not self._stage.rehearses and (spoilt or not all_finite(gradients))
        if batch.losses is not None:
            finite = map(math.isfinite, batch.losses.tolist())
            batch.counted = [one for one, counts in zip(batch.counted, finite, strict=True) if counts]

    def hear(self, batch: Batch, numbers: Tensor) -> None:
        batch.skipped = batch.skipped or not all_finite([numbers])

    def before_step(self, batch: Batch) -> None:
        """Put back the buffers of before a batch that is left out, also for later forwards."""
        if batch.skipped:
            self._buffers.restore(self._before[batch.mbs[0]])
            self._before = {mb: self._buffers.copies() for mb in self._before}
        for mb in batch.mbs:
            del self._before[mb]
