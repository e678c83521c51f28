"""Chains of layers with skips: what they compute as a whole and in parts, and what is refused."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

from pipetrain.model.chain import Chain, Pop, Stash, is_chain
from pipetrain.model.network import Part, run_parts
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import estimate
from pipetrain.plan.cut import cut_layers
from tests.support.models import Gather, Join, Pair, skipping
from tests.support.refusals import refusal

EXAMPLE = ValueSpec((TensorSpec((6,), torch.float64),))
ENTRY = EXAMPLE.of(Size(2))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def nested() -> nn.Sequential:
    """Skips inside each other, that end in the order in which they begin, and of a pair of tensors."""
    a, b, pair, at_once = Stash(), Stash(), Stash(), Stash()
    return nn.Sequential(
        OrderedDict(
            first=a,  # the data itself
            enter=linear(),
            stash_b=b,
            fork=Pair(linear()),
            stash_pair=pair,
            joined=Gather(),
            pop_b=Pop(b),
            inner=Gather(),
            pop_pair=Pop(pair),
            three=Gather(),
            stash_once=at_once,
            pop_once=Pop(at_once),
            twice=Gather(),
            end=Pop(a, nn.Sequential(Join(), linear())),
        )
    ).double()


def parts_of(model: nn.Sequential, cuts: list[int]) -> list[Part]:
    slices = cut_layers({Size(2): estimate(copy.deepcopy(model), ENTRY)}, cuts, EXAMPLE).slices
    return [Chain(model).part(slice) for slice in slices]


@pytest.mark.parametrize("cuts", [[4, 9], [3, 11], list(range(1, 14))])
def test_parts_with_skips_compute_what_the_whole_does_and_so_do_their_gradients(cuts):
    model, x = nested(), torch.randn(2, 6, dtype=torch.float64)
    wanted = model(x)
    wanted.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    (made,) = run_parts(parts_of(model, cuts), [x])
    assert torch.equal(made, wanted)
    made.sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_names_are_those_of_the_model():
    """A layer may be called as a part's own attributes are: `pack`, which add_module refused."""
    model, x = nn.Sequential(), torch.randn(2, 6, dtype=torch.float64)
    model._modules = {name: nn.Linear(6, 6).double() for name in ("slice", "pack", "observed", "train")}
    parts = parts_of(model, [2])
    assert [name for part in parts for name in part.state_dict()] == list(model.state_dict())
    assert torch.equal(run_parts(parts, [x])[0], model(x))


def test_a_part_says_what_each_layer_makes():
    model, x, seen = nested(), torch.randn(2, 6, dtype=torch.float64), []
    (part,) = parts_of(model, [])
    (made,) = part.observed((x,), lambda name, outputs: seen.append((name, len(outputs))))
    assert [name for name, _ in seen] == list(model._modules)
    assert [made for _, made in seen] == [1, 1, 1, 2, 2, 1, 2, 1, 3, 1, 1, 2, 1, 1]
    assert torch.equal(made, model(x))


# One process


def test_a_copy_has_skips_of_its_own():
    model, x = skipping().eval(), torch.randn(2, 3, 32, 32)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        pops = [layer for layer in other if isinstance(layer, Pop)]
        assert {id(pop.stash) for pop in pops} == {id(layer) for layer in other if isinstance(layer, Stash)}
        assert torch.equal(other(x), model(x))


class Fails(nn.Module):
    """Fails in its first forward."""

    failed = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.failed:
            self.failed = True
            raise ValueError("no")
        return x


def test_a_forward_that_failed_is_forgotten():
    """What was kept had a graph, and the model could not be copied any more, as for a moving average."""
    stash = Stash()
    model = nn.Sequential(nn.Linear(6, 6), stash, Fails(), Pop(stash), Join())
    with pytest.raises(ValueError, match="no"):
        model(torch.ones(2, 6))
    twin = copy.deepcopy(model)
    x = torch.randn(2, 6)
    assert torch.equal(model(x), 2 * model[0](x))
    assert torch.equal(twin(x), model(x))


# Refused


REFUSED: list[tuple[int, Callable[[Stash], list[nn.Module]]]] = [
    (0, lambda s: [nn.Sequential(nn.Tanh(), s), Pop(s)]),
    (2, lambda s: [s, nn.Tanh(), nn.Sequential(Pop(s), Join())]),
    (0, lambda s: [Pop(s), s]),
    (2, lambda s: [s, Pop(s), Pop(s)]),
    (1, lambda s: [nn.Tanh(), s]),
    (1, lambda s: [s, s, Pop(s)]),
]


@pytest.mark.parametrize(("index", "make"), REFUSED)
def test_what_is_no_chain_is_refused_in_one_sentence(index, make):
    said = refusal(lambda: Chain(nn.Sequential(*make(Stash()))))
    assert said.startswith(f"layer {index} ({index}) is no Stash with a Pop behind it, nor such a Pop")


# Containers that do more than run their layers are traced like any module


class OwnMode(nn.Sequential):
    def eval(self) -> nn.Sequential:
        return super().eval()


class Named(nn.Sequential):
    """Only puts itself together: as good as a plain one."""

    @property
    def head(self) -> nn.Module:
        return self[-1]


def patched(model: nn.Sequential, x: Tensor) -> Tensor:
    return 2 * model[0](x)


CHANGES: list[Callable[[nn.Sequential], object]] = [
    lambda model: setattr(model, "forward", MethodType(patched, model)),
    lambda model: setattr(model, "__class__", OwnMode),
    lambda model: setattr(model, "__class__", type("OwnCall", (nn.Sequential,), {"_call_impl": patched})),
    lambda model: model.register_forward_hook(lambda module, given, made: 2 * made),
    lambda model: model.register_full_backward_hook(lambda module, given, made: None),
    lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(1))),
    lambda model: model.register_buffer("scale", torch.ones(1)),
]


def test_a_container_that_does_more_than_run_its_layers_is_no_chain():
    assert is_chain(Named(nn.Linear(6, 6)))
    for number, change in enumerate(CHANGES):
        model = nn.Sequential(nn.Linear(6, 6))
        change(model)
        assert not is_chain(model), number
