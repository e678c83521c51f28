"""Gradients as tensors to be summed over ranks; those of replicas in buckets, sent during the last backward.

A backward goes from the last layer to the first. So a batch's last backward on a rank finishes the gradients
of the last layers while it still computes the others, and finished ones can be sent meanwhile (as in
DistributedDataParallel, Li et al. 2020, section 3.2.3). The buckets and their order follow from the weights
alone, as all replicas must sum in the same order, whatever order autograd uses.
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
    """Return the weights in full buckets, in the order of a backward, and last all others.

    Vectors are among the others: they are small, and in a split backward I makes their gradients, not W.
    """
    buckets: list[dict[str, Tensor]] = [{}]
    for name, weight in reversed([*weights.items()]):
        if weight.dim() > 1:
            buckets[-1][name] = weight
        if sum(member.nbytes for member in buckets[-1].values()) >= BUCKET:
            buckets.append({})
    full = {name for bucket in buckets[:-1] for name in bucket}
    return [*buckets[:-1], {name: weight for name, weight in weights.items() if name not in full}]


@contextmanager
def reduce_when_finished(
    buckets: Sequence[Mapping[str, Tensor]], all_reduce: Callable[[Tensor], None]
) -> Iterator[None]:
    """Reduce each bucket of leaves once the backward in this context has finished it and all before it.

    Buckets that it does not reach are reduced at its end. Raises TrainingStopped if it adds to a leaf twice.
    """
    pending = deque(buckets)
    unfinished = {id(leaf): name for bucket in buckets for name, leaf in bucket.items()}

    def finish(leaf: Tensor) -> None:
        if unfinished.pop(id(leaf), None) is None:
            raise TrainingStopped(
                "a layer with replicas runs a backward inside its own, and so adds to a gradient several "
                "times: give torch.utils.checkpoint use_reentrant=False, or leave replicas out"
            )
        while pending and not any(id(member) in unfinished for member in pending[0].values()):
            all_reduce(torch.cat(flat_gradients(pending.popleft())))

    leaves = [leaf for bucket in buckets for leaf in bucket.values()]
    hooks = [leaf.register_post_accumulate_grad_hook(finish) for leaf in leaves]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for bucket in pending:
        all_reduce(torch.cat(flat_gradients(bucket)))


def flat_gradients(weights: Mapping[str, Tensor]) -> list[Tensor]:
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
    """Return the numbers of a weight in memory order: flattening in another order copies one by one."""
    return numbers_of(numbers).permute(0, 2, 3, 1) if _channels_last(weight) else numbers_of(numbers)


def _channels_last(weight: Tensor) -> bool:
    last = torch.channels_last
    return weight.dim() == 4 and not weight.is_complex() and weight.is_contiguous(memory_format=last)


def gradient_counts(weights: Mapping[str, Tensor], skip: Tensor | None) -> list[Tensor]:
    """Return for each weight a tensor with 1 if it has a gradient; for a stage without weights, one 1.

    `skip`: 1 if the stage skips this update; then all must, so a NaN takes the place of these counts.
    """
    # Filled on the device: copying a list from the host would make it wait.
    counts = [numbers_of(w).new_full((1,), float(w.grad is not None)) for w in weights.values()]
    if skip is not None:
        return [torch.where(skip > 0, math.nan, torch.cat(counts or [torch.ones_like(skip).reshape(1)]))]
    return counts


def split_sums(weights: Mapping[str, Tensor], numbers: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Split numbers, ordered as in `flat_gradients`, into a part for each weight, and the rest."""
    sizes = [numbers_of(weight).numel() for weight in weights.values()]
    *parts, rest = torch.split(numbers, [*sizes, len(numbers) - sum(sizes)])
    return dict(zip(weights, parts, strict=True)), rest


def set_gradients(
    weights: Mapping[str, Tensor], parts: Mapping[str, Tensor], counts: Tensor, copies: bool = True
) -> None:
    """Set the gradients to sums of `flat_gradients` and `gradient_counts`.

    Without `copies` they are views of the sums; with them other stages of the rank may use the same sums, as
    clipping scales a gradient in place. The counts are read only if a weight has no gradient here: reading
    makes a GPU's host wait.
    """
    local = [weight.grad is not None for weight in weights.values()]
    exists = local if all(local) else [count != 0 for count in counts.tolist()]
    for (name, weight), has_gradient in zip(weights.items(), exists, strict=True):
        part = parts[name]
        ordered = _in_memory(weight, weight)
        if copies or weight.is_complex() or part.dtype != weight.dtype or not ordered.is_contiguous():
            gradient = torch.empty_like(weight)
            _in_memory(gradient, weight).copy_(part.view_as(ordered))
        else:
            gradient = part.view_as(ordered)
            gradient = gradient.permute(0, 3, 1, 2) if _channels_last(weight) else gradient
        weight.grad = gradient if has_gradient else None
