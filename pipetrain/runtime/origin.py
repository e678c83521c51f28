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
from torch.autograd.graph import Node

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
    found: list[str] = []

    def see(name: str, layer: nn.Module, outputs: Tensors) -> Tensors:
        if not found and not all_finite(outputs):
            found.append(f"layer {name}")
        return outputs

    with _again(stage, microbatch), torch.no_grad():
        stage.module.observed(microbatch.inputs, see)
    if found or microbatch.target is None or all_finite(as_tuple(microbatch.target.value)):
        return next(iter(found), "")
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


def all_finite(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether all numbers are finite; integers are."""
    return all(bool(numbers_of(t).isfinite().all()) for t in tensors if t is not None)


@torch.enable_grad()
def backward_origin(part: Part, x: Tensors, grads: Tensors, needs: Sequence[bool], loss: Loss | None) -> str:
    """Return the first layer, from the end, whose gradients are not finite; "" if none is.

    `grads`: the gradients of the outputs selected by `needs`; unused with a `loss`. Every node of the graph
    belongs to the first layer behind it, and is looked at as the backward goes through it.
    """
    seen, found = set[Node](), list[str]()

    def judge(where: str, made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        if not found and not all_finite((*made, *given)):
            found.append(where)

    def watch(where: str, tensors: Sequence[Tensor]) -> None:
        nodes = [t.grad_fn for t in tensors]
        while nodes:
            if (node := nodes.pop()) is not None and node not in seen:
                seen.add(node)
                node.register_hook(partial(judge, where))
                nodes += [earlier for earlier, _ in node.next_functions]

    def see(name: str, layer: nn.Module, outputs: Tensors) -> Tensors:
        watch(f"layer {name}", outputs)
        return outputs

    entered = [t.detach().requires_grad_(t.requires_grad) for t in x]
    left = part.observed(tuple(t.clone() for t in entered), see)  # a leaf must not be modified in place
    if loss is None:
        ends = [t for t, need in zip(left, needs, strict=True) if need]
    else:
        ends, grads = [loss(left)], (torch.ones(()),)
        watch(LOSS, ends)
    wanted = [t for t in (*entered, *part.parameters()) if t.requires_grad]
    pairs = [(t, grad.to(t)) for t, grad in zip(ends, grads, strict=True) if t.requires_grad]
    if wanted and pairs:
        torch.autograd.grad([t for t, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    return next(iter(found), "")
