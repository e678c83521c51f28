"""A backward in two halves has the gradients of a whole one, to the last bit, and costs no more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pipetrain.errors import TrainingStopped
from pipetrain.models.gpt import gpt
from pipetrain.models.vision import resnet18, vgg16
from pipetrain.network.chain import network_of
from pipetrain.network.network import INPUT, Made
from pipetrain.network.tensors import made_up
from pipetrain.network.values import leaves_of
from pipetrain.plan.estimate import estimate
from pipetrain.runtime.microbatch import Saving
from pipetrain.runtime.session import observers_of
from pipetrain.runtime.split import Deferred
from pipetrain.runtime.stage import Stage
from tests.support.hugging_face import gpt2, resnet
from tests.support.parts import part_of
from tests.support.tracing import images, tokens

MICROBATCHES = 3
Build = Callable[[], nn.Module]
Enters = tuple[int, ...] | Callable[[], Tensor]  # a shape, or what makes the tensor
BF16 = partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def weights_of(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def outputs_of(made: object) -> list[Tensor]:
    outputs = made if isinstance(made, tuple) else (made,)
    return [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]


def entering(*enters: Enters) -> list[list[Tensor]]:
    return [[torch.randn(t) if isinstance(t, tuple) else t() for t in enters] for _ in range(MICROBATCHES)]


class Trained:
    """Gradients of a module over several microbatches, and the work of its backward."""

    def __init__(self, build: Build, data: Sequence[Sequence[Tensor]], split: bool, numerics=None) -> None:
        torch.manual_seed(1)
        self.module = build().train()
        leaves = weights_of(self.module)
        opened = []
        for tensors in data:
            xs = [
                t.clone().requires_grad_() if t.is_floating_point() or t.is_complex() else t for t in tensors
            ]
            deferred = Deferred(leaves)
            with numerics() if numerics else torch.enable_grad():
                if split:
                    with deferred.recording():
                        outputs = outputs_of(self.module(*xs))
                else:
                    outputs = outputs_of(self.module(*xs))
            opened.append((xs, outputs, deferred))
        torch.manual_seed(2)
        grads = [[torch.randn_like(t) for t in outputs] for _, outputs, _ in opened]
        with FlopCounterMode(display=False) as first:
            for (_, outputs, deferred), given in zip(opened, grads, strict=True):
                if split:
                    deferred.input_half(leaves, outputs, given)
                else:
                    torch.autograd.backward(outputs, given)
        if split:
            assert all(leaf.grad is None for leaf in leaves)
        with FlopCounterMode(display=False) as second:
            for _, _, deferred in opened:
                if split:
                    deferred.weight_half()
        self.flops = first.get_total_flops(), second.get_total_flops()
        self.inputs = [[t.grad for t in xs] for xs, _, _ in opened]
        self.weights = {name: p.grad for name, p in self.module.named_parameters()}
        self.buffers = dict(self.module.named_buffers())


def assert_same(split: Sequence[Tensor | None], whole: Sequence[Tensor | None], what: str) -> None:
    for a, b in zip(split, whole, strict=True):
        assert (a is None) == (b is None), what
        if a is not None and b is not None:
            assert a.layout == b.layout
            dense = [t.to_dense() if t.is_sparse else t for t in (a, b)]
            assert torch.equal(*dense), what
            assert dense[0].stride() == dense[1].stride(), what


def compared(build: Build, data: list[list[Tensor]], numerics: Any = None, more: bool = False) -> float:
    """Compare a split backward with a whole one; return the part of the work that is in W.

    `more`: the halves may be more work than the whole.
    """
    whole = Trained(build, data, split=False, numerics=numerics)
    split = Trained(build, data, split=True, numerics=numerics)
    for mb, (a, b) in enumerate(zip(split.inputs, whole.inputs, strict=True)):
        assert_same(a, b, f"input of microbatch {mb}")
    for name in whole.weights:
        assert_same([split.weights[name]], [whole.weights[name]], name)
    for name in whole.buffers:
        assert torch.equal(split.buffers[name], whole.buffers[name])
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


def of(make: Callable[..., nn.Module], *arguments: Any, by: Callable[..., Any], **options: Any) -> Build:
    """A layer that is a function of this module and its inputs."""
    return lambda: Calls(lambda m, *xs: by(m.inner, *xs), make(*arguments, **options))


def no_grad(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with torch.no_grad():
        return function(*args)


def conv_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


class Tied(nn.Module):
    """The mean of an embedding, then layers, and a head with the embedding's weight; `more`: a third use."""

    def __init__(self, *layers: nn.Module, more: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.layers = nn.Sequential(*layers)
        if more:
            self.more = nn.Embedding(7, 4)
            self.more.weight = self.tokens.weight

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.more(ids) if hasattr(self, "more") else x
        return F.linear(self.layers(x + self.tokens(ids)), self.tokens.weight)


class TiedTwice(nn.Module):
    """Two of them, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between, self.last = Tied(), nn.Linear(7, 4), Tied(more=True)
        self.last.tokens.weight = self.last.more.weight = self.first.tokens.weight

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.last(self.between(self.first(x, ids)), ids)


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


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


class Slope(nn.Module):
    """Adds the gradient that its layer has at x, of x or of the layer's weight."""

    def __init__(self, of_weight: bool, create: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.of_weight, self.create = of_weight, create

    def forward(self, x: Tensor) -> Tensor:
        wanted = self.inner[0].weight if self.of_weight else x
        (made,) = torch.autograd.grad(self.inner(x).square().sum(), wanted, create_graph=self.create)
        return self.inner(x) + made.sum()


class Solve(nn.Module):
    """x + the fixed point of z = tanh(layer(z) + x), differentiated by fixed-point iteration in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        nn.init.uniform_(self.layer.weight, -0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(10):
                z = torch.tanh(self.layer(z) + x)
        z = torch.tanh(self.layer(z) + x)
        at = z.detach().requires_grad_()
        again = torch.tanh(self.layer(at) + x.detach())

        def hook(grad: Tensor) -> Tensor:
            found = grad
            for _ in range(10):
                found = torch.autograd.grad(again, at, found, retain_graph=True)[0] + grad
            return found

        z.register_hook(hook)
        return z


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return 2 * grad @ weight, 2 * grad.t() @ x


class Stopped(torch.autograd.Function):
    """Lets no gradient through to its second input."""

    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Ends(nn.Module):
    """No gradient reaches one of its layers, and another is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return Stopped.apply(self.a(x), self.b(x))


def between(layer: Build) -> Build:
    return lambda: nn.Sequential(nn.Linear(4, 4), layer(), nn.Linear(4, 4))


ATEN = torch.ops.aten
IMAGE, ROWS = (2, 3, 8, 8), (6, 4)
HALF, SOME = pytest.approx(0.5), pytest.approx(0.3, abs=0.1)


def ids() -> Tensor:
    return torch.randint(7, (6,))


def last_channels() -> Tensor:
    return torch.randn(IMAGE).to(memory_format=torch.channels_last)


def waves() -> Tensor:
    return torch.randn(ROWS, dtype=torch.complex64)


def mask() -> Tensor:
    return torch.arange(6)[:, None] > 2


# What is built, what enters it, and the part of the work that is in W.
LAYERS: dict[str, tuple[Build, list[Enters], Any]] = {
    "convolution and norm": (conv_norm, [IMAGE], HALF),
    "channels last": (lambda: conv_norm().to(memory_format=torch.channels_last), [last_channels], HALF),
    "in-place ReLU": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(True), nn.Flatten()), [IMAGE], HALF),
    "grouped": (lambda: nn.Conv1d(4, 8, 3, groups=2, dilation=2, padding="same"), [(2, 4, 9)], None),
    "circular": (lambda: nn.Conv1d(4, 8, 3, padding=1, padding_mode="circular"), [(2, 4, 9)], HALF),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), [IMAGE], HALF),
    "of 3 dimensions": (lambda: nn.Conv3d(2, 3, 2), [(1, 2, 4, 4, 4)], HALF),
    "linear of 3 dimensions": (lambda: nn.Linear(4, 5), [(2, 3, 4)], HALF),
    "one sample": (lambda: nn.Linear(4, 5), [(4,)], 0.5),
    "GPT": (lambda: gpt(1, 2, 8, 6, 20)[1:], [(2, 6, 8)], HALF),
    "VGG": (lambda: vgg16(width=4)[5:9], [(2, 16, 4, 4)], pytest.approx(0.5, abs=0.1)),
    "ResNet": (lambda: resnet18()[2:4], [(2, 64, 4, 4)], pytest.approx(0.5, abs=0.1)),
    "transformer": (encoder, [(2, 6, 8)], HALF),
    "attention": (
        of(nn.MultiheadAttention, 8, 2, add_bias_kv=True, by=lambda m, q, k: m(q, k, k)[0]),
        [(6, 2, 8), (5, 2, 8)],
        pytest.approx(0.4, abs=0.1),
    ),
    "matrix product": (calls(lambda m, x: x @ m.weight.t()), [ROWS], HALF),
    "mm": (calls(lambda m, x: x.mm(m.weight.T) + m.bias), [ROWS], HALF),
    "addmm": (calls(lambda m, x: torch.addmm(m.bias, x, m.weight.t(), alpha=2)), [ROWS], HALF),
    "addmm of two": (calls(lambda m, x, y: torch.addmm(y, x, m.weight.t())), [ROWS, (6, 5)], HALF),
    "baddbmm": (
        calls(lambda m, x: torch.baddbmm(m.bias, x, m.weight.t().expand(2, 4, 5))),
        [(2, 3, 4)],
        HALF,
    ),
    "einsum": (calls(lambda m, x: torch.einsum("ni,oi->no", x, m.weight)), [ROWS], HALF),
    "einsum of a list": (calls(lambda m, x: torch.einsum("ni,oi->no", [x, m.weight])), [ROWS], HALF),
    "tensordot": (calls(lambda m, x: torch.tensordot(m.weight, x, dims=([1], [1]))), [ROWS], HALF),
    "slices of a weight": (
        calls(lambda m, x: F.linear(x, m.weight[:3]) @ F.linear(x, m.weight[2:]).t().exp()),
        [ROWS],
        SOME,
    ),
    "by name": (calls(lambda m, x: F.linear(input=x, bias=m.bias, weight=m.weight)), [ROWS], HALF),
    "traced": (calls(lambda m, x: ATEN.addmm.default(m.bias, x, ATEN.t.default(m.weight))), [ROWS], HALF),
    "traced convolution": (
        of(nn.Conv2d, 3, 4, 3, by=lambda m, x: ATEN.conv2d.padding(x, m.weight, m.bias, [1, 1], "same")),
        [IMAGE],
        HALF,
    ),
    "traced convolution in general": (
        of(
            nn.Conv2d,
            3,
            4,
            3,
            by=lambda m, x: ATEN.convolution.default(
                x, m.weight, m.bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
            ),
        ),
        [IMAGE],
        HALF,
    ),
    "several inputs": (lambda: nn.Bilinear(4, 3, 5), [ROWS, (6, 3)], None),
    "an input twice": (of(nn.Bilinear, 4, 4, 5, by=lambda m, x: m(x, x)), [ROWS], None),
    "no weights": (lambda: nn.Sequential(nn.Tanh(), nn.MaxPool1d(2), nn.Flatten()), [ROWS], 0.0),
    "product of inputs": (calls(lambda m, x: x @ x.t()), [ROWS], 0.0),
    "product of weights": (calls(lambda m, x: x * (m.weight @ m.weight.t()).sum()), [ROWS], 0.0),
    "recurrent": (of(nn.LSTM, 4, 5, 2, by=lambda m, x: m(x)[0]), [(3, 2, 4)], 0.0),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 5)), [ROWS], 0.0),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 5)), [ROWS], 0.0),
    "without gradient inside": (
        calls(lambda m, x: F.linear(x, m.weight) * no_grad(F.linear, x, m.weight)),
        [ROWS],
        HALF,
    ),
    "functional_call": (
        of(nn.Linear, 4, 5, by=lambda m, x: torch.func.functional_call(m, {"bias": m.bias * 2}, (x,))),
        [ROWS],
        None,
    ),
    "vmap": (calls(lambda m, x: torch.vmap(lambda row: F.linear(row, m.weight, m.bias))(x)), [ROWS], 0.0),
    "a weight twice": (lambda: one_weight(2), [ROWS], HALF),
    "a weight three times": (lambda: one_weight(3), [ROWS], HALF),
    "an embedding tied with the head": (lambda: Tied(nn.Linear(4, 4), more=True), [ROWS, ids], HALF),
    "an embedding tied twice": (TiedTwice, [ROWS, ids], HALF),
    "a sparse gradient": (
        of(nn.Embedding, 7, 4, sparse=True, by=lambda m, x, i: x * m(i)),
        [ROWS, ids],
        None,
    ),
    "a frozen bias": (lambda: frozen("weight"), [ROWS], HALF),
    # The gradient of a bias is a sum, for which nothing need be kept.
    "a frozen weight": (lambda: frozen("bias"), [ROWS], 0.0),
    "complex": (lambda: nn.Linear(4, 5, dtype=torch.complex64), [waves], HALF),
    "recomputing": (between(lambda: Recomputed(False)), [ROWS], SOME),
    "recomputing reentrantly": (between(lambda: Recomputed(True)), [ROWS], SOME),
    "differentiating to x": (between(lambda: Slope(of_weight=False)), [ROWS], None),
    "differentiating to a weight": (between(lambda: Slope(of_weight=True)), [ROWS], None),
    "a function of one's own": (
        calls(lambda m, x: F.linear(Doubled.apply(x, m.weight), m.weight.t())),
        [ROWS],
        None,
    ),
    "no gradient reaches": (Ends, [ROWS], None),
    # Its weight gradient is put off as well, though I has nothing to do there.
    "no input needs a gradient": (
        calls(lambda m, x, mask: x + F.linear(mask.to(x.dtype), m.weight[:, :1])),
        [(6, 5), mask],
        None,
    ),
    "tuples": (
        calls(lambda m, x, y: (F.linear(x, m.weight), y * 2, F.linear(x, m.weight).detach() > 0)),
        [ROWS, (6, 2)],
        None,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_s_gradients_are_those_of_a_whole_backward(name):
    build, enters, part = LAYERS[name]
    found = compared(build, entering(*enters))
    assert part is None or found == part


@pytest.mark.parametrize("name", ["convolution and norm", "a weight three times", "transformer"])
def test_so_they_are_under_autocast(name):
    build, enters, part = LAYERS[name]
    assert compared(build, entering(*enters), numerics=BF16) == part


@pytest.mark.slow
@pytest.mark.parametrize("make", [gpt2, resnet], ids=["GPT-2", "ResNet"])
def test_layers_of_a_traced_model_put_off_all_that_the_estimate_counts_for_weights(make):
    example = tokens("input_ids") if make is gpt2 else images(32)
    network = network_of(make(pytest.importorskip("transformers")).train(), example)
    layers, made = estimate(network, example.of(2)), [example.of(2)]
    values = {Made(INPUT, number): made_up(spec) for number, spec in enumerate(made[0].specs)}
    for index, layer in enumerate(layers):
        given = [values[value] for value in layer.takes]
        outputs = leaves_of(network.call(index, tuple(given), tuple(made)))
        values |= {Made(index, number): t.detach() for number, t in enumerate(outputs)}
        if any(layer.reached):
            part, before = deepcopy(network.modules[index]), tuple(made)

            def build(index: int = index, part: nn.Module = part, before: Any = before) -> nn.Module:
                network.modules[index] = deepcopy(part)
                run = partial(network.call, index, made=before)
                return Calls(lambda m, *xs: leaves_of(run(xs)), network.modules[index])

            compared(build, [given])
            assert Trained(build, [given], split=True).flops[1] == layer.weight_flops
        made.append(layer.output)


def test_a_layer_that_differentiates_twice_is_refused():
    with pytest.raises(RuntimeError, match="choose a schedule without I and W"):
        compared(lambda: Slope(of_weight=False, create=True), entering(ROWS))


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
    assert seen == [ROWS] * 2 * MICROBATCHES


def test_an_input_changed_behind_its_operation_is_an_error():
    """As in a whole backward, which would compute a wrong gradient."""

    def build() -> nn.Module:
        return Calls(lambda m, x: (lambda y: (F.linear(y, m.weight), y.add_(1))[0])(x * 1))

    for split in (False, True):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            Trained(build, entering(ROWS), split)


# Memory


class Alive(TorchDispatchMode):
    """The bytes of each storage that was made under it and is still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {id(t.untyped_storage()) for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for t in result if isinstance(result, tuple) else (result,):
            storage = t.untyped_storage() if isinstance(t, Tensor) else None
            if storage is not None and id(storage) not in known and id(storage) not in self.sizes:
                self.sizes[id(storage)] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, id(storage))
        return result

    @property
    def numbers(self) -> list[int]:
        """The sizes in float32 numbers, ascending, without those of one number."""
        return sorted(nbytes // 4 for nbytes in self.sizes.values() if nbytes > 4)


@pytest.fixture
def without_gc():
    """Let only reference counts free memory, so that a cycle shows."""
    gc.disable()
    yield
    gc.enable()


def test_after_i_only_inputs_and_output_gradients_of_dear_operations_are_held(without_gc):
    module = nn.Sequential(
        nn.Linear(5, 7),
        nn.BatchNorm1d(7),
        nn.GELU(),
        nn.Linear(7, 11),
        nn.Tanh(),
        nn.Linear(11, 13, bias=False),
    )
    leaves, deferred = weights_of(module), Deferred(weights_of(module))
    x, grad = torch.randn(17, 5, requires_grad=True), torch.randn(17, 13)
    with Alive() as alive:
        with deferred.recording():
            outputs = [module(x)]
        # The norm's statistics, what enters it, GELU and the second product, Tanh's result, and the output.
        assert alive.numbers == sorted([7, 7, 17 * 7, 17 * 7, 17 * 7, 17 * 11, 17 * 13])
        deferred.input_half(leaves, outputs, [grad])
        outputs.clear()
        x.grad = None
        # The norm's weights have their gradients; x and the last gradient are made elsewhere.
        inputs, grads = [17 * 7, 17 * 11], [17 * 7, 17 * 11]
        assert alive.numbers == sorted([7, 7, *inputs, *grads])
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() // 4 for t in deferred.held}
        assert sorted(held.values()) == sorted([*alive.numbers, x.numel(), grad.numel()])
        deferred.weight_half()
        assert deferred.held == []
        assert alive.numbers == sorted(p.numel() for p in leaves)  # their gradients


def test_under_autocast_a_dear_operation_holds_its_input_once():
    module, deferred = nn.Linear(5, 7), None
    x = torch.randn(17, 5, requires_grad=True)
    with Alive() as alive:
        deferred = Deferred(weights_of(module))
        with torch.autocast("cpu", torch.bfloat16), deferred.recording():
            y = module(x * 2)
        del y
        # In bfloat16: its input, its weight and, with the output, nothing else; not the product in float32.
        assert 17 * 5 not in alive.numbers


def test_a_forward_that_is_dropped_leaves_nothing_behind(without_gc):
    module, x = (
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
        torch.randn(2, 5, requires_grad=True),
    )
    with Alive() as alive:
        deferred = Deferred(weights_of(module))
        with deferred.recording():
            outputs = [module(x)]
        assert alive.numbers
        del deferred, outputs
        assert alive.numbers == []


@pytest.mark.parametrize("skips", [False, True])
def test_a_weight_gradient_that_is_not_finite_shows_when_the_batch_is_reduced(skips):
    """I sees the gradient of the input alone, which is finite here."""
    layers = nn.Sequential(nn.Linear(4, 4)).double()
    middle = Stage(1, part_of(layers, before=1), partial(torch.optim.SGD, lr=0.1), lambda update: 1.0)
    middle.observers = observers_of(middle, skips)
    before = [t.clone() for t in layers.state_dict().values()]
    middle.forward(0, (torch.full((2, 4), 1e300, dtype=torch.float64),), 0, saving=Saving(split=True))
    (back,) = middle.backward_input(0, (torch.full((2, 4), 1e10, dtype=torch.float64),), 0)
    assert back.isfinite().all()
    middle.backward_weight(0, 0)
    if not skips:
        with pytest.raises(TrainingStopped, match="the gradient of"):
            middle.reduce()
        return
    middle.reduce()
    middle.step(keep=False)
    assert middle.skipped == 1
    assert all(map(torch.equal, before, layers.state_dict().values()))
