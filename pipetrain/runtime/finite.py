"""Numbers that are not finite: they stop the training, or leave out the update.

The gradients and losses of a batch are checked by one reduction. On a GPU its result is looked at when it has
come to the host, for which nothing waits within a window, unless updates are left out. Numbers in host memory
are looked at directly, too: each activation and gradient before it is sent on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipetrain.errors import TrainingStopped
from pipetrain.network.numerics import numbers_of
from pipetrain.network.values import differentiable
from pipetrain.runtime.buffers import Buffers, Copies
from pipetrain.runtime.microbatch import Batch, Microbatch, Observer, Tensors
from pipetrain.runtime.origin import DATA, NOTHING, origin_of_gradient, origin_of_loss, origin_of_outputs
from pipetrain.runtime.stage import Stage

Blame = Callable[[list[float]], str]  # (numbers) -> a description of them and of the non-finite ones
LOWER = "try a lower optim.lr, or a warmup"
WAYS_OUT = {
    DATA: "look for NaN and infinite numbers there",
    NOTHING: "give weight=, a function of the targets that says what they count for",
}
AT_ONCE = 8  # updates whose numbers go to the host together


def witness(tensors: Sequence[Tensor]) -> Tensor:
    """Return one number per tensor, finite exactly if all of the tensor's numbers are.

    The tensors are dense, real, detached, and in host memory. The 2-norm takes a twentieth of the time of the
    largest absolute value, which is used where finite numbers overflow in the norm.
    """
    norms = torch.stack(torch._foreach_norm(list(tensors), 2))
    if all(map(math.isfinite, norms.tolist())):
        return norms
    return torch.stack(torch._foreach_norm(list(tensors), math.inf))


def not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1 if a number of tensors on a GPU is not finite, else 0, as torch.amp.GradScaler finds it."""
    found = torch.zeros((), device=tensors[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(list(tensors), found, torch.ones_like(found))
    return found


def in_host_memory_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor in host memory are finite, by NumPy: there is no kernel."""
    if tensor.dtype is torch.bfloat16:  # unknown to NumPy; infinities and NaN have all exponent bits set
        return not bool((tensor.view(torch.int16).numpy() & 0x7F80 == 0x7F80).any())
    numbers = tensor.numpy()
    with np.errstate(all="ignore"):
        return math.isfinite(numbers.sum()) or bool(np.isfinite(numbers).all())


class StopOnNaN(Observer):
    """Stops the training at a number of a stage that is not finite, and names the layer where it began.

    Numbers on a GPU go to the host several at a time: each copy costs as much as some kernels.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._front = stage.name(smallest_of_first_layer(stage.module))
        self._gathered: list[tuple[Blame, int, Tensor]] = []  # description, update, numbers on a GPU
        # What was gathered, with the numbers on the host, and the torch.cuda.Event of their arrival.
        self._coming: deque[tuple[list[tuple[Blame, int, int]], Tensor, Any]] = deque()

    def around_forward(self, microbatch: Microbatch) -> AbstractContextManager[object]:
        target = microbatch.target
        if target is not None and target.share and not target.weight and not self._stage.rehearses:
            raise TrainingStopped(
                f"in the batch of microbatch {microbatch.mb}, update {self._update}, none of the targets "
                f"counts: leave it out of the data, or set on_nan=skip, which leaves out the update"
            )
        return nullcontext()

    def after_forward(self, microbatch: Microbatch, outputs: Tensors) -> None:
        if self._stage.objective is not None:
            origin = partial(origin_of_loss, self._stage, microbatch, outputs[0])
            self._check(f"the loss of microbatch {microbatch.mb} is {{0}}", outputs, origin)
            return
        made = tuple(t for t in outputs if t.requires_grad)  # not, for example, a mask of -inf
        origin = partial(origin_of_outputs, self._stage, microbatch)
        self._check(f"the activation of microbatch {microbatch.mb} is not finite", made, origin)

    def after_backward(self, microbatch: Microbatch, grads: Tensors, back: Tensors) -> None:
        if not back and microbatch.deferred is None and self._front:
            # None leaves the stage: a small gradient of its first layer, to which what is not finite goes on.
            grad = self._stage.weights.leaf(microbatch.version, self._front).grad
            back = () if grad is None else (grad,)
        origin = partial(origin_of_gradient, self._stage, microbatch, grads)
        self._check(f"the gradient of microbatch {microbatch.mb} is not finite", back, origin)

    def after_reduce(self, batch: Batch) -> None:
        gradients, mbs = self._stage.weights.gradients(), batch.mbs
        numbers, losses = [numbers_of(gradient) for gradient in gradients.values()], batch.losses
        if numbers and numbers[0].is_cuda:
            batch.unless = not_finite(numbers)
            both = [*([] if losses is None else [losses]), batch.unless.atanh().reshape(1)]  # of 1, infinite
            lossy = [] if losses is None else mbs
            self._gathered.append((partial(blame_batch, lossy, mbs), self._update, torch.cat(both).detach()))
            if len(self._gathered) >= AT_ONCE:
                self._copy()
            self.settle(wait=False)
            return
        if losses is not None:
            self._judge(partial(blame_batch, mbs, mbs), self._update, losses.tolist())
        if numbers:
            self._judge(partial(blame_weights, list(gradients), mbs), self._update, witness(numbers).tolist())

    def settle(self, wait: bool) -> None:
        if wait and self._gathered:
            self._copy()
        while self._coming:
            made, numbers, arrived = self._coming[0]
            if wait:
                arrived.synchronize()
            elif not arrived.query():
                return
            self._coming.popleft()
            left = iter(numbers.flatten().tolist())
            for blame, update, count in made:
                self._judge(blame, update, list(islice(left, count)))

    def _copy(self) -> None:
        gathered, self._gathered = self._gathered, []
        numbers = torch.cat([numbers for *_, numbers in gathered])
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        made = [(blame, update, numbers.numel()) for blame, update, numbers in gathered]
        self._coming.append((made, host, arrived))

    def _judge(self, blame: Blame, update: int, values: list[float]) -> None:
        """Stop the training at numbers of an update that are not finite."""
        if all(map(math.isfinite, values)) or self._stage.rehearses:
            return
        what, late = blame(values), self._update - update
        when = f"{late} updates later" if late else "before the update"
        way_out = next((way for cause, way in WAYS_OUT.items() if cause in what), LOWER)
        raise TrainingStopped(
            f"{what} at stage {self._stage.index}, update {update}: stopped {when}; {way_out}"
        )

    @property
    def _update(self) -> int:
        return self._stage.weights.updates

    def _check(self, template: str, tensors: Tensors, origin: Callable[[], str]) -> None:
        """Stop the training if tensors in host memory are not finite; `origin` then finds the layer.

        On a GPU each check would be kernels, and the numbers would come when the weights have changed.
        """
        floating = [numbers_of(t.detach()) for t in tensors if differentiable(t)]
        if not floating or floating[0].is_cuda or all(map(in_host_memory_finite, floating)):
            return
        number = floating[0].sum().item()

        def blame(_: list[float]) -> str:
            where = origin()
            return template.format(number) + (f" (first in {where})" if where else "")

        self._judge(blame, self._update, [math.nan])


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
        if gradients and not self._stage.rehearses:
            of = not_finite(gradients).atanh() if gradients[0].is_cuda else witness(gradients)
            batch.skipped = not _all_finite_on_host(of)
        if batch.losses is not None:
            finite = map(math.isfinite, batch.losses.tolist())
            batch.counted = [one for one, counts in zip(batch.counted, finite, strict=True) if counts]

    def hear(self, batch: Batch, numbers: Tensor) -> None:
        batch.skipped = batch.skipped or not _all_finite_on_host(numbers)

    def before_step(self, batch: Batch) -> None:
        """Put back the buffers of before a batch that is left out or spoilt them, also for later forwards."""
        first = self._before[batch.mbs[0]]
        if batch.skipped or self._buffers.spoilt(first):
            self._buffers.restore(first)
            self._before = {mb: self._buffers.copies() for mb in self._before}
        for mb in batch.mbs:
            del self._before[mb]


def _all_finite_on_host(numbers: Tensor) -> bool:
    """Return whether numbers are finite. On a GPU the host waits for them."""
    return all(map(math.isfinite, numbers.reshape(-1).tolist()))


def blame_batch(lossy: list[int], mbs: list[int], numbers: list[float]) -> str:
    """Describe the first loss, of those of microbatches `lossy`, that is not finite, or else the gradient."""
    for mb, number in zip(lossy, numbers, strict=False):
        if not math.isfinite(number):
            return f"the loss of microbatch {mb} is {number}"
    return f"the gradient of {_span(mbs)} is not finite"


def _span(mbs: list[int]) -> str:
    return f"microbatch {mbs[0]}" if len(mbs) == 1 else f"microbatches {min(mbs)} to {max(mbs)}"


def blame_weights(names: list[str], mbs: list[int], numbers: list[float]) -> str:
    """Describe the weights with non-finite gradients: the last one, where the backward began, and a count."""
    bad = [name for name, number in zip(names, numbers, strict=True) if not math.isfinite(number)]
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"the gradient of {bad[-1]}{more}, {_span(mbs)}, is not finite"


def smallest_of_first_layer(module: nn.Module) -> str:
    """Return the name of the smallest trained weight in the first layer that has any, such as a bias."""
    sizes = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
    first = next(iter(sizes), "").partition(".")[0]
    return min((name for name in sizes if name.partition(".")[0] == first), key=sizes.__getitem__, default="")
