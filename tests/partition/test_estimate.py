"""What a layer costs and returns, worked out by hand; and that working it out leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pipetrain.boundary import Boundary, TensorSpec
from pipetrain.errors import ConfigError
from pipetrain.partition.estimate import estimate, list_layers
from tests.support.models import Fork, Join, Through, tied

IMAGES = TensorSpec((2, 3, 8, 8), torch.float32)


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> Boundary:
    return Boundary((TensorSpec(shape, dtype),))


def test_a_convolution_and_a_linear_layer_by_hand():
    conv, flatten, linear = estimate(
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 5)), IMAGES
    )
    # Each of 2 x 4 x 8 x 8 output elements is a sum of 3 x 3 x 3 products, and counts once itself.
    assert (conv.params, conv.flops) == (4 * 27 + 4, 2 * 27 * (2 * 4 * 64) + 2 * 4 * 64)
    assert conv.output == spec(2, 4, 8, 8)
    assert (flatten.params, flatten.flops, flatten.output) == (0, 512, spec(2, 256))
    assert (linear.params, linear.flops) == (256 * 5 + 5, 2 * 256 * (2 * 5) + 2 * 5)
    assert linear.output == spec(2, 5)


def test_work_goes_with_the_microbatch():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    small, large = (estimate(model, TensorSpec((n, 3, 8, 8), torch.float32)) for n in (1, 6))
    assert [layer.flops * 6 for layer in small] == [layer.flops for layer in large]
    assert [layer.params for layer in small] == [layer.params for layer in large]


def test_it_computes_nothing_and_leaves_no_trace():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten()).train()
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    random = torch.get_rng_state()
    estimate(model, IMAGES)
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert model[1].num_batches_tracked == 0
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(p.grad is None and p.requires_grad for p in parameters)
    assert model.training
    assert isinstance(model(torch.randn(2, 3, 8, 8)), Tensor)  # and it still computes


def test_tuples_are_boundaries_of_their_own_kind():
    fork, through, join = estimate(
        nn.Sequential(
            Fork(nn.Conv2d(3, 4, 1)),
            Through(nn.Conv2d(4, 3, 1)),
            Join(),
        ),
        IMAGES,
    )
    pair = (TensorSpec((2, 4, 8, 8), torch.float32), TensorSpec((2, 3, 8, 8), torch.float32))
    assert fork.output == Boundary(pair, single=False)
    assert through.output == Boundary((pair[1], pair[1]), single=False)
    assert join.output == spec(2, 3, 8, 8)
    assert fork.flops == 2 * 3 * (2 * 4 * 64) + 2 * 4 * 64 + 2 * 3 * 64  # both its tensors are counted


class Listed(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x, x]


class Once(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


def test_a_list_and_a_tuple_of_one_are_tuples():
    assert estimate(nn.Sequential(Listed()), IMAGES)[0].output == Boundary(
        (TensorSpec((2, 3, 8, 8), torch.float32),) * 2, single=False
    )
    assert estimate(nn.Sequential(Once()), IMAGES)[0].output == Boundary(
        (TensorSpec((2, 3, 8, 8), torch.float32),), single=False
    )


class Labels(nn.Module):
    """Returns an integer tensor beside a floating-point one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.flatten(1).argmax(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_are_those_that_the_model_makes(dtype):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Labels()).to(dtype)
    made = estimate(model, TensorSpec((2, 3, 8, 8), dtype))
    assert made[1].output == spec(2, 4, 6, 6, dtype=dtype)
    assert made[2].output.specs == (
        TensorSpec((2, 4, 6, 6), dtype),
        TensorSpec((2,), torch.int64),
    )
    assert made[2].output.gradients == (TensorSpec((2, 4, 6, 6), dtype),)


class LateInPlace(nn.Module):
    """Writes into what it has made, not into what it was given."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1).relu_()


class ViewInPlace(nn.Module):
    """Writes into what it was given, through a view."""

    def forward(self, x: Tensor) -> Tensor:
        x.view(-1).mul_(2)
        return x


@pytest.mark.parametrize(
    ("layer", "writes"),
    [
        (nn.ReLU(inplace=True), True),
        (nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1)), True),
        (nn.Sequential(nn.Flatten(), nn.Dropout(inplace=True)), True),  # a view first
        (nn.Hardtanh(inplace=True), True),
        (ViewInPlace(), True),
        (nn.ReLU(), False),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)), False),
        (LateInPlace(), False),
    ],
)
def test_a_layer_that_writes_into_its_input_is_seen(layer, writes):
    before, seen = estimate(nn.Sequential(nn.Identity(), layer), IMAGES)
    assert not before.writes_input
    assert seen.writes_input is writes


def test_a_layer_that_cannot_take_its_input_is_named():
    model = nn.Sequential()
    model.add_module("stem", nn.Conv2d(3, 4, 3))
    model.add_module("narrow", nn.Conv2d(5, 4, 3))
    with pytest.raises(ConfigError) as refusal:
        estimate(model, IMAGES)
    said = str(refusal.value)
    assert said.startswith("layer 1 (narrow) of the model cannot take float32[2, 4, 6, 6]: ")
    assert "\n" not in said


def test_batchnorm_over_one_value_a_channel_is_refused_in_training_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4))
    one = TensorSpec((1, 3, 8, 8), torch.float32)
    with pytest.raises(ConfigError, match=r"layer 1 \(1\) .* float32\[1, 4, 1, 1\].*more than 1 value"):
        estimate(model, one)
    assert estimate(model.eval(), one)[1].output == spec(1, 4, 1, 1)


def test_a_layer_that_reads_numbers_is_refused_and_named():
    class Reads(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    with pytest.raises(ConfigError, match=r"layer 0 \(0\) of the model cannot take"):
        estimate(nn.Sequential(Reads()), IMAGES)


def test_a_shared_parameter_is_counted_where_it_stands():
    assert [layer.params for layer in estimate(tied(), TensorSpec((2, 3, 32, 32), torch.float32))] == [
        *(0, 48 * 48 + 48, 0, 48 * 48 + 48, 48 * 10 + 10)
    ]

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)
            self.b = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    (layer,) = estimate(nn.Sequential(Twice()), IMAGES)
    assert layer.params == 8 * 8 + 8


def test_layers_are_listed_with_their_numbers():
    made = estimate(nn.Sequential(nn.ReLU(), nn.Flatten()), IMAGES)
    assert list_layers(made) == "0 0, 1 1"
