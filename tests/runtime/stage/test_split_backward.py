"""A backward in two halves has the gradients of a whole one, to the last bit, and costs no more."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pipetrain.model.chain import network_of
from pipetrain.model.network import INPUT, ValueId
from pipetrain.model.specs import Size, leaves_of
from pipetrain.model.trial_tensors import made_up
from pipetrain.plan.cost_estimate import estimate
from pipetrain.runtime.stage.split_backward import Deferred
from tests.runtime.stage.test_memory_meter import Live
from tests.support.traced_comparison import example

Build = Callable[[], nn.Module]
ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Trained:
    """Gradients of a module over several microbatches, and the work of its backward, by halves."""

    def __init__(self, build: Build, data: list[list[Tensor]], split: bool, low: bool = False) -> None:
        torch.manual_seed(1)
        module = build().train()
        leaves, opened = [p for p in module.parameters() if p.requires_grad], []
        for tensors in data:
            xs = [t.clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]
            deferred, precision = Deferred(leaves), torch.autocast("cpu", torch.bfloat16, enabled=low)
            with precision, deferred if split else nullcontext():
                made = module(*xs)
            outputs = [t for t in (made if isinstance(made, tuple) else (made,)) if t.requires_grad]
            opened.append((xs, outputs, deferred))
        torch.manual_seed(2)
        with FlopCounterMode(display=False) as first:
            for _, outputs, deferred in opened:
                run = partial(deferred.input_half, leaves) if split else torch.autograd.backward
                run(outputs, [torch.randn_like(t) for t in outputs])
        assert not split or all(leaf.grad is None for leaf in leaves)
        with FlopCounterMode(display=False) as second:
            for _, _, deferred in opened if split else ():
                deferred.weight_half()
        self.flops = first.get_total_flops(), second.get_total_flops()
        inputs = {f"input {n} of {mb}": t.grad for mb, one in enumerate(opened) for n, t in enumerate(one[0])}
        weights = {name: p.grad for name, p in module.named_parameters()}
        self.tensors = {**inputs, **weights, **dict(module.named_buffers())}


def compared(build: Build, data: list[list[Tensor]], low: bool = False, more: bool = False) -> float:
    """Compare a split backward with a whole one; return the part of the work that is in W.

    `more`: the halves may be more work than the whole.
    """
    split, whole = (Trained(build, data, half, low) for half in (True, False))
    for name, wanted in whole.tensors.items():
        found = split.tensors[name]
        assert (found is None) == (wanted is None), name
        if found is not None and wanted is not None:
            assert found.layout == wanted.layout
            a, b = (t.to_dense() if t.is_sparse else t for t in (found, wanted))
            assert torch.equal(a, b), name
            assert a.stride() == b.stride(), name
    assert more or sum(split.flops) == sum(whole.flops)
    return split.flops[1] / max(1, sum(split.flops))


# Layers


class Calls(nn.Module):
    """A layer that is a function of itself, with a weight [5, 4] and a bias [5] or `inner`, and of inputs."""

    def __init__(self, function: Callable[..., Any], inner: nn.Module | None = None) -> None:
        super().__init__()
        if inner is None:
            self.weight, self.bias = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))
        self.inner = inner
        self.function = function

    def forward(self, *xs: Tensor) -> Any:
        return self.function(self, *xs)


def calls(function: Callable[..., Any]) -> Build:
    return lambda: Calls(function)


def of(make: Callable[[], nn.Module], by: Callable[..., Any]) -> Build:
    """A layer that is a function of this module and its inputs."""
    return lambda: Calls(lambda m, *xs: by(m.inner, *xs), make())


def no_grad(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with torch.no_grad():
        return function(*args)


conv, linear = partial(nn.Conv2d, 3, 4, 3), partial(nn.Linear, 4, 5)


def conv_norm() -> nn.Module:
    return nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))


def thrice() -> nn.Module:
    """Three layers with one weight."""
    layers = [nn.Linear(4, 4) for _ in range(3)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))


def frozen(trained: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.endswith(trained))
    return module


def between(function: Callable[..., Tensor]) -> Build:
    """Layers, in their middle this function of two layers and an input."""

    def inner() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    return lambda: nn.Sequential(nn.Linear(4, 4), of(inner, function)(), nn.Linear(4, 4))


def slope(wanted: str, layers: nn.Module, x: Tensor, create: bool = False) -> Tensor:
    """Add the gradient that layers have at x, of x or of a weight."""
    at = x if wanted == "x" else layers.get_parameter(wanted)
    (made,) = torch.autograd.grad(layers(x).square().sum(), at, create_graph=create)
    return layers(x) + made.sum()


def solved(layer: nn.Module, x: Tensor) -> Tensor:
    """A fixed point, which is differentiated in a hook."""
    z = torch.tanh(layer(x))
    at = z.detach().requires_grad_()
    again = torch.tanh(layer(at) + x.detach())
    z.register_hook(lambda grad: grad + torch.autograd.grad(again, at, grad, retain_graph=True)[0])
    return z


class Own(torch.autograd.Function):
    """2 x w, and no gradient to a third input."""

    @staticmethod
    def forward(ctx, x, weight, other):
        ctx.save_for_backward(x, weight)
        return 2 * F.linear(x, weight) + other

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight, 2 * grad.t() @ x, None


IMAGE, ROWS = (2, 3, 8, 8), (6, 4)
IDS = partial(torch.randint, 7, (6,))
CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
HALF: dict[str, tuple[Any, ...]] = {  # of whose work half is in W; with what enters: shapes, or what makes it
    "linear": (calls(lambda m, x: F.linear(input=x, bias=m.bias, weight=m.weight)), ROWS),
    "matrix product": (calls(lambda m, x: x @ m.weight.t()), ROWS),
    "mm": (calls(lambda m, x: x.mm(m.weight.T) + m.bias), ROWS),
    "addmm": (calls(lambda m, x: torch.addmm(m.bias, x, m.weight.t(), alpha=2)), ROWS),
    "bmm": (calls(lambda m, x: x.view(2, 3, 4).bmm(m.weight.t().expand(2, 4, 5))), ROWS),
    "einsum of a list": (calls(lambda m, x: torch.einsum("ni,oi->no", [x, m.weight])), ROWS),
    "tensordot": (calls(lambda m, x: torch.tensordot(m.weight, x, dims=([1], [1]))), ROWS),
    "traced": (calls(lambda m, x: ATEN.addmm.default(m.bias, x, ATEN.t.default(m.weight))), ROWS),
    "no gradient inside": (calls(lambda m, x: F.linear(x, m.weight) * no_grad(F.linear, x, m.weight)), ROWS),
    "a weight three times": (thrice, ROWS),
    "a frozen bias": (partial(frozen, "weight"), ROWS),
    "one sample": (linear, (4,)),
    "complex": (partial(linear, dtype=torch.complex64), partial(torch.randn, ROWS, dtype=torch.complex64)),
    "convolution and norm": (conv_norm, IMAGE),
    "channels last": (
        lambda: conv_norm().to(memory_format=torch.channels_last),
        lambda: torch.randn(IMAGE).to(memory_format=torch.channels_last),
    ),
    "transposed": (partial(nn.ConvTranspose2d, 3, 4, 3, stride=2, output_padding=1), IMAGE),
    "traced convolution": (
        of(conv, lambda m, x: ATEN.conv2d.padding(x, *m.parameters(), [1, 1], "same")),
        IMAGE,
    ),
    "traced in general": (of(conv, lambda m, x: ATEN.convolution.default(x, *m.parameters(), *CONV)), IMAGE),
    "transformer": (partial(nn.TransformerEncoderLayer, 8, 2, 16, dropout=0.0, batch_first=True), (2, 6, 8)),
}
NOTHING: dict[str, tuple[Any, ...]] = {  # is put off
    "no weights": (lambda: nn.Sequential(nn.Tanh(), nn.MaxPool1d(2), nn.Flatten()), ROWS),
    "product of inputs": (calls(lambda m, x: x @ x.t()), ROWS),
    "product of weights": (calls(lambda m, x: x * (m.weight @ m.weight.t()).sum()), ROWS),
    "weight_norm": (lambda: parametrizations.weight_norm(linear()), ROWS),
    "vmap": (calls(lambda m, x: torch.vmap(lambda row: F.linear(row, m.weight, m.bias))(x)), ROWS),
    "a frozen weight": (partial(frozen, "bias"), ROWS),  # a bias has a sum, for which nothing need be kept
    "recurrent": (of(partial(nn.LSTM, 4, 5, 2), lambda m, x: m(x)[0]), (3, 2, 4)),
}
SOME: dict[str, tuple[Any, ...]] = {
    "slices": (calls(lambda m, x: F.linear(x, m.weight[:3]) @ F.linear(x, m.weight[2:]).t().exp()), ROWS),
    "recomputing": (between(lambda m, x: checkpoint(m, x, use_reentrant=False)), ROWS),
    "recomputing reentrantly": (between(lambda m, x: checkpoint(m, x, use_reentrant=True)), ROWS),
    "an input twice": (of(partial(nn.Bilinear, 4, 4, 5), lambda m, x: m(x, x)), ROWS),
    "functional_call": (
        of(linear, lambda m, x: torch.func.functional_call(m, {"bias": m.bias * 2}, (x,))),
        ROWS,
    ),
    "differentiating to x": (between(partial(slope, "x")), ROWS),
    "differentiating to a weight": (between(partial(slope, "0.weight")), ROWS),
    "a function of one's own": (of(linear, lambda m, x: Own.apply(x, m.weight, m(x)) @ m.weight), ROWS),
    "an embedding": (of(partial(nn.Embedding, 7, 4), lambda m, x, i: (x * m(i)) @ m.weight.t()), ROWS, IDS),
    "sparse": (of(partial(nn.Embedding, 7, 4, sparse=True), lambda m, x, i: x * m(i)), ROWS, IDS),
    # Its weight gradient is put off as well, though I has nothing to do there.
    "no input needs a gradient": (
        calls(lambda m, x, mask: x + F.linear(mask.to(x.dtype), m.weight[:, :1])),
        (6, 5),
        lambda: torch.arange(6)[:, None] > 2,
    ),
    "tuples": (
        calls(lambda m, x, y: (F.linear(x, m.weight), y * 2, F.linear(x, m.weight).detach() > 0)),
        ROWS,
        (6, 2),
    ),
}


def entering(*enters: Any) -> list[list[Tensor]]:
    """What enters in three microbatches."""
    return [[torch.randn(t) if isinstance(t, tuple) else t() for t in enters] for _ in range(3)]


@pytest.mark.parametrize("name", [*HALF, *NOTHING, *SOME])
def test_a_layer_s_gradients_are_those_of_a_whole_backward(name):
    build, *enters = (HALF | NOTHING | SOME)[name]
    part = compared(build, entering(*enters))
    assert name in SOME or part == pytest.approx(0.5 if name in HALF else 0)


@pytest.mark.parametrize("name", ["convolution and norm", "a weight three times", "transformer"])
def test_so_they_are_under_autocast(name):
    build, enters = HALF[name]
    assert compared(build, entering(enters), low=True) == pytest.approx(0.5)


def test_what_a_hook_differentiates_during_i_is_its_own():
    build = of(partial(nn.Linear, 4, 4), solved)
    compared(lambda: nn.Sequential(nn.Linear(4, 4), build(), nn.Linear(4, 4)), entering(ROWS), more=True)


def test_hooks_of_modules_are_called():
    seen: list[tuple[int, ...]] = []

    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        module.register_full_backward_hook(lambda m, back, grads: seen.append(back[0].shape))
        module[0].register_full_backward_hook(lambda m, back, grads: (3 * back[0],))
        return module

    compared(build, entering(ROWS))
    assert seen == [ROWS] * 2 * 3


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (between(partial(slope, "x", create=True)), "choose a schedule without I and W"),
        # A whole backward would compute a wrong gradient.
        (
            calls(lambda m, x: (lambda y: (F.linear(y, m.weight), y.add_(1))[0])(x * 1)),
            "modified by an inplace operation",
        ),
    ],
)
def test_what_would_have_a_wrong_gradient_is_an_error(build, says):
    with pytest.raises(RuntimeError, match=says):
        Trained(build, entering(ROWS), split=True)


class Forked(nn.Module):
    """A convolution, and products of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.left, self.right = conv(), nn.Linear(6, 5), nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        return (self.left(y) * self.right(y)).flatten(1)


def test_layers_of_a_traced_model_put_off_all_that_the_estimate_counts_for_weights():
    shape = example(IMAGE[1:])
    network = network_of(Forked(), shape)
    layers, made = estimate(network, shape.of(Size(2))), [shape.of(Size(2))]
    values = {ValueId(INPUT, number): made_up(spec) for number, spec in enumerate(made[0].specs)}
    for index, layer in enumerate(layers):
        given = [values[value] for value in layer.takes]
        outputs = leaves_of(network.call(index, tuple(given), tuple(made)))
        values |= {ValueId(index, number): t.detach() for number, t in enumerate(outputs)}
        if any(layer.reached):
            part, run = deepcopy(network.modules[index]), partial(network.call, index, specs=tuple(made))

            def build(index: int = index, part: nn.Module = part, run: Any = run) -> nn.Module:
                network.modules[index] = deepcopy(part)
                return Calls(lambda m, *xs: leaves_of(run(xs)), network.modules[index])

            compared(build, [given])
            assert Trained(build, [given], split=True).flops[1] == layer.weight_flops
        made.append(layer.output)
    assert sum(bool(layer.weight_flops) for layer in layers) > 1


# Memory


@pytest.fixture
def without_gc():
    """Let only reference counts free memory, so that a cycle shows."""
    gc.disable()
    yield
    gc.enable()


def test_after_i_only_inputs_and_output_gradients_of_dear_operations_are_held(without_gc):
    norm, last = nn.BatchNorm1d(7), nn.Linear(11, 13, bias=False)
    module = nn.Sequential(nn.Linear(5, 7), norm, nn.GELU(), nn.Linear(7, 11), nn.Tanh(), last)
    x, grad = torch.randn(17, 5, requires_grad=True), torch.randn(17, 13)
    with Live() as live:
        dropped = Deferred([*module.parameters()])
        with dropped:
            outputs = [module(x)]
        assert live.now
        del dropped, outputs
        assert not live.now
        deferred = Deferred([*module.parameters()])
        with deferred:
            outputs = [module(x)]
        # The norm's statistics, what enters it, GELU and the second product, Tanh's result, and the output.
        assert live.now // 4 == 7 + 7 + 3 * 17 * 7 + 17 * 11 + 17 * 13
        deferred.input_half([*module.parameters()], outputs, [grad])
        outputs.clear()
        x.grad = None
        # The norm's weights have their gradients; x and the last gradient are made elsewhere.
        inputs = grads = 17 * 7 + 17 * 11
        assert live.now // 4 == 7 + 7 + inputs + grads
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in deferred.tensors}
        assert sum(held.values()) == live.now + x.nbytes + grad.nbytes
        deferred.weight_half()
        assert deferred.tensors == []
        assert live.now == sum(p.nbytes for p in module.parameters())  # their gradients


def test_under_autocast_a_dear_operation_holds_its_input_once():
    module = nn.Linear(5, 7)
    x = torch.randn(17, 5, requires_grad=True)
    with Live() as live:
        deferred = Deferred([*module.parameters()])
        with torch.autocast("cpu", torch.bfloat16), deferred:
            y = module(x * 2)
        assert live.now == y.nbytes + 2 * (17 * 5 + 5 * 7)  # in bfloat16: its input and weight
