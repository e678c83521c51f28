"""What layers make of other lengths: by the trace, and by a run without numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError
from pipetrain.model.chain import network_of
from pipetrain.model.numerics import Numerics
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import estimate
from pipetrain.plan.layer_shapes import LayerShapes

IMAGES = ValueSpec((TensorSpec((2, -1, -2), torch.float32),), longest=(9, 12))


def layers() -> list[nn.Module]:
    return [nn.Conv2d(2, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Flatten(2), nn.Linear(20, 3)]


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers()[:3])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def shapes(model: nn.Module, size: Size, training: bool) -> list[tuple[int, ...]]:
    network = network_of(model, IMAGES)
    full, numerics = Size(2, IMAGES.longest), Numerics()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    estimated = estimate(network.spare(), IMAGES.of(full), numerics, training)
    found = LayerShapes(network, estimated, IMAGES, numerics, training)(size)
    assert all(map(torch.equal, before, model.state_dict().values()))
    return [value.specs[0].shape for value in found]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", [Size(3, (9, 12)), Size(1, (5, 8)), Size(4, (10, 3))])
def test_shapes_are_those_of_a_run(size, training):
    """Convolutions round down, so that no shape is linear in a length; the last two are multiplied."""
    x, expected = torch.zeros(IMAGES.of(size).specs[0].shape), []
    for layer in layers()[:3]:
        x = layer.train(training)(x)
        expected.append(tuple(x.shape))
    assert shapes(nn.Sequential(*layers()[:3]), size, training) == expected
    assert shapes(Whole(), size, training)[-1] == expected[-1]


def test_a_layer_that_cannot_take_a_length_is_named():
    with pytest.raises(
        ConfigError, match=r"layer 3 \(3\) of the model cannot take 2 samples of length 9 x 8"
    ):
        shapes(nn.Sequential(*layers()), Size(2, (9, 8)), True)
