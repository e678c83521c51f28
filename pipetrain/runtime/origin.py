"""The layer where a number stopped being finite, found by running a pass again, layer by layer.

With the same weights but other random numbers, so a layer whose random numbers were the cause (dropout's
scale, say) may not be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from pipetrain.network.network import INPUT, Part
from pipetrain.network.numerics import numbers_of
from pipetrain.network.values import as_tuple
from pipetrain.runtime.microbatch import Microbatch, Tensors
from pipetrain.runtime.stage import Stage

Loss = Callable[[Tensors], Tensor]  # (outputs of the last layer) -> a scalar
DATA = "what came from the data"
NOTHING = "the loss itself, as where no target counts"
LOSS = "the loss"


def origin_of_outputs(stage: Stage, microbatch: Microbatch) -> str:
    """Say where the outputs of a forward stopped being finite; "" if that is not found."""
    for value, tensor in zip(stage.module.slice.enters, microbatch.inputs, strict=True):
        if not all_finite([tensor]):
            earlier = f"what came from layer {value.layer}, in an earlier stage"
            return DATA if value.layer == INPUT else earlier
    with _again(stage, microbatch):
        found = forward_origin(stage.module, microbatch.inputs)
    if found or microbatch.target is None or all_finite(as_tuple(microbatch.target.value)):
        return found
    return f"the targets, {DATA}"


def origin_of_loss(stage: Stage, microbatch: Microbatch, loss: Tensor) -> str:
    """Say where a loss stopped being finite; "" if that is not found."""
    where = origin_of_outputs(stage, microbatch)
    if not where and stage.objective and stage.objective.counts_samples and bool(loss.isnan()):
        return NOTHING
    return where


def origin_of_gradient(stage: Stage, microbatch: Microbatch, grads: Tensors) -> str:
    """Say where a backward stopped being finite; "" if that is not found."""
    needs, target = stage.needed(microbatch.outputs), microbatch.target
    if stage.objective is None or target is None:
        left = [value for value, need in zip(stage.module.slice.leaves, needs, strict=True) if need]
        for value, grad in zip(left, grads, strict=True):
            if not all_finite([grad]):
                return f"what came back to layer {value.layer} from a later stage"
        loss = None
    else:
        loss = partial(stage.objective.loss, target=target)
    with _again(stage, microbatch):
        return backward_origin(stage.module, microbatch.inputs, grads, needs, loss)


@contextmanager
def _again(stage: Stage, microbatch: Microbatch) -> Iterator[None]:
    """Let layers run as in a microbatch's forward, and leave no trace."""
    with (
        stage.weights.installed(microbatch.version),
        stage.buffers.replaced(stage.buffers.copies()),
        stage.numerics.context(stage.device),
    ):
        yield


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all numbers are finite; integers are."""
    return all(bool(numbers_of(t).isfinite().all()) for t in tensors)


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
