"""Non-finite numbers: they stop the training, or skip the update.

On a CPU each activation and gradient is checked before it is sent, and each loss and weight's gradient before
the update. To find the layer, the forward runs again, layer by layer, with the same weights but other random
numbers. On a GPU one reduction checks the gradient of a batch. The result is copied to the host with the
losses and read later, as nothing waits for the device within a window. The device skips an update, see
ParameterStore.step, and the host counts it when the numbers have arrived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipetrain.errors import TrainingStopped
from pipetrain.model.network import INPUT, Tensors
from pipetrain.model.numerics import numbers_of
from pipetrain.model.specs import as_tuple, differentiable
from pipetrain.runtime.stage.buffers import Buffers, Copies
from pipetrain.runtime.stage.microbatch import Batch, Microbatch
from pipetrain.runtime.stage.objective import Counted
from pipetrain.runtime.stage.observer import Observer
from pipetrain.runtime.stage.stage import Stage

LOWER_RATE = "try a lower optim.lr, or a warmup"
CHECK_DATA = "look for NaN and infinite numbers there"
GIVE_WEIGHT = "give weight=, a function of the targets that says what they count for"


def not_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Return 1 if any number is not finite, else 0, as torch.amp.GradScaler does."""
    bad = torch.zeros((), dtype=torch.float32, device=tensors[0].device)  # whatever the default is
    narrow = [t for t in tensors if t.dtype is torch.bfloat16 and t.numel()]
    checked = [t for t in tensors if t.dtype is not torch.bfloat16]
    if narrow:  # the CUDA kernel does not support them: check their largest numbers instead
        checked += torch._foreach_norm(narrow, math.inf, torch.float32)
    torch._amp_foreach_non_finite_check_and_unscale_(checked, bad, torch.ones_like(bad))
    return bad


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers of real, detached tensors are finite. On a GPU the host waits."""
    if tensors and tensors[0].is_cuda:
        return not not_finite(tensors).item()
    return all(map(_finite_in_host_memory, tensors))


def _finite_in_host_memory(tensor: Tensor) -> bool:
    """Use NumPy: no kernel, and 15 times as fast as torch.isfinite."""
    if tensor.dtype is torch.bfloat16:  # not in NumPy; infinities and NaN have all exponent bits set
        return not bool((tensor.view(torch.int16).numpy() & 0x7F80 == 0x7F80).any())
    return bool(np.isfinite(tensor.numpy()).all())


def _numbers(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [numbers_of(t.detach()) for t in tensors]


def origin(stage: Stage, microbatch: Microbatch) -> tuple[str, str]:
    """Return where a forward's outputs in host memory stopped being finite, or "", and a way out."""
    for value, tensor in zip(stage.module.slice.enters, microbatch.inputs, strict=True):
        if not all_finite(_numbers([tensor])):
            if value.layer == INPUT:
                return "what came from the data", CHECK_DATA
            return f"what came from layer {value.layer}, in an earlier stage", LOWER_RATE
    first: list[str] = []

    def see(name: str, outputs: Tensors) -> None:
        if not first and not all_finite(_numbers(outputs)):
            first.append(f"layer {name}")

    with (
        stage.store.installed(microbatch.read),
        stage.buffers.replaced(stage.buffers.copies()),
        stage.numerics.context(stage.device),
        torch.no_grad(),
    ):
        stage.module.observed(microbatch.inputs, see)
    target = microbatch.target
    if not first and target is not None and not all_finite(_numbers(as_tuple(target.value))):
        return "the targets, what came from the data", CHECK_DATA
    return next(iter(first), ""), LOWER_RATE


class ReadsLater(Observer):
    """Reads numbers of a GPU when they have arrived at the host."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        # What reads the numbers, these in host memory, and the torch.cuda.Event of their arrival.
        self._arriving: deque[tuple[Callable[[list[float]], None], Tensor, Any]] = deque()

    def check(self, wait: bool) -> None:
        while self._arriving and (wait or self._arriving[0][-1].query()):
            handle, numbers, arrived = self._arriving.popleft()
            arrived.synchronize()
            handle(numbers.tolist())

    def _read_later(self, handle: Callable[[list[float]], None], numbers: Tensor) -> None:
        if not numbers.is_cuda:
            handle(numbers.tolist())
            return
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._arriving.append((handle, host, arrived))


class StopOnNaN(ReadsLater):
    """Stops the training at a non-finite number of a stage; in a forward, also names the layer."""

    def around_forward(self, microbatch: Microbatch) -> None:
        target = microbatch.target
        if target is not None and target.share and not target.weight and not self._stage.rehearses:
            raise TrainingStopped(
                f"in the batch of microbatch {microbatch.mb}, update {self._stage.weights.updates}, none of "
                f"the targets counts: leave it out of the data, or set on_nan=skip, which leaves out the "
                f"update"
            )

    def after_forward(self, microbatch: Microbatch, outputs: Tensors, result: Tensors) -> None:
        objective = self._stage.objective
        if self._all_finite([t for t in outputs if objective or t.requires_grad]):  # a mask may have -inf
            return
        message = f"the activation of microbatch {microbatch.mb} is not finite"
        where, way_out = origin(self._stage, microbatch)
        if objective is not None:
            message = f"the loss of microbatch {microbatch.mb} is {outputs[0].item()}"
            if not where and objective.task.counts_samples and bool(outputs[0].isnan()):
                where, way_out = "the loss itself, as where no target counts", GIVE_WEIGHT
        self._stop(f"{message} (first in {where})" if where else message, way_out=way_out)

    def after_backward(self, microbatch: Microbatch, back: Tensors) -> None:
        if not self._all_finite(back):
            self._stop(f"the gradient of microbatch {microbatch.mb} is not finite")

    def after_reduce(self, batch: Batch) -> None:
        gradients = {name: numbers_of(grad) for name, grad in self._stage.store.gradients().items()}
        losses = [] if batch.losses is None else [batch.losses.detach()]
        if batch.mbs and any(t.is_cuda for t in (*losses, *gradients.values())):
            bad = not_finite([*gradients.values()] or losses).reshape(1)
            handle = partial(self._check_numbers, batch.mbs if losses else [], self._stage.weights.updates)
            self._read_later(handle, torch.cat([*losses, bad]))
            self.check(wait=False)
            return
        for name, grad in reversed(gradients.items()):  # a backward begins at the last one
            if not all_finite([grad]):
                self._stop(f"the gradient of {name} is not finite")

    def _check_numbers(self, mbs: Sequence[int], update: int, numbers: list[float]) -> None:
        *losses, bad = numbers
        for mb, loss in zip(mbs, losses, strict=True):
            if not math.isfinite(loss):
                self._stop(f"the loss of microbatch {mb} is {loss}", update)
        if bad:
            self._stop("the gradient is not finite", update)

    def _all_finite(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether tensors in host memory are finite.

        On a GPU each check would cost kernels, and the result would arrive after the weights have changed.
        """
        if self._stage.rehearses:
            return True
        numbers = _numbers([t for t in tensors if differentiable(t)])
        return any(t.is_cuda for t in numbers) or all_finite(numbers)

    def _stop(self, message: str, update: int | None = None, way_out: str = LOWER_RATE) -> None:
        """Stop the training because of a number at an update, by default the next one."""
        if self._stage.rehearses:
            return
        updates = self._stage.weights.updates
        update = updates if update is None else update
        timing = f"{updates - update} updates later" if updates > update else "before the update"
        raise TrainingStopped(
            f"{message} at stage {self._stage.index}, update {update}: stopped {timing}; {way_out}"
        )


class SkipOnNaN(ReadsLater):
    """Skips an update with a non-finite gradient, and its changes of the `buffers`; the count goes on."""

    def __init__(self, stage: Stage, buffers: Buffers) -> None:
        super().__init__(stage)
        self._buffers = buffers
        self._before: dict[int, Copies] = {}  # each forward
        self._uncounted: list[Counted] = []  # of the batch to be stepped

    def around_forward(self, microbatch: Microbatch) -> None:
        self._before[microbatch.mb] = self._buffers.copies()

    def after_reduce(self, batch: Batch) -> None:
        gradients = [numbers_of(gradient) for gradient in self._stage.store.gradients().values()]
        # Without gradients, check the buffers.
        before = self._before[batch.mbs[0]] if batch.mbs and not gradients else []
        batch.skipped = self._is_bad(gradients, before)
        self._uncounted, batch.counted = batch.counted, []

    def on_sums(self, batch: Batch, numbers: Tensor) -> None:
        assert batch.skipped is not None
        batch.skipped = torch.maximum(batch.skipped, self._is_bad([numbers], []))

    def before_step(self, batch: Batch) -> None:
        """If a batch is skipped, restore the buffers from before it, in later forwards too."""
        assert batch.skipped is not None
        if batch.mbs:
            before = self._before[batch.mbs[0]]
            for mb in batch.mbs:
                del self._before[mb]
            self._buffers.restore_if(batch.skipped, before, [*self._before.values()])
        losses = [] if batch.losses is None else [batch.losses.detach()]
        counted, self._uncounted = self._uncounted, []
        self._read_later(partial(self._count, counted), torch.cat([*losses, batch.skipped.reshape(1)]))

    def _is_bad(self, numbers: Sequence[Tensor], before: Copies) -> Tensor:
        """Return 1 if numbers, or buffers that were finite, are not finite; in a rehearsal 0."""
        bad = [not_finite(numbers)] if numbers else [torch.zeros((), device=self._stage.device)]
        bad += [(buffer.isfinite() != old.isfinite()).any().float() for buffer, old in before]
        return reduce(torch.maximum, bad) * (not self._stage.rehearses)

    def _count(self, counted: Sequence[Counted], numbers: list[float]) -> None:
        *losses, skipped = numbers
        if skipped:
            self._stage.count_skipped()
        if self._stage.objective is not None and losses:
            pairs = zip(counted, losses, strict=True)
            self._stage.objective.count_all([microbatch for microbatch, loss in pairs if math.isfinite(loss)])
