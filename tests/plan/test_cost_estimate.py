"""What a layer costs and returns, worked out by hand; and that working it out leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipetrain.errors import ConfigError
from pipetrain.model.chain import Chain
from pipetrain.model.numerics import Numerics
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.plan import cost_estimate as module
from pipetrain.plan.cost_estimate import Layer, estimate, estimates, with_gradients
from tests.support import models
from tests.support.edge_case_models import Lambda
from tests.support.models import Fork, Join, Recompute, Through
from tests.support.refusals import refusal


def spec(*shape: int) -> ValueSpec:
    return ValueSpec((TensorSpec(shape, torch.float32),))


IMAGES = spec(2, 3, 8, 8)


def layers_of(*layers: nn.Module, **options: object) -> list[Layer]:
    return estimate(nn.Sequential(*layers), IMAGES, **options)  # type: ignore[arg-type]


def conv() -> nn.Conv2d:
    return nn.Conv2d(3, 3, 1)


def test_work_is_counted_by_hand_and_that_on_trained_weights_by_itself():
    gram = Lambda(lambda x: x.flatten(2) @ x.flatten(2).mT)
    frozen = nn.Conv2d(4, 4, 1).requires_grad_(False)
    model = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), frozen, gram, nn.Linear(4, 4)
    for autocast in (False, True):
        first, norm, _, squares, last = made = layers_of(*model, numerics=Numerics(autocast=autocast))
        # Each of 2 x 4 x 8 x 8 output elements is a sum of 3 x 3 x 3 products, and counts once itself.
        assert (first.params, first.flops) == (4 * 27 + 4, 2 * 27 * (2 * 4 * 64) + 2 * 4 * 64)
        assert (norm.params, norm.flops) == (8, 2 * 4 * 64)
        assert squares.flops == 2 * 64 * (2 * 4 * 4) + 2 * 4 * 4
        assert (last.params, last.flops) == (20, 2 * 4 * (2 * 4 * 4) + 2 * 4 * 4)
        assert [one.weight_flops for one in made] == [2 * 27 * (2 * 4 * 64), 0, 0, 0, 2 * 4 * (2 * 4 * 4)]
    shared = [0, 48 * 48 + 48, 0, 48 * 48 + 48, 48 * 10 + 10]  # a weight counts where it stands
    assert [layer.params for layer in estimate(models.tied(), spec(2, 3, 32, 32))] == shared


def test_operations_have_a_checksum_with_their_numbers_also_without_those_of_weights():
    def layers() -> list[nn.Module]:
        encoder = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        return [nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(1, 2), encoder]

    made = [one.operations for one in layers_of(*layers())]
    with torch.device("meta"):
        assert [one.operations for one in layers_of(*layers())] == made
    others = [nn.Conv2d(3, 3, 1, stride=2, padding=4), nn.BatchNorm2d(3, momentum=0.2), nn.Dropout(0.4)]
    apart = [one.operations for one in layers_of(*others)]
    assert [a == b for a, b in zip(made, apart, strict=False)] == [False] * 3
    assert layers_of(nn.ReLU(), conv())[0].operations != layers_of(nn.Tanh(), conv())[0].operations


# What it returns


def test_tuples_and_lists_are_boundaries_of_their_own_kind():
    made = fork, through, join = layers_of(Fork(nn.Conv2d(3, 4, 1)), Through(nn.Conv2d(4, 3, 1)), Join())
    image = IMAGES.specs[0]
    assert fork.output == ValueSpec((TensorSpec((2, 4, 8, 8), torch.float32), image), single=False)
    assert fork.requires_grad == through.requires_grad == (True, False)  # the skip is the data
    assert (through.output, join.output) == (ValueSpec((image, image), single=False), IMAGES)
    assert [layer.reached for layer in made] == [(False,), (True, False), (True, False)]
    assert fork.flops == 2 * 3 * (2 * 4 * 64) + 2 * 4 * 64 + 2 * 3 * 64  # both its tensors are counted
    (listed,) = layers_of(Lambda(lambda x: [x, x]))
    assert listed.output.pack(("a", "b")) == ["a", "b"]  # to the loss as it is
    assert replace(listed.output, packing=None) == through.output
    assert (listed.requires_grad, listed.keeps_output) == ((False, False), True)  # it has two names
    assert layers_of(Lambda(lambda x: (x,)))[0].output == ValueSpec((image,), single=False)


def test_a_layer_that_writes_into_its_input_is_seen():
    for layer, writes in (
        (nn.Sequential(nn.Flatten(), nn.Dropout(inplace=True)), True),  # a view first
        (Lambda(lambda x: (x.view(-1).mul_(2), x)[1]), True),
        (nn.Sequential(conv(), nn.ReLU(inplace=True)), False),
    ):
        before, seen = layers_of(nn.Identity(), layer)
        assert (bool(before.writes), bool(seen.writes)) == (False, writes)


# With and without numbers


class Sometimes(nn.Module):
    """Leaves a layer out at random, as stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = conv()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x) if torch.rand(()) < 0.5 else x


READS = Lambda(lambda x: x * (1 + x.sum().item()))
NUMPY = Lambda(lambda x: x * float(x.detach().numpy().std()))


@pytest.mark.parametrize("layer", [READS, Sometimes(), NUMPY, nn.BatchNorm2d(3, momentum=None)])
def test_a_layer_is_run_on_copies_and_leaves_no_trace(layer):
    model = nn.Sequential(conv(), layer, nn.BatchNorm2d(3)).train()
    before, parameters = copy.deepcopy(model.state_dict()), list(model.parameters())
    random = torch.get_rng_state()
    assert [one.output for one in estimate(model, IMAGES)] == [IMAGES] * 3
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
    layers_of(conv(), READS, Lambda(lambda x: kinds.append(type(x)) or x), nn.ReLU())
    assert kinds == [FakeTensor]  # numbers for the one layer that reads them


def test_a_layer_that_cannot_run_here_is_planned_all_the_same():
    def for_a_gpu(x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            raise NotImplementedError("no such kernel for the CPU")
        return x * 2

    assert [one.output for one in layers_of(conv(), Lambda(for_a_gpu), nn.ReLU())] == [IMAGES] * 3


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


class Unregistered(nn.Module):
    """Holds another layer's weight in a list and as a plain attribute: that is as good as registered."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.tied, self.named = [weight], {"w": weight}
        vars(self)["plain"] = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.tied[0].sum() + self.named["w"].sum() + self.plain.sum())


DROP = Lambda(lambda triple: triple[0] + triple[1].log().clamp(min=-9))
SHARED, KEPT = conv(), []


@pytest.mark.parametrize(
    ("layers", "reached"),
    [
        ((nn.ReLU(), conv(), nn.ReLU()), [(False,), (True,)]),
        ((conv().requires_grad_(False), nn.ReLU(), conv()), [(False,), (False,)]),
        ((Keep(), DROP, conv()), [(True, False, False), (True,)]),
        ((conv(), Lambda(NoGradient.apply), conv()), [(False,), (True,)]),
        ((conv(), Recompute(nn.Sequential(conv(), nn.Tanh()), True), nn.ReLU()), [(True,), (True,)]),
        ((SHARED, Unregistered(SHARED.weight), nn.ReLU()), [(True,), (True,)]),
    ],
)
def test_a_gradient_is_needed_where_it_leads_from_the_loss_to_a_weight(layers, reached):
    assert [layer.reached for layer in layers_of(*layers)] == [(False,), *reached]
    assert all(p.grad is None for layer in layers for p in layer.parameters())


def test_an_output_that_the_loss_does_not_use_needs_no_gradient():
    made = layers_of(Fork(conv()), Lambda(lambda both: (both[1] * 2, both[0])), Lambda(lambda both: both))
    found = {
        used: [one.reached for one in with_gradients(made, used)] for used in ((True, False), (False, True))
    }
    assert found[True, False] == [(False,), (False, False), (False, False)]
    assert found[False, True] == [(False,), (True, False), (False, True)]


# What a layer keeps, and what it uses of others


class State(nn.Module):
    """Hands on what it keeps, and changes it each time."""

    def __init__(self, how: Callable[[State, Tensor], Tensor]) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 3, 8, 8))
        self.kept, self.how = [torch.zeros(2, 3, 8, 8)], how

    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.how(self, x)


def test_a_layer_that_hands_on_what_it_keeps_is_seen_and_is_as_it_was():
    for how, keeps in (
        (lambda self, x: self.state + x, False),
        (lambda self, x: self.state.add_(1), True),
        (lambda self, x: self.kept[0].copy_(x), True),
        (lambda self, x: self.last, True),
    ):
        layer = State(how)
        (seen,) = layers_of(layer, training=False)
        assert (seen.keeps_output, bool((layer.state == 0).all())) == (keeps, True)
        assert not hasattr(layer, "last")


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


HIDES, FINDS = Lambda(lambda x: KEPT.append(x) or x), Lambda(lambda x: x + KEPT.pop())
ONE_VALUE = nn.Conv2d(3, 4, 8), nn.Flatten(0), nn.Unflatten(0, (1, 8)), nn.BatchNorm1d(8)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ((nn.Conv2d(3, 4, 3), nn.Conv2d(5, 4, 3)), "1 (1) of the model cannot take float32[2, 4, 6, 6]: "),
        (ONE_VALUE, "3 (3) of the model cannot take float32[1, 8]: Expected more than 1 value"),
        ((SHARED, borrows(SHARED.weight.detach())), "1 (1) of the model uses parameter 0.weight, which is"),
        ((conv(), borrows(nn.Parameter(torch.ones(3)))), "1 (1) of the model uses a parameter [3] of no"),
        ((conv(), HIDES, FINDS), "2 (2) of the model uses a tensor [2, 3, 8, 8] that a layer before it has"),
        ((Renormed(3, 3, 1),), "0 (0) of the model replaces the data of a parameter or of its input"),
        ((conv(), Late()), "1 (1) of the model makes its seen when it first runs; make it when"),
    ],
)
def test_what_cannot_run_or_no_weight_version_or_checkpoint_would_follow_is_refused(layers, says):
    assert refusal(lambda: layers_of(*layers)).startswith(f"layer {says}")


def test_what_an_evaluation_or_no_training_may_do():
    assert len(layers_of(*ONE_VALUE, training=False)) == 4
    norm = nn.BatchNorm2d(3)
    made = layers_of(norm, borrows(norm.running_mean), borrows(torch.ones(3)))
    assert [layer.borrows for layer in made] == [(), ("0.running_mean",), ()]
    assert [len(layer.foreign) for layer in made] == [0, 0, 1]
    assert len(layers_of(nn.ReLU(), HIDES, FINDS)) == 3


def test_microbatches_of_a_short_batch_that_a_layer_does_not_take_are_refused_with_what_to_do():
    """An evaluation takes them; where full ones are not taken, no other batch would help."""
    model = Chain(nn.Sequential(nn.BatchNorm1d(3)))
    example = spec(3)  # of a sample
    settings: Any = SimpleNamespace(full=Size(2), precision="fp32", memory_format="auto", dtype=torch.float32)
    one, two = Size(1), Size(2)
    assert estimates(settings, model, example, [two], [one])[1].keys() == {two}
    with pytest.raises(ConfigError, match=r"the last batch's microbatches, layer 0 .* data.drop_last=true"):
        estimates(settings, model, example, [two, one], [])
    settings.full = one
    with pytest.raises(ConfigError, match=r"^layer 0 \(0\) of the model cannot take"):
        estimates(settings, model, example, [one], [])
