"""Tensors of trial runs: made-up inputs, tensors in trees of values, storages, graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipetrain.model.specs import TensorSpec, ValueSpec, repeated


def made_up(spec: TensorSpec, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor of ordinary numbers; integers are 0, which every embedding accepts."""
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return torch.rand(spec.shape, dtype=spec.dtype, device=device)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def made_up_samples(inputs: ValueSpec, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """Return made-up inputs [n, ...]; an input with known samples repeats these."""

    def made(number: int, spec: TensorSpec) -> Tensor:
        if (samples := inputs.samples.get(number)) is None:
            return made_up(spec, device)
        return repeated(samples, spec.shape).to(device)

    return tuple(made(number, spec) for number, spec in enumerate(inputs.specs))


def storage_of(tensor: Tensor) -> int:
    """Return the address of the storage that a tensor shares with its views."""
    return int(tensor.untyped_storage()._cdata)


def strided(*values: Any) -> list[Tensor]:
    """Return all tensors in a tree of values, except sparse ones."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.layout is torch.strided]


def graph_of(*roots: Tensor) -> set[Any]:
    """Return the autograd nodes that a backward of tensors would visit."""
    nodes, todo = set(), [root.grad_fn for root in roots]
    while todo:
        node = todo.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            todo += [before for before, _ in node.next_functions]
    return nodes
