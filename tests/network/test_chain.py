"""Chains of layers with skips: what they compute as a whole and in parts, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable

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
from tests.support.parity import Subject, Way, compare
from tests.support.refusals import refusal

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


def test_what_enters_can_be_seen():
    layers = estimate(around(), ENTRY)
    joined = cut_layers({2: layers}, [3, 5], EXAMPLE)
    assert [slice.enters for slice in joined.slices] == [
        (Made(INPUT, 0),),
        (Made(1, 0), Made(2, 0)),
        (Made(4, 0),),
    ]
    assert [layer.takes for layer in layers][3:5] == [(Made(2, 0), Made(1, 0)), (Made(3, 0), Made(3, 1))]


def test_names_are_those_of_the_model():
    model = nested()
    parts = [
        Chain(model).part(slice)
        for slice in cut_layers({2: estimate(nested(), ENTRY)}, [4, 9], EXAMPLE).slices
    ]
    names = [name for part in parts for name in part.state_dict()]
    assert names == list(model.state_dict())
    assert [name for name, _ in parts[1].named_children()] == list(dict(model.named_children()))[4:9]


def test_a_layer_may_be_called_as_a_part_s_own_attributes_are():
    """`pack`, say; add_module refused it."""
    names = ("slice", "pack", "observed", "train")
    model = nn.Sequential()
    model._modules = {name: nn.Linear(6, 6).double() for name in names}
    (slice,) = cut_layers({2: estimate(copy.deepcopy(model), ENTRY)}, [], EXAMPLE).slices
    part, x = Chain(model).part(slice), torch.randn(2, 6, dtype=torch.float64)
    assert torch.equal(part(x)[0], model(x))
    assert list(part.state_dict()) == list(model.state_dict())


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
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
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


def test_a_pop_before_its_stash_says_so_in_one_process_too():
    with pytest.raises(
        RuntimeError, match="a Pop ran before its Stash: put the Stash into a layer before it"
    ):
        Pop(Stash())(torch.ones(1))


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


MORE = (
    " has a hook or a forward of its own, which a pipeline would not run: put what it does into a layer "
    "beside it"
)
REFUSED: dict[str, tuple[Callable[[Stash], list[nn.Module]], str]] = {
    "a stash inside": (
        lambda s: [nn.Sequential(nn.Tanh(), s), Pop(s)],
        "layer 0 (0) has a Stash inside: Stash and Pop must be layers of the nn.Sequential itself",
    ),
    "a pop inside": (
        lambda s: [s, nn.Tanh(), nn.Sequential(Pop(s), Join())],
        "layer 2 (2) has a Pop inside: Stash and Pop must be layers of the nn.Sequential itself",
    ),
    "the pop first": (
        lambda s: [Pop(s), s],
        "layer 0 (0) is a Pop whose Stash is not a layer before it: put that Stash into the nn.Sequential, "
        "before the Pop",
    ),
    "no stash": (
        lambda s: [nn.Tanh(), Pop(s)],
        "layer 1 (1) is a Pop whose Stash is not a layer before it: put that Stash into the nn.Sequential, "
        "before the Pop",
    ),
    "two pops": (
        lambda s: [s, Pop(s), Pop(s)],
        "layer 2 (2) is the second Pop of one Stash (layer 0): put another Stash behind that one",
    ),
    "no pop": (lambda s: [nn.Tanh(), s], "layer 1 (1) is a Stash without a Pop: add one, or leave it out"),
    "a hooked stash": (lambda s: [hooked(s), Pop(s)], f"the Stash of layer 0 (0){MORE}"),
    "a hooked pop": (lambda s: [s, hooked(Pop(s))], f"the Pop of layer 1 (1){MORE}"),
    "another stash": (lambda s: [t := Twice(), Pop(t)], f"the Twice of layer 0 (0){MORE}"),
    "another pop": (lambda s: [s, Add(s)], f"the Add of layer 1 (1){MORE}"),
    "twice": (
        lambda s: [s, Pop(s), Join(), s, Pop(s)],
        "layer 3 (3) is the Stash of layer 0 once more: make another one",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_chain_is_refused_in_one_sentence(case):
    make, says = REFUSED[case]
    assert refusal(lambda: Chain(nn.Sequential(*make(Stash())))) == says


# Containers that do more than run their layers


class OwnForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


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


def patched() -> nn.Sequential:
    model = nn.Sequential(*layers())
    model.forward = lambda x: 2 * model[2](model[0](x))
    return model


def with_hook(kind: str) -> nn.Sequential:
    model = nn.Sequential(*layers())
    getattr(model, f"register_{kind}_hook")(
        lambda module, given, made=None: None if made is None else 2 * made
    )
    return model


def with_buffer() -> nn.Sequential:
    model = nn.Sequential(*layers())
    model.register_buffer("scale", torch.ones(1))
    return model


MORE: dict[str, Callable[[], nn.Sequential]] = {
    "forward": lambda: OwnForward(*layers()),
    "call": lambda: OwnCall(*layers()),
    "mode": lambda: OwnMode(*layers()),
    "weight": lambda: Scaled(*layers()),
    "patched": patched,
    "hook": lambda: with_hook("forward"),
    "buffer": with_buffer,
}


@pytest.mark.parametrize("make", MORE.values(), ids=MORE)
def test_a_container_that_does_more_than_run_its_layers_is_traced_like_any_module(make):
    assert not is_chain(make())
    inputs, targets = torch.randn(20, 6, dtype=torch.float64), torch.randn(20, 4, dtype=torch.float64)
    compare(Subject.of(make(), inputs, targets, Task(mse_loss), mse_loss), Way("1f1b", 2))


def test_one_that_only_puts_itself_together_is_a_chain():
    assert is_chain(Named(*layers()))


def test_a_backward_hook_on_the_whole_is_refused():
    with pytest.raises(ConfigError, match="the model has a backward hook, which a trace would leave out"):
        network_of(with_hook("full_backward"), ValueSpec.in_batch(torch.ones(2, 6)))
