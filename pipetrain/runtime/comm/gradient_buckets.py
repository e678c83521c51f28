"""Gradients as tensors that ranks add up; those of replicas in buckets, told while the last backward runs.

A backward goes from the last layer to the first. So a batch's last one on a rank finishes the gradients of
the last layers while it still computes the others, and what is finished can travel meanwhile (as in
DistributedDataParallel, Li et al. 2020, section 3.2.3). The buckets and their order follow from the weights
alone, as replicas must add up the same in the same order, in whatever order autograd goes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pipetrain.errors import TrainingStopped
from pipetrain.model.numerics import numbers_of

BUCKET = 25 * 2**20  # bytes


def buckets_of(weights: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the weights by full bucket, in the order in which a backward goes, and last all others.

    Vectors are among these: they are small, and where a backward is split I makes their gradients, not W.
    """
    buckets: list[dict[str, Tensor]] = [{}]
    for name, weight in reversed([*weights.items()]):
        if weight.dim() > 1:
            buckets[-1][name] = weight
        if sum(one.nbytes for one in buckets[-1].values()) >= BUCKET:
            buckets.append({})
    full = {name for bucket in buckets[:-1] for name in bucket}
    return [*buckets[:-1], {name: weight for name, weight in weights.items() if name not in full}]


@contextmanager
def finishing(
    buckets: Sequence[Mapping[str, Tensor]], all_reduce: Callable[[Tensor], None]
) -> Iterator[None]:
    """Tell each bucket of leaves once the backward in this context has finished it and those before it.

    Buckets that it does not reach are told at its end. Raises TrainingStopped if it adds to a leaf twice.
    """
    left = deque(buckets)
    unfinished = {id(leaf): name for bucket in buckets for name, leaf in bucket.items()}

    def finish(leaf: Tensor) -> None:
        if unfinished.pop(id(leaf), None) is None:
            raise TrainingStopped(
                "a layer with replicas runs a backward inside its own, and so adds to a gradient several "
                "times: give torch.utils.checkpoint use_reentrant=False, or leave replicas out"
            )
        while left and not any(id(one) in unfinished for one in left[0].values()):
            all_reduce(torch.cat(flat(left.popleft())))

    leaves = [leaf for bucket in buckets for leaf in bucket.values()]
    hooks = [leaf.register_post_accumulate_grad_hook(finish) for leaf in leaves]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for bucket in left:
        all_reduce(torch.cat(flat(bucket)))


def flat(weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the gradient of each weight as a vector. Raises TrainingStopped for a sparse one."""
    parts = []
    for name, weight in weights.items():
        if weight.grad is not None and weight.grad.layout is not torch.strided:
            raise TrainingStopped(
                f"the gradient of {name}, which ranks add up, is sparse: make the layer with sparse=False, "
                f"or keep the layers that share it in one stage by partition=, without replicas"
            )
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        parts.append(_in_memory(gradient, weight).flatten())
    return parts


def _in_memory(numbers: Tensor, weight: Tensor) -> Tensor:
    """Return the numbers of a weight in the order of its memory: to flatten others copies them one by one."""
    return numbers_of(numbers).permute(0, 2, 3, 1) if _channels_last(weight) else numbers_of(numbers)


def _channels_last(weight: Tensor) -> bool:
    last = torch.channels_last
    return weight.dim() == 4 and not weight.is_complex() and weight.is_contiguous(memory_format=last)


def counts_of(weights: Mapping[str, Tensor], skip: Tensor | None) -> list[Tensor]:
    """Return for each weight a 1 if it has a gradient, in a tensor; of a stage without weights a 1 for all.

    `skip`: 1 if the stage leaves this update out; then all must, which a NaN in these places says.
    """
    # Filled on the device: a host's list would be copied to it, for which the host waits.
    each = [numbers_of(one).new_full((1,), float(one.grad is not None)) for one in weights.values()]
    if skip is not None:
        return [torch.where(skip > 0, math.nan, torch.cat(each or [torch.ones_like(skip).reshape(1)]))]
    return each


def parts_of(weights: Mapping[str, Tensor], numbers: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Split numbers, as `flat` gives them, in one tensor: into a part for each weight, and the rest."""
    sizes = [numbers_of(weight).numel() for weight in weights.values()]
    *parts, more = torch.split(numbers, [*sizes, len(numbers) - sum(sizes)])
    return dict(zip(weights, parts, strict=True)), more


def set_gradients(
    weights: Mapping[str, Tensor], parts: Mapping[str, Tensor], counts: Tensor, copies: bool = True
) -> None:
    """Set the gradients to sums of what `flat` and `counts_of` gave, or without `copies` to views of them.

    `copies`: where other stages of the rank take the same sums, as clipping scales a gradient in place. The
    counts are looked at only if a weight has no gradient here: a GPU's host would wait for them.
    """
    had = [weight.grad is not None for weight in weights.values()]
    has = had if all(had) else [count != 0 for count in counts.tolist()]
    for (name, weight), there in zip(weights.items(), has, strict=True):
        part = parts[name]
        ordered = _in_memory(weight, weight)
        if copies or weight.is_complex() or part.dtype != weight.dtype or not ordered.is_contiguous():
            gradient = torch.empty_like(weight)
            _in_memory(gradient, weight).copy_(part.view_as(ordered))
        else:
            gradient = part.view_as(ordered)
            gradient = gradient.permute(0, 3, 1, 2) if _channels_last(weight) else gradient
        weight.grad = gradient if there else None
