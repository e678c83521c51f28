"""Detects non-finite numbers, which stop the training, and names the layer where they began.

The gradients and losses of a batch are checked by one reduction. On a GPU its result is looked at when it has
come to the host, for which nothing waits within a window. Numbers in host memory are looked at directly, too:
each activation and gradient before it is sent on. To find the layer, the stage's pass of the microbatch is
then run again layer by layer with the same weights but other random numbers, so a layer whose random numbers
were the cause (dropout's scale, say) may not be found.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipetrain.errors import TrainingStopped
from pipetrain.network.network import Part

Blame = Callable[[list[float]], str]  # (numbers) -> a description of them and of the non-finite ones
Tensors = tuple[Tensor, ...]
Loss = Callable[[Tensors], Tensor]  # (outputs of the last layer) -> a scalar
LOSS = "the loss"
DATA = "what came from the data"
LOWER = "try a lower optim.lr, or a warmup"
AT_ONCE = 8  # updates whose numbers go to the host together


def numbers_of(tensor: Tensor) -> Tensor:
    """Return a tensor's values as a dense real tensor."""
    values = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


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


class FiniteWatch:
    """Stops the training at non-finite numbers. `stage` is named in the error.

    Numbers on a GPU go to the host several at a time: each copy costs as much as some kernels.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.ignores = False
        """Whether numbers may be as they are: in a rehearsal they are made up."""
        self._gathered: list[tuple[Blame, int, Tensor]] = []  # description, update, numbers on a GPU
        # What was gathered, with the numbers on the host, and the torch.cuda.Event of their arrival or None.
        self._coming: deque[tuple[list[tuple[Blame, int, int]], Tensor, Any]] = deque()

    def add(self, blame: Blame, update: int, numbers: Tensor) -> None:
        """Watch numbers [n] that are used for `update`. Raises TrainingStopped."""
        if numbers.is_cuda:
            self._gathered.append((blame, update, numbers.detach()))
            if len(self._gathered) >= AT_ONCE:
                self._copy()
        else:
            self._coming.append(([(blame, update, numbers.numel())], numbers.detach(), None))
        self.check(update)

    def _copy(self) -> None:
        gathered, self._gathered = self._gathered, []
        numbers = torch.cat([numbers for *_, numbers in gathered])
        host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        made = [(blame, update, numbers.numel()) for blame, update, numbers in gathered]
        self._coming.append((made, host, arrived))

    def check(self, update: int, wait: bool = False) -> None:
        """Check the numbers that have arrived (with `wait`, all of them). Raises TrainingStopped."""
        if wait and self._gathered:
            self._copy()
        while self._coming:
            made, numbers, arrived = self._coming[0]
            if arrived is not None and wait:
                arrived.synchronize()
            elif arrived is not None and not arrived.query():
                return
            self._coming.popleft()
            left = iter(numbers.flatten().tolist())
            for blame, made_for, count in made:
                values = list(islice(left, count))
                if not self.ignores and not all(map(math.isfinite, values)):
                    late = update - made_for
                    when = f"{late} updates later" if late else "before the update"
                    what = blame(values)
                    way_out = "look for NaN and infinite numbers there" if DATA in what else LOWER
                    raise TrainingStopped(
                        f"{what} at stage {self._stage}, update {made_for}: stopped {when}; {way_out}"
                    )


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers are finite; integers are."""
    return all(bool(numbers_of(t).isfinite().all()) for t in tensors)


def blame(template: str, origin: Callable[[], str], numbers: list[float]) -> str:
    """Describe a non-finite number of a microbatch, and the layer where it began, if that is found."""
    where = origin()
    return template.format(numbers[0]) + (f" (first in {where})" if where else "")


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


class _Found(Exception):
    """Ends a search at the layer that was found."""


@torch.no_grad()
def forward_origin(part: Part, x: Tensors) -> str:
    """Return the first layer whose output is not finite for these inputs; "" if none is."""

    def see(name: str, layer: nn.Module, outputs: Tensors) -> Tensors:
        if not all_finite(outputs):
            raise _Found(f"layer {name}")
        return outputs

    try:
        part.observed(x, see)
    except _Found as found:
        return str(found)
    return ""


@torch.enable_grad()
def backward_origin(part: Part, x: Tensors, grads: Tensors, needs: Sequence[bool], loss: Loss | None) -> str:
    """Return the first layer, from the end, whose gradients are not finite; "" if none is.

    `grads`: the gradients of the outputs selected by `needs`; unused with a `loss`. Each layer has a graph of
    its own: what it returns goes on as leaves, which collect the gradients of the layers behind it.
    """
    entered = tuple(map(_leaf, x))
    passes: list[tuple[str, nn.Module, Tensors, Tensors]] = []  # with what was returned, and the leaves

    def see(name: str, layer: nn.Module, outputs: Tensors) -> Tensors:
        leaves = tuple(map(_leaf, outputs))
        passes.append((name, layer, outputs, leaves))
        return tuple(t.clone() for t in leaves)  # a leaf must not be modified in place

    left = part.observed(tuple(t.clone() for t in entered), see)
    collecting = [t for t in (*entered, *(t for *_, leaves in passes for t in leaves)) if t.requires_grad]
    ends = left if loss is None else (loss(left),)
    needed = [t for t, need in zip(ends, needs, strict=True) if need] if loss is None else list(ends)
    if not _collects(needed, grads if loss is None else (torch.ones(()),), collecting):
        return LOSS if loss is not None else ""
    for name, layer, outputs, leaves in reversed(passes):
        made = [t for t, leaf in zip(outputs, leaves, strict=True) if leaf.grad is not None]
        if not _collects(
            made, [t.grad for t in leaves if t.grad is not None], [*collecting, *layer.parameters()]
        ):
            return f"layer {name}"
    return ""


def _collects(outputs: Sequence[Tensor], grads: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Add the gradients of `wanted` to their `.grad`; return whether all that are added are finite."""
    pairs = [(t, g.to(t.dtype)) for t, g in zip(outputs, grads, strict=True) if t.requires_grad]
    leaves = [t for t in wanted if t.requires_grad]
    if not pairs or not leaves:
        return True
    found = torch.autograd.grad([t for t, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True)
    for leaf, grad in zip(leaves, found, strict=True):
        if grad is not None and not isinstance(leaf, nn.Parameter):
            leaf.grad = grad if leaf.grad is None else leaf.grad + grad
    return all_finite([numbers_of(grad) for grad in found if grad is not None])


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
