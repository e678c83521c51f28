"""What a layer costs and returns, worked out by hand; and that working it out leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipetrain.network.numerics import Numerics
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan import estimate as module
from pipetrain.plan.estimate import estimate
from tests.support import models
from tests.support.edges import Lambda
from tests.support.models import Fork, Join, Recompute, Through, tied
from tests.support.refusals import refusal


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> ValueSpec:
    return ValueSpec((TensorSpec(shape, dtype),))


IMAGES = spec(2, 3, 8, 8)


def conv() -> nn.Conv2d:
    return nn.Conv2d(3, 3, 1)


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


def test_work_on_trained_weights_is_counted_by_itself():
    gram = Lambda(lambda x: x.flatten(2) @ x.flatten(2).mT)
    frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), frozen, gram, nn.Linear(4, 4))
    for autocast in (False, True):
        made = estimate(model, IMAGES, Numerics(autocast=autocast))
        assert [layer.weight_flops for layer in made] == [2 * 3 * (2 * 4 * 64), 0, 0, 0, 2 * 4 * (2 * 4 * 4)]
        assert made[3].flops == 2 * 64 * (2 * 4 * 4) + 2 * 4 * 4


def test_a_shared_parameter_is_counted_where_it_stands():
    counted = [0, 48 * 48 + 48, 0, 48 * 48 + 48, 48 * 10 + 10]
    assert [layer.params for layer in estimate(tied(), spec(2, 3, 32, 32))] == counted


# What it returns


def test_tuples_are_boundaries_of_their_own_kind():
    layers = nn.Sequential(Fork(nn.Conv2d(3, 4, 1)), Through(nn.Conv2d(4, 3, 1)), Join())
    made = fork, through, join = estimate(layers, IMAGES)
    pair = (TensorSpec((2, 4, 8, 8), torch.float32), TensorSpec((2, 3, 8, 8), torch.float32))
    assert fork.output == ValueSpec(pair, single=False)
    assert fork.requires_grad == through.requires_grad == (True, False)  # the skip is the data
    assert through.output == ValueSpec((pair[1], pair[1]), single=False)
    assert join.output == spec(2, 3, 8, 8)
    assert [layer.reached for layer in made] == [(False,), (True, False), (True, False)]
    assert fork.flops == 2 * 3 * (2 * 4 * 64) + 2 * 4 * 64 + 2 * 3 * 64  # both its tensors are counted


def test_a_list_and_a_tuple_of_one_are_tuples():
    one = IMAGES.specs[0]
    (listed,) = estimate(nn.Sequential(Lambda(lambda x: [x, x])), IMAGES)
    assert listed.output.pack(("a", "b")) == ["a", "b"]  # to the loss as it is
    assert replace(listed.output, packing=None) == ValueSpec((one, one), single=False)
    assert listed.requires_grad == (False, False)
    assert listed.keeps_output  # it may change under the other name
    (once,) = estimate(nn.Sequential(Lambda(lambda x: (x,))), IMAGES)
    assert once.output == ValueSpec((one,), single=False)


def test_a_layer_that_writes_into_its_input_is_seen():
    for layer, writes in (
        (nn.Sequential(nn.Flatten(), nn.Dropout(inplace=True)), True),  # a view first
        (Lambda(lambda x: (x.view(-1).mul_(2), x)[1]), True),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)), False),
    ):
        before, seen = estimate(nn.Sequential(nn.Identity(), layer), IMAGES)
        assert (bool(before.writes), bool(seen.writes)) == (False, writes)


def test_batchnorm_over_one_value_a_channel_is_refused_in_training_alone():
    model = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4))
    one = spec(1, 3, 8, 8)
    assert "layer 1 (1) of the model cannot take float32[1, 4, 1, 1]" in refusal(lambda: estimate(model, one))
    assert estimate(model, one, training=False)[1].output == spec(1, 4, 1, 1)


# With and without numbers


class Sometimes(nn.Module):
    """Leaves a layer out at random, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) if torch.rand(()) < 0.5 else x


READS = Lambda(lambda x: x * (1 + x.sum().item()))
NUMPY = Lambda(lambda x: x * float(x.detach().numpy().std()))


@pytest.mark.parametrize("layer", [READS, Sometimes(), NUMPY, nn.BatchNorm2d(4, momentum=None)])
def test_a_layer_is_run_on_copies_and_leaves_no_trace(layer):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.BatchNorm2d(4), nn.Flatten()).train()
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    random = torch.get_rng_state()
    made = estimate(model, IMAGES)
    assert [m.output for m in made] == [spec(2, 4, 6, 6)] * 3 + [spec(2, 144)]
    assert made[1].params == sum(p.numel() for p in layer.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(p.grad is None and p.requires_grad for p in parameters)
    assert isinstance(model(torch.randn(2, 3, 8, 8)), Tensor)  # and it still computes


@pytest.mark.parametrize("build", [models.small, models.recomputing_reentrant, models.tied])
def test_a_dear_model_is_estimated_without_numbers_and_alike(monkeypatch, build):
    entry, kinds = spec(2, 3, 32, 32), []
    cheap = estimate(build(), entry)
    monkeypatch.setattr(module, "CHEAP", -1)
    assert estimate(build(), entry) == cheap
    sees = Lambda(lambda x: kinds.append(type(x)) or x)
    estimate(nn.Sequential(nn.Conv2d(3, 4, 3), READS, sees, nn.ReLU()), entry)
    assert kinds == [FakeTensor]  # numbers for the one layer that reads them


def test_a_layer_that_cannot_run_here_is_planned_all_the_same():
    def for_a_gpu(x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            raise NotImplementedError("no such kernel for the CPU")
        return x * 2

    made = estimate(nn.Sequential(nn.Conv2d(3, 4, 3), Lambda(for_a_gpu), nn.ReLU()), IMAGES)
    assert [m.output for m in made] == [spec(2, 4, 6, 6)] * 3


# Which gradients are needed


class Keep(nn.Module):
    """x -> (layer(x), a mask of it, something that nobody uses)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = conv(), conv()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x), (x > 0).to(x.dtype), self.unused(x)


class NoGradient(torch.autograd.Function):
    """Has a gradient for its input, as its graph has it, and gives none."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


DROP = Lambda(lambda triple: triple[0] + triple[1].log().clamp(min=-9))


@pytest.mark.parametrize(
    ("layers", "reached"),
    [
        ((nn.ReLU(), conv(), nn.ReLU()), [(False,), (True,)]),
        ((conv().requires_grad_(False), nn.ReLU(), conv()), [(False,), (False,)]),
        ((Keep(), DROP, conv()), [(True, False, False), (True,)]),
        ((conv(), Lambda(NoGradient.apply), conv()), [(False,), (True,)]),
        ((conv(), Recompute(nn.Sequential(conv(), nn.Tanh()), True), nn.ReLU()), [(True,), (True,)]),
    ],
)
def test_a_gradient_is_needed_where_it_leads_from_the_loss_to_a_weight(layers, reached):
    model = nn.Sequential(*layers)
    assert [layer.reached for layer in estimate(model, IMAGES)] == [(False,), *reached]
    assert all(p.grad is None for p in model.parameters())


# What a layer keeps, and what it uses of others


class State(nn.Module):
    """Hands on what it keeps, and changes it each time."""

    def __init__(self, how: Callable[[State, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 3, 8, 8))
        self.kept: list[Tensor] = [torch.zeros(2, 3, 8, 8)]
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.how(self, x)


def test_a_layer_that_hands_on_what_it_keeps_is_seen():
    for how, keeps in (
        (lambda self, x: self.state + x, False),
        (lambda self, x: self.state.add_(1), True),
        (lambda self, x: self.kept[0].copy_(x), True),
        (lambda self, x: self.last, True),
    ):
        layer = State(how)
        (seen,) = estimate(nn.Sequential(layer), IMAGES, training=False)
        assert seen.keeps_output is keeps
        assert bool((layer.state == 0).all())
        assert not hasattr(layer, "last")  # it is as it was


def borrows(tensor: Tensor) -> Lambda:
    """A layer that uses another one's tensor, which it has hidden from the registries."""
    return Lambda(lambda x: x * tensor.sum())


class Late(nn.Module):
    """Makes its buffer when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.zeros(1) if self.seen is None else self.seen + 1
        return x


class Renormed(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / 2
        return super().forward(x)


SHARED, KEPT = conv(), []
HIDES, FINDS = Lambda(lambda x: KEPT.append(x) or x), Lambda(lambda x: x + KEPT.pop())


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ((nn.Conv2d(3, 4, 3), nn.Conv2d(5, 4, 3)), "1 (1) of the model cannot take float32[2, 4, 6, 6]: "),
        ((SHARED, borrows(SHARED.weight.detach())), "1 (1) of the model uses parameter 0.weight, which is"),
        ((conv(), borrows(nn.Parameter(torch.ones(3)))), "1 (1) of the model uses a parameter [3] of no"),
        ((conv(), HIDES, FINDS), "2 (2) of the model uses a tensor [2, 3, 8, 8] that a layer before it has"),
        ((Renormed(3, 3, 1),), "0 (0) of the model replaces the data of a parameter or of its input"),
        ((conv(), Late()), "1 (1) of the model makes its seen when it first runs; make it when"),
    ],
)
def test_what_no_weight_version_or_checkpoint_would_follow_is_refused(layers, says):
    assert refusal(lambda: estimate(nn.Sequential(*layers), IMAGES)).startswith(f"layer {says}")


def test_what_trains_nothing_is_no_one_s_but_known():
    norm = nn.BatchNorm2d(3)
    made = estimate(nn.Sequential(norm, borrows(norm.running_mean), borrows(torch.ones(3))), IMAGES)
    assert [layer.borrows for layer in made] == [(), ("0.running_mean",), ()]
    assert [len(layer.foreign) for layer in made] == [0, 0, 1]
    assert len(estimate(nn.Sequential(nn.ReLU(), HIDES, FINDS), IMAGES)) == 3


def test_a_parameter_in_a_list_or_a_plain_attribute_is_a_registered_one():
    class Tied(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.tied, self.named = [weight], {"w": weight}
            object.__setattr__(self, "plain", weight)
            vars(self)["plain"] = weight

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.tied[0].sum() + self.named["w"].sum() + self.plain.sum())

    first = conv()
    made = estimate(nn.Sequential(first, Tied(first.weight), nn.ReLU()), IMAGES)
    assert [layer.reached for layer in made] == [(False,), (True,), (True,)]
