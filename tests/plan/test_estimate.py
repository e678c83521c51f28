"""What a layer costs and returns, worked out by hand; and that working it out leaves no trace."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipetrain.errors import ConfigError
from pipetrain.network.numerics import Numerics
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan import estimate as module
from pipetrain.plan.estimate import estimate
from tests.support import models
from tests.support.models import Fork, Join, Recompute, Through, tied


def spec(*shape: int, dtype: torch.dtype = torch.float32) -> ValueSpec:
    return ValueSpec((TensorSpec(shape, dtype),))


IMAGES = spec(2, 3, 8, 8)


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
    assert fork.output == ValueSpec(pair, single=False)
    assert fork.needs_grad == fork.requires_grad == (True, False)  # the skip is the data
    assert through.output == ValueSpec((pair[1], pair[1]), single=False)
    assert through.needs_grad == through.requires_grad == (True, False)
    assert join.output == spec(2, 3, 8, 8)
    assert join.needs_grad == join.requires_grad == (True,)
    assert fork.flops == 2 * 3 * (2 * 4 * 64) + 2 * 4 * 64 + 2 * 3 * 64  # both its tensors are counted


@pytest.mark.parametrize("autocast", [False, True])
def test_work_on_trained_weights_is_counted_by_itself(autocast):
    class Gram(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(2) @ x.flatten(2).mT

    numerics = Numerics(autocast=autocast)
    conv, norm, gram, linear = estimate(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), Gram(), nn.Linear(4, 4)), IMAGES, numerics
    )
    assert conv.weight_flops == 2 * 3 * (2 * 4 * 64)
    assert (norm.weight_flops, gram.weight_flops) == (0, 0)
    assert gram.flops == 2 * 64 * (2 * 4 * 4) + 2 * 4 * 4
    assert linear.weight_flops == 2 * 4 * (2 * 4 * 4)
    frozen = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))
    frozen[0].weight.requires_grad_(False)
    assert [layer.weight_flops for layer in estimate(frozen, IMAGES)] == [0, 2 * 4 * (2 * 4 * 64)]


class Listed(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x, x]


class Once(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x,)


def test_a_list_and_a_tuple_of_one_are_tuples():
    one = TensorSpec((2, 3, 8, 8), torch.float32)
    (listed,) = estimate(nn.Sequential(Listed()), IMAGES)
    assert listed.output.pack(("a", "b")) == ["a", "b"]  # to the loss as it is
    assert replace(listed.output, packing=None) == ValueSpec((one, one), single=False)
    assert listed.needs_grad == listed.requires_grad == (False, False)
    assert estimate(nn.Sequential(Once()), IMAGES)[0].output == ValueSpec((one,), single=False)


class Labels(nn.Module):
    """Returns an integer tensor beside a floating-point one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.flatten(1).argmax(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtypes_are_those_that_the_model_makes(dtype):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), Labels()).to(dtype)
    made = estimate(model, spec(2, 3, 8, 8, dtype=dtype))
    assert made[1].output == spec(2, 4, 6, 6, dtype=dtype)
    assert made[2].output.specs == (
        TensorSpec((2, 4, 6, 6), dtype),
        TensorSpec((2,), torch.int64),
    )
    assert made[2].needs_grad == (True, False)


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
        (ViewInPlace(), True),
        (nn.ReLU(), False),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)), False),
    ],
)
def test_a_layer_that_writes_into_its_input_is_seen(layer, writes):
    before, seen = estimate(nn.Sequential(nn.Identity(), layer), IMAGES)
    assert not before.writes
    assert bool(seen.writes) is writes


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
    one = spec(1, 3, 8, 8)
    with pytest.raises(ConfigError, match=r"layer 1 \(1\) .* float32\[1, 4, 1, 1\].*more than 1 value"):
        estimate(model, one)
    assert estimate(model, one, training=False)[1].output == spec(1, 4, 1, 1)


# Layers that read numbers


class Reads(nn.Module):
    """Scales by a number that it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + x.sum().item())


class Sometimes(nn.Module):
    """Leaves a layer out at random, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) if torch.rand(()) < 0.5 else x


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[x > 0].mean()


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.detach().numpy().std())


@pytest.mark.parametrize(
    "layer", [Reads(), Sometimes(), Picks(), Numpy(), nn.BatchNorm2d(4, momentum=None)], ids=repr
)
def test_a_layer_that_reads_numbers_is_run_for_real_on_copies(layer):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.ReLU(), nn.Flatten())
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    made = estimate(model, IMAGES)
    assert [m.output for m in made] == [spec(2, 4, 6, 6)] * 3 + [spec(2, 144)]
    assert made[1].params == sum(p.numel() for p in layer.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


class Sees(nn.Identity):
    """Notes what kind of tensor it gets."""

    def __init__(self, kinds: list[type]) -> None:
        super().__init__()
        self.kinds = (kinds,)

    def forward(self, x: Tensor) -> Tensor:
        self.kinds[0].append(type(x))
        return x


@pytest.mark.parametrize("build", [models.small, models.recomputing_reentrant, models.caching, models.tied])
def test_a_dear_model_is_estimated_without_numbers_and_alike(monkeypatch, build):
    entry, kinds = spec(2, 3, 32, 32), []
    cheap = estimate(build(), entry)
    monkeypatch.setattr(module, "CHEAP", -1)
    assert estimate(build(), entry) == cheap
    estimate(nn.Sequential(nn.Conv2d(3, 4, 3), Reads(), Sees(kinds), nn.ReLU()), entry)
    assert kinds == [FakeTensor]  # numbers for the one layer that reads them


class OnGpu(nn.Conv2d):
    """Has a kernel for a GPU, which a machine that plans need not have."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            raise NotImplementedError("no such kernel for the CPU")
        return super().forward(x)


def test_many_cheap_layers_are_not_all_kept_in_memory(monkeypatch):
    monkeypatch.setattr(module, "MOST_KEPT", 3 * IMAGES.nbytes)
    kinds: list[type] = []
    estimate(nn.Sequential(*(Sees(kinds) for _ in range(5))), IMAGES)
    assert kinds == [Tensor] * 3 + [FakeTensor] * 2


def test_a_layer_that_cannot_run_here_is_planned_all_the_same():
    made = estimate(nn.Sequential(nn.Conv2d(3, 4, 3), OnGpu(4, 4, 1), nn.ReLU()), IMAGES)
    assert [m.output for m in made] == [spec(2, 4, 6, 6)] * 3


# Which gradients are needed


class Keep(nn.Module):
    """x -> (layer(x), a mask of it, something that nobody uses)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.layer(x), (x > 0).to(x.dtype), self.unused(x)


class Drop(nn.Module):
    def forward(self, triple: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return triple[0] + triple[1].log().clamp(min=-9)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


class Stop(nn.Module):
    """Has a gradient for its input, as its graph has it, and gives none."""

    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(x)


def needs(*layers: nn.Module) -> list[tuple[bool, ...] | None]:
    return [layer.needs_grad for layer in estimate(nn.Sequential(*layers), IMAGES)]


def test_a_gradient_is_needed_where_it_leads_from_the_loss_to_a_weight():
    conv = nn.Conv2d(3, 3, 1)
    assert needs(nn.ReLU(), conv, nn.ReLU()) == [(False,), (True,), (True,)]
    frozen = nn.Conv2d(3, 3, 1).requires_grad_(False)
    assert needs(frozen, nn.ReLU(), conv) == [(False,), (False,), (True,)]
    assert needs(Keep(), Drop(), conv) == [(True, False, False), (True,), (True,)]
    assert needs(conv, Stop(), conv) == [(False,), (True,), (True,)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_recomputes_needs_what_it_needs_without(reentrant):
    layer = Recompute(nn.Sequential(nn.Conv2d(3, 3, 1), nn.Tanh()), reentrant)
    assert needs(nn.Conv2d(3, 3, 1), layer, nn.ReLU()) == [(True,)] * 3
    assert all(p.grad is None for p in layer.parameters())


# What a layer keeps, and what it uses of others


class State(nn.Module):
    """Hands on its own buffer beside what it is given, and changes it each time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 3, 8, 8))
        self.kept: list[Tensor] = [torch.zeros(2, 3, 8, 8)]
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "copy":
            return self.state + x
        if self.how == "plain":
            self.kept[0].copy_(x)
            return self.kept[0]
        if self.how == "cached":
            self.last = x * 2
            return self.last
        return self.state.add_(1) if self.how == "buffer" else x


@pytest.mark.parametrize(
    ("how", "keeps"),
    [("copy", False), ("through", False), ("buffer", True), ("plain", True), ("cached", True)],
)
def test_a_layer_that_hands_on_what_it_keeps_is_seen(how, keeps):
    layer = State(how)
    (seen,) = estimate(nn.Sequential(layer), IMAGES, training=False)
    assert seen.keeps_output is keeps
    assert bool((layer.state == 0).all())
    assert not hasattr(layer, "last")  # it is as it was


def test_a_tensor_that_is_returned_twice_may_change_under_the_other_name():
    assert estimate(nn.Sequential(Listed()), IMAGES)[0].keeps_output


class Borrows(nn.Module):
    """Uses another layer's tensor that it has hidden from the registries."""

    def __init__(self, tensor: object) -> None:
        super().__init__()
        self.hidden = (tensor,)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.hidden[0].sum()


class Calls(Borrows):
    """Calls a layer that it has hidden."""

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](x)


def test_a_parameter_outside_of_the_registries_is_refused():
    conv, norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
    for hidden, says in (
        (conv.weight, r"layer 1 \(1\) of the model uses parameter 0.weight, which is not registered in it"),
        (conv.weight.detach(), "uses parameter 0.weight"),  # it would read the newest one
        (nn.Parameter(torch.ones(3)), r"uses a parameter \[3\] of no layer"),
    ):
        with pytest.raises(ConfigError, match=says):
            estimate(nn.Sequential(conv, Borrows(hidden)), IMAGES)
    with pytest.raises(ConfigError, match=r"layer 1 \(1\) of the model uses parameter 2\."):
        estimate(nn.Sequential(nn.ReLU(), Calls(conv), conv), IMAGES)
    made = estimate(nn.Sequential(norm, Borrows(norm.running_mean), Borrows(torch.ones(3))), IMAGES)
    assert [layer.borrows for layer in made] == [(), ("0.running_mean",), ()]


class Keeps(nn.Module):
    """Keeps what it is given where another layer finds it."""

    def __init__(self, kept: list[Tensor]) -> None:
        super().__init__()
        self.kept = (kept,)

    def forward(self, x: Tensor) -> Tensor:
        self.kept[0].append(x)
        return x


class Finds(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.kept[0].pop()


def test_a_tensor_that_does_not_go_from_layer_to_layer_is_refused():
    kept: list[Tensor] = []
    with pytest.raises(
        ConfigError, match=r"layer 2 \(2\) of the model uses a tensor \[2, 3, 8, 8\] that a lay"
    ):
        estimate(nn.Sequential(nn.Conv2d(3, 3, 1), Keeps(kept), Finds(kept)), IMAGES)
    assert len(estimate(nn.Sequential(nn.ReLU(), Keeps(kept), Finds(kept)), IMAGES)) == 3  # it trains nothing


class Renormed(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data / self.weight.data.norm()
        return super().forward(x)


class InPlace(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return super().forward(x)


class Late(nn.Module):
    """Makes its buffer when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.zeros(1) if self.seen is None else self.seen + 1
        return x


def test_what_no_weight_version_or_checkpoint_would_follow_is_refused():
    with pytest.raises(ConfigError, match=r"layer 0 \(0\) of the model replaces the data of a parameter or "):
        estimate(nn.Sequential(Renormed(3, 3, 1)), IMAGES)
    assert estimate(nn.Sequential(InPlace(3, 3, 1)), IMAGES)
    with pytest.raises(
        ConfigError, match=r"layer 1 \(1\) of the model makes its seen when it first runs; make"
    ):
        estimate(nn.Sequential(nn.Conv2d(3, 3, 1), Late()), IMAGES)


def test_a_parameter_in_a_list_or_a_plain_attribute_is_a_registered_one():
    class Tied(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.tied, self.named = [weight], {"w": weight}
            object.__setattr__(self, "plain", weight)
            vars(self)["plain"] = weight

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.tied[0].sum() + self.named["w"].sum() + self.plain.sum())

    conv = nn.Conv2d(3, 3, 1)
    assert needs(conv, Tied(conv.weight), nn.ReLU()) == [(True,)] * 3


def test_a_shared_parameter_is_counted_where_it_stands():
    assert [layer.params for layer in estimate(tied(), spec(2, 3, 32, 32))] == [
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
