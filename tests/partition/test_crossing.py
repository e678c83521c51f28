"""What crosses from stage to stage, and how the layers on both sides treat it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from pipetrain.boundary import Example, TensorSpec
from pipetrain.partition.crossing import copies_output
from pipetrain.partition.estimate import estimate
from pipetrain.partition.network import Made, Slice


class HandOn(nn.Module):
    """Works on the first tensor and hands the others on, as a chain that carries its skips by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return (self.linear(tensors[0]), *tensors[1:])


class Keep(HandOn):
    """Keeps what it returns, as a layer that changes it in its next forward."""

    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.kept = tensors[1] + 1
        return (self.linear(tensors[0]), self.kept, tensors[2])


@pytest.mark.parametrize(("first", "kept"), [(HandOn, False), (Keep, True)])
def test_what_a_layer_keeps_is_known_behind_many_that_hand_it_on(first, kept):
    """Found once a layer: by every way that a tensor may have taken, it would be 3^40 looks."""
    model = nn.Sequential(first(), *(HandOn() for _ in range(40)))
    entry = Example((TensorSpec((4,), torch.float32),) * 3, single=False).of(2)
    layers = estimate(model, entry)
    leaves = tuple(Made(40, number) for number in range(3))
    assert copies_output(layers, Slice(0, 41, (), leaves)) is kept
    assert not copies_output(layers, Slice(1, 41, (), leaves))  # a copy came from another stage
