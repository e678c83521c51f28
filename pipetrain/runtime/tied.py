"""The gradient of weights that layers in several stages share, as one message a group of stages.

Each stage has a copy of such a weight. Before an update the stages add up their gradients of it, so every
copy is stepped by the same numbers, with the same optimizer state, and stays the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pipetrain.errors import TrainingStopped
from pipetrain.network.numerics import numbers_of
from pipetrain.schedule.actions import Tie


class Shared:
    """The weights of a stage that others have too; `tie_of`: the stages of each, by its name in the model.

    `live`: the stage's weights, by these names.
    """

    def __init__(self, stage: int, tie_of: Mapping[str, Tie], live: Mapping[str, Tensor]) -> None:
        self._live = live
        self._names: dict[Tie, list[str]] = {}
        for name in sorted(tie_of):
            self._names.setdefault(tie_of[name], []).append(name)
        self.ties = sorted(self._names)
        self.counted_elsewhere = [name for name, tie in tie_of.items() if tie[0] != stage]
        """The weights that count at another stage where each is to count once."""

    def packed(self, tie: Tie, skip: bool) -> Tensor:
        """Return the gradients of a tie's weights [n], and behind them for each weight a 1 if it has one.

        `skip`: the stage leaves this update out, so all must, which a NaN in these places says.
        """
        parts, there = [], []
        for name in self._names[tie]:
            weight = self._live[name]
            if weight.grad is not None and weight.grad.layout is not torch.strided:
                raise TrainingStopped(
                    f"the gradient of {name}, which stages share, is sparse: make the layer with "
                    f"sparse=False, or keep the layers that share it in one stage by partition="
                )
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            parts.append(numbers_of(gradient).flatten())
            there.append(math.nan if skip else float(weight.grad is not None))
        return torch.cat([*parts, parts[0].new_tensor(there)])

    def unpack(self, tie: Tie, sums: Tensor) -> None:
        """Set the gradients to sums of what `packed` returned.

        The counts are looked at only for a weight without a gradient here: a GPU's host would wait for them.
        """
        weights = [self._live[name] for name in self._names[tie]]
        sizes = [numbers_of(weight).numel() for weight in weights]
        *parts, counts = torch.split(sums, [*sizes, len(weights)])
        for weight, part, count in zip(weights, parts, counts, strict=True):
            # A copy: clipping scales it in place, and another stage of the rank may take the same sums.
            gradient = torch.empty_like(weight)
            numbers_of(gradient).copy_(part.view_as(numbers_of(gradient)))
            weight.grad = gradient if weight.grad is not None or count.item() != 0 else None
