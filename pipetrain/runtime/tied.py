"""The gradient of weights that layers in several stages share, as one message a group of stages.

Each stage has a copy of such a weight. Before an update the stages add up their gradients of it, so every
copy is stepped by the same numbers, with the same optimizer state, and stays the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pipetrain.errors import TrainingStopped
from pipetrain.network.numerics import numbers_of


def packed(weights: Mapping[str, Tensor], names: Sequence[str], skip: bool) -> Tensor:
    """Return the gradients of `names` [n], and behind them a count of these that there are, each 0 or 1.

    `skip`: the stage leaves this update out, so all must, which a count of NaN says.
    """
    parts = []
    for name in names:
        weight = weights[name]
        if weight.grad is not None and weight.grad.layout is not torch.strided:
            raise TrainingStopped(
                f"the gradient of {name}, which stages share, is sparse: make the layer with sparse=False, "
                f"or keep the layers that share it in one stage by partition="
            )
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
        parts.append(numbers_of(gradient).flatten())
    there = [float("nan") if skip else float(weights[name].grad is not None) for name in names]
    return torch.cat([*parts, parts[0].new_tensor(there)])


def unpack(weights: Mapping[str, Tensor], names: Sequence[str], sums: Tensor) -> None:
    """Set the gradients to sums of what `packed` returned.

    The counts are looked at only for a weight without a gradient here: a GPU's host would wait for them.
    """
    left = 0
    for number, name in enumerate(names):
        # A copy: clipping scales it in place, and another stage of the rank may take the same sums.
        gradient = torch.empty_like(weights[name])
        numbers = numbers_of(gradient)
        numbers.copy_(sums[left : left + numbers.numel()].view_as(numbers))
        there = weights[name].grad is not None or sums[number - len(names)].reshape(1).tolist() != [0.0]
        weights[name].grad = gradient if there else None
        left += numbers.numel()
