"""Detects non-finite numbers, which stop the training, and names the layer where they began.

Checks do not wait for the device: on a CPU they are immediate, on a GPU they follow when the numbers have
arrived on the host, at the latest at the end of the window. To find the layer, the stage's pass of the
microbatch is run again layer by layer with the same weights but other random numbers, so a layer whose random
numbers were the cause (dropout's scale, say) may not be found.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.boundary import Value, as_tuple
from pipetrain.errors import TrainingStopped

Blame = Callable[[list[float]], str]  # (numbers) -> a description of them and of the non-finite ones
Layers = Sequence[tuple[str, nn.Module]]
Tensors = tuple[Tensor, ...]
Loss = Callable[[Tensors], Tensor]  # (outputs of the last layer) -> a scalar
LOSS = "the loss"


def numbers_of(tensor: Tensor) -> Tensor:
    """Return a tensor's values as a dense real tensor."""
    values = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def witness(tensors: Sequence[Tensor]) -> Tensor:
    """Return one number per tensor, finite exactly if all of the tensor's numbers are.

    The tensors are dense, real, detached, and on one device. On a CPU the number is the sum, which takes a
    fiftieth of the time of the largest absolute value; that one is used where finite numbers overflow in the
    sum.
    """
    if not tensors[0].is_cuda:
        sums = torch.stack([t.sum() for t in tensors])
        if sums.isfinite().all() or sums.numel() == sum(t.numel() for t in tensors):
            return sums
    return torch.stack(torch._foreach_norm(list(tensors), math.inf))


def sums_are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all sums are finite: on a CPU, a faster test that makes `witness` unnecessary."""
    return all(math.isfinite(t.sum().item()) for t in tensors)


class FiniteWatch:
    """Stops the training at non-finite numbers. `stage` is named in the error."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        # Description, update, the numbers on the host, and the torch.cuda.Event of their arrival or None.
        self._coming: deque[tuple[Blame, int, Tensor, Any]] = deque()

    def add(self, blame: Blame, update: int, numbers: Tensor) -> None:
        """Watch numbers that are used for `update`. Raises TrainingStopped."""
        numbers, arrived = numbers.detach(), None
        if numbers.is_cuda:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = host.copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._coming.append((blame, update, numbers, arrived))
        self.check(update)

    def check(self, update: int, wait: bool = False) -> None:
        """Check the numbers that have arrived (with `wait`, all of them). Raises TrainingStopped."""
        while self._coming:
            blame, made_for, numbers, arrived = self._coming[0]
            if arrived is not None and wait:
                arrived.synchronize()
            elif arrived is not None and not arrived.query():
                return
            self._coming.popleft()
            values = numbers.flatten().tolist()
            if not all(map(math.isfinite, values)):
                late = update - made_for
                when = f"{late} updates later" if late else "before the update"
                raise TrainingStopped(
                    f"{blame(values)} at stage {self._stage}, update {made_for}: stopped {when}; "
                    f"try a lower optim.lr, or a warmup"
                )


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers are finite; integers are."""
    return all(bool(numbers_of(t).isfinite().all()) for t in tensors)


def blame(template: str, origin: Callable[[], str], numbers: list[float]) -> str:
    """Describe a non-finite number of a microbatch, and the layer where it began, if that is found."""
    where = origin()
    return template.format(numbers[0]) + (f" (first in {where})" if where else "")


def blame_weights(names: list[str], mbs: list[int], numbers: list[float]) -> str:
    """Describe the weights with non-finite gradients: the last one, where the backward began, and a count."""
    bad = [name for name, number in zip(names, numbers, strict=True) if not math.isfinite(number)]
    of = f"microbatch {mbs[0]}" if len(mbs) == 1 else f"microbatches {min(mbs)} to {max(mbs)}"
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"the gradient of {bad[-1]}{more}, {of}, is not finite"


def smallest_of_first_layer(module: nn.Module) -> str:
    """Return the name of the smallest trained weight in the first layer that has any, such as a bias."""
    sizes = {name: p.numel() for name, p in module.named_parameters() if p.requires_grad}
    first = next(iter(sizes), "").partition(".")[0]
    return min((name for name in sizes if name.partition(".")[0] == first), key=sizes.__getitem__, default="")


@torch.no_grad()
def forward_origin(layers: Layers, value: Value) -> str:
    """Return the first layer whose output is not finite for this input; "" if none is."""
    for name, layer in layers:
        value = layer(value)
        if not all_finite(as_tuple(value)):
            return f"layer {name}"
    return ""


@torch.enable_grad()
def backward_origin(
    layers: Layers, value: Value, grads: Tensors, needs: Sequence[bool], loss: Loss | None
) -> str:
    """Return the first layer, from the end, whose gradients are not finite; "" if none is.

    `grads`: the gradients of the outputs selected by `needs`; unused with a `loss`.
    """
    passes: list[tuple[str, list[Tensor], list[Tensor], list[Tensor]]] = []
    for name, layer in layers:
        inputs = tuple(_leaf(t) for t in as_tuple(value))
        copies = tuple(t.clone() for t in inputs)  # for a layer that works in place
        value = layer(copies[0] if isinstance(value, Tensor) else copies)
        wanted = [t for t in (*inputs, *layer.parameters()) if t.requires_grad]
        left = [t for t in as_tuple(value) if t.requires_grad]
        passes.append((name, wanted, [t for t in inputs if t.requires_grad], left))
    outputs = as_tuple(value)
    if loss is not None:
        ends = tuple(_leaf(t) for t in outputs)
        grads = _gradients([loss(ends)], (torch.ones(()),), [t for t in ends if t.requires_grad])
        if not all_finite(grads):
            return LOSS
    else:
        passes[-1] = (*passes[-1][:3], [t for t, need in zip(outputs, needs, strict=True) if need])
    for name, wanted, inputs_, left in reversed(passes):
        found = _gradients(left, grads, wanted)
        if not all_finite(found):
            return f"layer {name}"
        grads = found[: len(inputs_)]
    return ""


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _gradients(outputs: Sequence[Tensor], grads: Tensors, wanted: Sequence[Tensor]) -> Tensors:
    """Return the gradients of `wanted`, zeros where none arrives."""
    pairs = [(t, g.to(t.dtype)) for t, g in zip(outputs, grads, strict=True) if t.requires_grad]
    if not pairs or not wanted:
        return tuple(torch.zeros_like(t) for t in wanted)
    found = torch.autograd.grad([t for t, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return tuple(torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True))
