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
from torch.nn.functional import mse_loss

from pipetrain.errors import ConfigError
from pipetrain.network.chain import Chain, Pop, Stash, is_chain, network_of
from pipetrain.network.network import INPUT, Made
from pipetrain.network.values import TensorSpec, ValueSpec, as_tuple
from pipetrain.plan.cut import cut_layers
from pipetrain.plan.estimate import estimate
from pipetrain.tasks import Task
from tests.support.models import Gather, Join, Pair, skipping
from tests.support.parity import Way, train
from tests.support.refusals import refusal
from tests.support.subjects import random, subject

EXAMPLE = ValueSpec((TensorSpec((6,), torch.float64),))
ENTRY = EXAMPLE.of(2)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


def around() -> nn.Sequential:
    """One skip over a layer."""
    stash = Stash()
    return nn.Sequential(linear(), stash, linear(), Pop(stash), Join(), linear()).double()


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
            pop_a=Pop(a),
            end=Join(),
        )
    ).double()


def in_parts(model: nn.Sequential, x: Tensor, cuts: list[int]) -> tuple[Tensor, ...]:
    """Run the parts between cuts, each with what enters it."""
    joined = cut_layers({2: estimate(copy.deepcopy(model), ENTRY)}, cuts, EXAMPLE)
    values = {Made(INPUT, 0): x}
    for slice in joined.slices:
        part = Chain(model).part(slice)
        left = part(*(values[value] for value in slice.enters))
        values |= zip(slice.leaves, left, strict=True)
    return left


@pytest.mark.parametrize("build", [around, nested])
def test_any_two_cuts_compute_what_the_whole_does(build):
    model, x = build(), torch.randn(2, 6, dtype=torch.float64)
    wanted = model(x)
    wanted.sum().backward()
    gradients = [p.grad for p in model.parameters()]
    for first in range(1, len(model)):
        for second in range(first, len(model)):
            model.zero_grad()
            (made,) = in_parts(model, x, sorted({first, second}))
            assert torch.equal(made, wanted), (first, second)
            made.sum().backward()
            assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))


def test_names_are_those_of_the_model():
    """A layer may be called as a part's own attributes are: `pack`, which add_module refused."""
    names = ("slice", "pack", "observed", "train")
    model, x = nn.Sequential(), torch.randn(2, 6, dtype=torch.float64)
    model._modules = {name: nn.Linear(6, 6).double() for name in names}
    for whole, cuts in ((nested(), [4, 9]), (model, [2])):
        slices = cut_layers({2: estimate(copy.deepcopy(whole), ENTRY)}, cuts, EXAMPLE).slices
        parts = [Chain(whole).part(slice) for slice in slices]
        assert [name for part in parts for name in part.state_dict()] == list(whole.state_dict())
        children = [name for part in parts for name, _ in part.named_children()]
        assert children == [name for name, _ in whole.named_children()]
    assert torch.equal(parts[1](*parts[0](x))[0], model(x))


def test_a_part_says_what_each_layer_makes_and_may_be_given_something_else():
    model, seen = around(), []
    (slice,) = cut_layers({2: estimate(around(), ENTRY)}, [], EXAMPLE).slices
    part = Chain(model).part(slice)

    def see(name: str, layer: nn.Module, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append((name, len(outputs)))
        assert layer is model[int(name)]
        return tuple(torch.zeros_like(t) for t in outputs) if name == "1" else outputs

    x = torch.randn(2, 6, dtype=torch.float64)
    (made,) = part.observed((x,), see)
    assert seen == [("0", 1), ("1", 1), ("2", 1), ("3", 2), ("4", 1), ("5", 1)]
    assert torch.equal(made, model[5](model[2](torch.zeros_like(x))))  # the skip is of what was given


@pytest.mark.parametrize("single", [True, False])
def test_the_last_part_returns_what_the_model_does(single):
    model = nn.Sequential(linear(), linear() if single else Pair(linear())).double()
    (slice,) = cut_layers({2: estimate(copy.deepcopy(model), ENTRY)}, [], EXAMPLE).slices
    part, x = Chain(model).part(slice), torch.randn(2, 6, dtype=torch.float64)
    packed, wanted = part.pack(part(x)), model(x)
    assert isinstance(packed, Tensor) == single
    assert all(torch.equal(a, b) for a, b in zip(as_tuple(packed), as_tuple(wanted), strict=True))


# One process


def test_a_copy_has_skips_of_its_own():
    model = skipping().eval()
    x = torch.randn(2, 3, 32, 32)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    for other in copies:
        pops = [layer for layer in other if isinstance(layer, Pop)]
        stashes = [layer for layer in other if isinstance(layer, Stash)]
        assert {id(pop.stash) for pop in pops} == set(map(id, stashes))
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


def hooked(layer: nn.Module) -> nn.Module:
    layer.register_forward_hook(lambda module, given, made: made)
    return layer


class Twice(Stash):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * super().forward(value)


class Add(Pop):
    def forward(self, value: Tensor) -> Tensor:
        a, b = super().forward(value)
        return a + b


REFUSED: list[tuple[int, Callable[[Stash], list[nn.Module]]]] = [
    (0, lambda s: [nn.Sequential(nn.Tanh(), s), Pop(s)]),
    (2, lambda s: [s, nn.Tanh(), nn.Sequential(Pop(s), Join())]),
    (0, lambda s: [Pop(s), s]),
    (1, lambda s: [nn.Tanh(), Pop(s)]),
    (2, lambda s: [s, Pop(s), Pop(s)]),
    (1, lambda s: [nn.Tanh(), s]),
    (0, lambda s: [hooked(s), Pop(s)]),
    (1, lambda s: [s, hooked(Pop(s))]),
    (0, lambda s: [t := Twice(), Pop(t)]),
    (1, lambda s: [s, Add(s)]),
    (1, lambda s: [s, s, Pop(s)]),
]


@pytest.mark.parametrize(("index", "make"), REFUSED)
def test_what_is_no_chain_is_refused_in_one_sentence(index, make):
    said = refusal(lambda: Chain(nn.Sequential(*make(Stash()))))
    assert said.startswith(f"layer {index} ({index}) is no plain Stash with a Pop behind it, nor such a Pop")


# Containers that do more than run their layers


class OwnCall(nn.Sequential):
    def _call_impl(self, x: Tensor) -> Tensor:
        return 2 * self.forward(x)


class OwnMode(nn.Sequential):
    def eval(self) -> nn.Sequential:
        super().eval()
        self[1].train()
        return self


class Scaled(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Named(nn.Sequential):
    """Only puts itself together: as good as a plain one."""

    @property
    def head(self) -> nn.Module:
        return self[-1]


def layers() -> tuple[nn.Module, ...]:
    return nn.Linear(6, 6), nn.Dropout(0.0), nn.Linear(6, 4)


def changed(change: Callable[[nn.Sequential], object]) -> nn.Sequential:
    model = nn.Sequential(*layers())
    change(model)
    return model


def doubled(module: nn.Module, given: object, made: Tensor | None = None) -> Tensor | None:
    return None if made is None else 2 * made


def patched(model: nn.Sequential, x: Tensor) -> Tensor:
    return 2 * model[2](model[0](x))


CONTAINERS: dict[str, Callable[[], nn.Sequential]] = {
    "call": lambda: OwnCall(*layers()),
    "mode": lambda: OwnMode(*layers()),
    "weight": lambda: Scaled(*layers()),
    "patched": lambda: changed(lambda m: setattr(m, "forward", MethodType(patched, m))),
    "hook": lambda: changed(lambda m: m.register_forward_hook(doubled)),
    "buffer": lambda: changed(lambda m: m.register_buffer("scale", torch.ones(1))),
}


def trained(name: str) -> object:
    return train(subject(CONTAINERS[name](), random(6), random(4), Task(mse_loss)), Way("1f1b"))


@pytest.mark.processes
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_that_does_more_than_run_its_layers_is_traced_like_any_module(ranks, name):
    assert not is_chain(CONTAINERS[name]())
    ranks(trained, name)


def test_one_that_only_puts_itself_together_is_a_chain():
    assert is_chain(Named(*layers()))


def test_a_backward_hook_on_the_whole_is_refused():
    model = changed(lambda m: m.register_full_backward_hook(doubled))
    with pytest.raises(
        ConfigError, match="Function BackwardHookFunction, whose backward a trace would leave out"
    ):
        network_of(model, ValueSpec.in_batch(torch.ones(2, 6)))
