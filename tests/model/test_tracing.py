"""Any module as a network of layers: cut anywhere, it computes what the module does, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetrain.model.network import INPUT, Slice, ValueId, evaluating, run_parts
from pipetrain.model.specs import ValueSpec
from pipetrain.model.tracing.trace import trace
from pipetrain.model.tracing.traced_network import Traced
from tests.support.model_zoo import Branches, TwoInputs
from tests.support.traced_comparison import assert_equal, drawing, example, tokens


class Drop(nn.Module):
    """A stochastic depth, which does nothing in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], 1, 1, device=x.device) < 0.5) * 2


class Tied(nn.Module):
    """Two inputs, a mask by keyword, tied weights, a stochastic depth and an intermediate Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), Drop()) for _ in range(3))
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((16,), 0.5), persistent=False)
        self.shift = torch.ones(16)
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        kept = (mask > 0)[..., None].to(self.embed.weight.dtype)
        positions = torch.arange(ids.shape[1], device=ids.device) * self.scale[0] + self.shift[0]
        positions += (positions > 2) * torch.arange(ids.shape[1], device=ids.device)
        positions[:2].mul_(3)
        x = self.embed(ids)
        for mlp in self.mlps:
            x = x + mlp(x * kept) * self.scale + positions[:, None]
        return self.head(x), x.detach().sum()


class Normalised(nn.Module):
    """Weights that are computed by a parametrization, whose buffers change, used more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.b = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.c = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(torch.tanh(self.a(x))))
        with torch.no_grad():
            y = self.c(x)
        return self.c(self.b(x)) + self.a(y)


class Written(nn.Module):
    """What `pack` has made is written after `b` has used it; names are those of a part's own attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.pack, self.b, self.slice = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.pack(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        first = h[:, :2]
        y = self.slice(self.b(h) * 1)
        first.mul_(2)
        return h + y


class Counting(nn.Module):
    """A view of a buffer is written in one layer and used in a later one, on one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        first, x = self.seen[:2], self.b(self.a(x))
        first.add_(x.detach().mean())
        return self.d(self.c(x) + first.sum())


DATA = ValueId(INPUT, 0), ValueId(INPUT, 1)


@dataclass(frozen=True)
class Case:
    """A model with its layers and, of some of them, what they take; `draws`: the layers that do."""

    make: Callable[[], nn.Module]
    of: ValueSpec
    names: str
    takes: dict[int, tuple[ValueId, ...]] = field(default_factory=dict)
    draws: frozenset[int] = frozenset()


CASES = {
    "branches that join, a dict, dropout": Case(
        partial(Branches, 0.5),
        example((8,)),
        "trunk left.0 left.1 right head",
        {2: (ValueId(0, 0), ValueId(1, 0)), 4: (ValueId(0, 0), ValueId(2, 0), ValueId(3, 0))},
        frozenset({1, 2}),
    ),
    "tied weights, a mask by keyword, what only training does": Case(
        Tied,
        tokens("mask", "ids", length=6),
        "embed mlps.0 mlps.1 mlps.2 head",
        {0: DATA, 4: (ValueId(3, 0),)},
        frozenset({1, 2, 3}),
    ),
    "weights that are computed": Case(Normalised, example((4,)), "a a#2 c b c#2 a#3"),
    # `pack` sends what it made before the constant was added.
    "a view that is written": Case(Written, example((4,)), "pack slice"),
    "a view of a buffer that is written": Case(Counting, example((4,)), "a d"),
}


@pytest.mark.parametrize("name", CASES)
def test_cut_anywhere_it_computes_what_the_module_does(name: str):
    case = CASES[name]
    network = assert_equal(case.make(), case.of)
    assert network.names == case.names.split()
    assert {index: network.takes(index, ()) for index in case.takes} == case.takes
    assert drawing(network) == case.draws


@pytest.fixture(scope="module")
def tied() -> Traced:
    return trace(Tied(), tokens("mask", "ids", length=6))


def test_names_of_a_part_are_those_of_the_model(tied):
    """Tied weights have their first name in each layer; those without use are somewhere."""
    first, *_, last = tied.modules
    assert [name for name, _ in first.named_parameters()] == ["embed.weight"]
    assert last.get_parameter("embed.weight") is tied.model.head.weight
    named = {}
    for module in tied.modules:
        named |= module.state_dict(keep_vars=True)  # as in the model, `scale` is not persistent
    state = tied.model.state_dict(keep_vars=True)
    assert named.keys() == state.keys() - {"head.weight"}
    assert all(named[name] is tensor for name, tensor in state.items() if name in named)


def test_a_part_runs_on_another_device_than_that_of_the_trace(tied):
    twin = tied.twin()
    part = twin.part(Slice(0, 2, twin.takes(0, ()), twin.alone(1).leaves)).to("meta")
    outputs = part(*[torch.zeros(2, 6, dtype=torch.int64, device="meta") for _ in range(2)])
    assert [(t.device.type, tuple(t.shape)) for t in outputs] == [("meta", (2, 6, 16))]


X, OF = torch.linspace(0, 1, 16).view(2, 8), example((8,))


@pytest.fixture(scope="module")
def branches() -> Traced:
    return trace(Branches(0.5), OF)


def test_layers_one_by_one_are_the_part(branches):
    alone = branches.alone(4, training=False)
    part = branches.part(Slice(0, 5, (ValueId(INPUT, 0),), alone.leaves)).eval()
    seen = []
    made = part.observed((X,), lambda name, outputs: seen.append((name, len(outputs))))
    torch.testing.assert_close(made, part(X), rtol=0, atol=0)
    assert seen == [("trunk", 1), ("left.0", 1), ("left.1", 1), ("right", 1), ("head", 2)]
    assert part.pack(part(X)).keys() == {"y", "extra", "k"}


def test_the_model_and_the_generators_are_as_before_and_on_the_meta_device_it_has_the_same_layers(branches):
    model = Branches(0.5)
    model.norm.eval()
    state, random = {name: t.clone() for name, t in model.state_dict().items()}, torch.get_rng_state()
    trace(model, OF)
    assert torch.equal(torch.get_rng_state(), random)
    assert (model.training, model.norm.training) == (True, False)
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    with torch.device("meta"):
        network = trace(Branches(0.5), OF)
    assert network.names == branches.names
    assert [network.alone(k) for k in range(5)] == [branches.alone(k) for k in range(5)]


def test_under_autocast_and_with_channels_last_it_is_the_module_bit_for_bit():
    model = TwoInputs().eval()
    network = trace(model, example((3, 8, 8), (6,)))
    image, table = torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last), torch.rand(2, 6)
    model.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16), evaluating(*network.modules):
        (made,) = run_parts(network.modules, [image, table])
        assert torch.equal(made, model(image, table))


class Collecting(nn.Module):
    """Takes whatever a batch has, and looks for a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, **batch: Tensor) -> Tensor:
        return self.head(self.inner(batch["x"]).relu())


class Cached(nn.Module):
    """Returns a cache of its keys, as a decoder of Hugging Face does by default."""

    class Cache:
        pass

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(use_cache=True)
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        scores = self.head(self.inner(x).relu())
        return {"scores": scores, "cache": self.Cache()} if self.config.use_cache else {"scores": scores}


@pytest.mark.parametrize(("make", "named"), [(Collecting, True), (Cached, False)])
def test_a_forward_may_collect_its_inputs_and_a_cache_is_left_out(make, named):
    model, x = make(), torch.randn(8, 4)
    before, names = dict(vars(model)), {"x": x, "other": x}
    network = trace(model, ValueSpec.in_batch(names if named else x))
    (scores,) = run_parts(network.modules, [*names.values()] if named else [x])
    torch.testing.assert_close(scores, model.head(model.inner(x).relu()))
    assert vars(model) == before
    assert not hasattr(model, "config") or model.config.use_cache
