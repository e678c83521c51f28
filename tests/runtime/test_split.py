"""A backward in two halves has the gradients of a whole one, to the last bit, and costs no more."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
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

from pipetrain.errors import TrainingStopped
from pipetrain.network.chain import network_of
from pipetrain.network.network import INPUT, Made
from pipetrain.network.tensors import made_up
from pipetrain.network.values import leaves_of
from pipetrain.plan.estimate import estimate
from pipetrain.runtime.microbatch import Saving
from pipetrain.runtime.session import observers_of
from pipetrain.runtime.split import Deferred
from pipetrain.runtime.stage import Stage
from tests.support.live import Live
from tests.support.parts import part_of
from tests.support.tracing import example

Build = Callable[[], nn.Module]
Enters = tuple[int, ...] | Callable[[], Tensor]  # a shape, or what makes the tensor
BF16 = partial(torch.autocast, "cpu", torch.bfloat16)
ATEN = torch.ops.aten


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def weights_of(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def entering(*enters: Enters) -> list[list[Tensor]]:
    """What enters in three microbatches."""
    return [[torch.randn(t) if isinstance(t, tuple) else t() for t in enters] for _ in range(3)]


class Trained:
    """Gradients of a module over several microbatches, and the work of its backward, by halves."""

    def __init__(self, build: Build, data: Sequence[Sequence[Tensor]], split: bool, numerics=None) -> None:
        torch.manual_seed(1)
        module = build().train()
        leaves, opened = weights_of(module), []
        for tensors in data:
            xs = [t.clone().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]
            deferred = Deferred(leaves)
            with numerics() if numerics else nullcontext(), deferred.recording() if split else nullcontext():
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
        self.inputs = [[t.grad for t in xs] for xs, _, _ in opened]
        self.weights = {name: p.grad for name, p in module.named_parameters()}
        self.buffers = dict(module.named_buffers())


def assert_same(split: Tensor | None, whole: Tensor | None, what: object) -> None:
    assert (split is None) == (whole is None), what
    if split is not None and whole is not None:
        assert split.layout == whole.layout
        a, b = (t.to_dense() if t.is_sparse else t for t in (split, whole))
        assert torch.equal(a, b), what
        assert a.stride() == b.stride(), what


def compared(build: Build, data: list[list[Tensor]], numerics: Any = None, more: bool = False) -> float:
    """Compare a split backward with a whole one; return the part of the work that is in W.

    `more`: the halves may be more work than the whole.
    """
    split, whole = (Trained(build, data, half, numerics) for half in (True, False))
    for mb, pairs in enumerate(zip(split.inputs, whole.inputs, strict=True)):
        for a, b in zip(*pairs, strict=True):
            assert_same(a, b, f"input of microbatch {mb}")
    for name in whole.weights:
        assert_same(split.weights[name], whole.weights[name], name)
    assert all(torch.equal(split.buffers[name], whole.buffers[name]) for name in whole.buffers)
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


def conv() -> nn.Module:
    return nn.Conv2d(3, 4, 3)


def conv_norm() -> nn.Module:
    return nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))


def linear() -> nn.Module:
    return nn.Linear(4, 5)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class Tied(nn.Module):
    """Two embeddings and a head with one weight, twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.more, self.between = nn.Embedding(7, 4), nn.Embedding(7, 4), nn.Linear(7, 4)
        self.more.weight = self.tokens.weight

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        first = F.linear(x + self.tokens(ids), self.tokens.weight)
        return F.linear(self.between(first) + self.more(ids), self.tokens.weight)


def one_weight(uses: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(uses)]
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


class Solve(nn.Module):
    """A fixed point, which is differentiated in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.layer(x))
        at = z.detach().requires_grad_()
        again = torch.tanh(self.layer(at) + x.detach())
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
HALF, ANY = pytest.approx(0.5), None
CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def ids() -> Tensor:
    return torch.randint(7, (6,))


def last_channels() -> Tensor:
    return torch.randn(IMAGE).to(memory_format=torch.channels_last)


def waves() -> Tensor:
    return torch.randn(ROWS, dtype=torch.complex64)


def mask() -> Tensor:
    return torch.arange(6)[:, None] > 2


# Functions of a layer and of rows, half of whose work is in W.
PRODUCTS = {
    "linear": lambda m, x: F.linear(input=x, bias=m.bias, weight=m.weight),
    "matrix product": lambda m, x: x @ m.weight.t(),
    "mm": lambda m, x: x.mm(m.weight.T) + m.bias,
    "addmm": lambda m, x: torch.addmm(m.bias, x, m.weight.t(), alpha=2),
    "baddbmm": lambda m, x: torch.baddbmm(m.bias, x.view(2, 3, 4), m.weight.t().expand(2, 4, 5)),
    "einsum of a list": lambda m, x: torch.einsum("ni,oi->no", [x, m.weight]),
    "tensordot": lambda m, x: torch.tensordot(m.weight, x, dims=([1], [1])),
    "traced": lambda m, x: ATEN.addmm.default(m.bias, x, ATEN.t.default(m.weight)),
    "without gradient inside": lambda m, x: F.linear(x, m.weight) * no_grad(F.linear, x, m.weight),
}
# By what enters, and the part of the work that is in W.
ON_ROWS: dict[Any, dict[str, Build]] = {
    0.5: {
        **{name: calls(function) for name, function in PRODUCTS.items()},
        "a weight three times": lambda: one_weight(3),
        "a frozen bias": lambda: frozen("weight"),
    },
    0.3: {
        "slices of a weight": calls(
            lambda m, x: F.linear(x, m.weight[:3]) @ F.linear(x, m.weight[2:]).t().exp()
        ),
        "recomputing": between(lambda m, x: checkpoint(m, x, use_reentrant=False)),
        "recomputing reentrantly": between(lambda m, x: checkpoint(m, x, use_reentrant=True)),
    },
    0.0: {
        "no weights": lambda: nn.Sequential(nn.Tanh(), nn.MaxPool1d(2), nn.Flatten()),
        "product of inputs": calls(lambda m, x: x @ x.t()),
        "product of weights": calls(lambda m, x: x * (m.weight @ m.weight.t()).sum()),
        "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 5)),
        "vmap": calls(lambda m, x: torch.vmap(lambda row: F.linear(row, m.weight, m.bias))(x)),
        "a frozen weight": lambda: frozen("bias"),  # a bias has a sum, for which nothing need be kept
    },
    ANY: {
        "an input twice": of(partial(nn.Bilinear, 4, 4, 5), by=lambda m, x: m(x, x)),
        "functional_call": of(linear, lambda m, x: torch.func.functional_call(m, {"bias": m.bias * 2}, (x,))),
        "differentiating to x": between(partial(slope, "x")),
        "differentiating to a weight": between(partial(slope, "0.weight")),
        "a function of one's own": of(linear, lambda m, x: Own.apply(x, m.weight, m(x)) @ m.weight),
    },
}
ON_IMAGES: dict[str, Build] = {  # half in W
    "convolution and norm": conv_norm,
    "transposed": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
    "circular": lambda: nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular"),
    "traced": of(conv, by=lambda m, x: ATEN.conv2d.padding(x, m.weight, m.bias, [1, 1], "same")),
    "traced in general": of(conv, by=lambda m, x: ATEN.convolution.default(x, m.weight, m.bias, *CONV)),
}
LAYERS: dict[str, tuple[Build, list[Enters], Any]] = {
    **{
        name: (build, [ROWS], part if part is ANY else pytest.approx(part, abs=0.1 * (part == 0.3)))
        for part, builds in ON_ROWS.items()
        for name, build in builds.items()
    },
    **{f"{name} of images": (build, [IMAGE], HALF) for name, build in ON_IMAGES.items()},
    "channels last": (lambda: conv_norm().to(memory_format=torch.channels_last), [last_channels], HALF),
    "grouped": (lambda: nn.Conv1d(4, 8, 3, groups=2, dilation=2, padding="same"), [(2, 4, 9)], ANY),
    "one sample": (linear, [(4,)], 0.5),
    "transformer": (encoder, [(2, 6, 8)], HALF),
    "addmm of two": (calls(lambda m, x, y: torch.addmm(y, x, m.weight.t())), [ROWS, (6, 5)], HALF),
    "recurrent": (of(partial(nn.LSTM, 4, 5, 2), by=lambda m, x: m(x)[0]), [(3, 2, 4)], 0.0),
    "an embedding tied with the head": (Tied, [ROWS, ids], HALF),
    "a sparse gradient": (
        of(partial(nn.Embedding, 7, 4, sparse=True), lambda m, x, i: x * m(i)),
        [ROWS, ids],
        ANY,
    ),
    "complex": (lambda: nn.Linear(4, 5, dtype=torch.complex64), [waves], HALF),
    # Its weight gradient is put off as well, though I has nothing to do there.
    "no input needs a gradient": (
        calls(lambda m, x, mask: x + F.linear(mask.to(x.dtype), m.weight[:, :1])),
        [(6, 5), mask],
        ANY,
    ),
    "tuples": (
        calls(lambda m, x, y: (F.linear(x, m.weight), y * 2, F.linear(x, m.weight).detach() > 0)),
        [ROWS, (6, 2)],
        ANY,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_s_gradients_are_those_of_a_whole_backward(name):
    build, enters, part = LAYERS[name]
    found = compared(build, entering(*enters))
    assert part is None or found == part


@pytest.mark.parametrize("name", ["convolution and norm of images", "a weight three times", "transformer"])
def test_so_they_are_under_autocast(name):
    build, enters, part = LAYERS[name]
    assert compared(build, entering(*enters), numerics=BF16) == part


class Forked(nn.Module):
    """A convolution, and products of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.left, self.right = nn.Conv2d(3, 4, 3), nn.Linear(6, 5), nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        return (self.left(y) * self.right(y)).flatten(1)


def test_layers_of_a_traced_model_put_off_all_that_the_estimate_counts_for_weights():
    shape = example(IMAGE[1:])
    network = network_of(Forked(), shape)
    layers, made = estimate(network, shape.of(2)), [shape.of(2)]
    values = {Made(INPUT, number): made_up(spec) for number, spec in enumerate(made[0].specs)}
    for index, layer in enumerate(layers):
        given = [values[value] for value in layer.takes]
        outputs = leaves_of(network.call(index, tuple(given), tuple(made)))
        values |= {Made(index, number): t.detach() for number, t in enumerate(outputs)}
        if any(layer.reached):
            part, run = deepcopy(network.modules[index]), partial(network.call, index, made=tuple(made))

            def build(index: int = index, part: nn.Module = part, run: Any = run) -> nn.Module:
                network.modules[index] = deepcopy(part)
                return Calls(lambda m, *xs: leaves_of(run(xs)), network.modules[index])

            compared(build, [given])
            assert Trained(build, [given], split=True).flops[1] == layer.weight_flops
        made.append(layer.output)
    assert sum(bool(layer.weight_flops) for layer in layers) > 1


def test_a_layer_that_differentiates_twice_is_refused():
    with pytest.raises(RuntimeError, match="choose a schedule without I and W"):
        compared(between(partial(slope, "x", create=True)), entering(ROWS))


def test_what_a_hook_differentiates_during_i_is_its_own():
    compared(lambda: nn.Sequential(nn.Linear(4, 4), Solve(), nn.Linear(4, 4)), entering(ROWS), more=True)


def test_hooks_of_modules_are_called():
    seen: list[tuple[int, ...]] = []

    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        module.register_full_backward_hook(lambda m, back, grads: seen.append(back[0].shape))
        module[0].register_full_backward_hook(lambda m, back, grads: (3 * back[0],))
        return module

    compared(build, entering(ROWS))
    assert seen == [ROWS] * 2 * 3


def test_an_input_changed_behind_its_operation_is_an_error():
    """As in a whole backward, which would compute a wrong gradient."""

    def build() -> nn.Module:
        return Calls(lambda m, x: (lambda y: (F.linear(y, m.weight), y.add_(1))[0])(x * 1))

    for split in (False, True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            Trained(build, entering(ROWS), split)


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
    leaves, deferred = weights_of(module), Deferred(weights_of(module))
    x, grad = torch.randn(17, 5, requires_grad=True), torch.randn(17, 13)
    with Live() as live:
        with deferred.recording():
            outputs = [module(x)]
        # The norm's statistics, what enters it, GELU and the second product, Tanh's result, and the output.
        assert live.now // 4 == 7 + 7 + 3 * 17 * 7 + 17 * 11 + 17 * 13
        deferred.input_half(leaves, outputs, [grad])
        outputs.clear()
        x.grad = None
        # The norm's weights have their gradients; x and the last gradient are made elsewhere.
        inputs = grads = 17 * 7 + 17 * 11
        assert live.now // 4 == 7 + 7 + inputs + grads
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in deferred.held}
        assert sum(held.values()) == live.now + x.nbytes + grad.nbytes
        deferred.weight_half()
        assert deferred.held == []
        assert live.now == sum(p.nbytes for p in leaves)  # their gradients


def test_under_autocast_a_dear_operation_holds_its_input_once():
    module = nn.Linear(5, 7)
    x = torch.randn(17, 5, requires_grad=True)
    with Live() as live:
        deferred = Deferred(weights_of(module))
        with torch.autocast("cpu", torch.bfloat16), deferred.recording():
            y = module(x * 2)
        assert live.now == y.nbytes + 2 * (17 * 5 + 5 * 7)  # in bfloat16: its input and weight


def test_a_forward_that_is_dropped_leaves_nothing_behind(without_gc):
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    x = torch.randn(2, 5, requires_grad=True)
    with Live() as live:
        deferred = Deferred(weights_of(module))
        with deferred.recording():
            outputs = [module(x)]
        assert live.now
        del deferred, outputs
        assert not live.now


def test_a_weight_gradient_that_is_not_finite_shows_when_the_batch_is_reduced():
    """I sees the gradient of the input alone, which is finite here."""
    layers = nn.Sequential(nn.Linear(4, 4)).double()
    middle = Stage(1, part_of(layers, before=1), partial(torch.optim.SGD, lr=0.1), lambda update: 1.0)
    middle.observers = observers_of(middle)
    middle.forward(0, (torch.full((2, 4), 1e300, dtype=torch.float64),), 0, saving=Saving(split=True))
    (back,) = middle.backward_input(0, (torch.full((2, 4), 1e10, dtype=torch.float64),), 0)
    assert back.isfinite().all()
    middle.backward_weight(0, 0)
    with pytest.raises(TrainingStopped, match="the gradient of"):
        middle.reduce()
