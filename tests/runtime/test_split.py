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
from pipetrain.runtime.microbatch import WHOLE, Saving
from pipetrain.runtime.session import observers_of
from pipetrain.runtime.split import Deferred
from pipetrain.runtime.stage import Stage
from tests.support.hugging_face import gpt2, resnet
from tests.support.parts import part_of
from tests.support.tracing import images, tokens

MICROBATCHES = 3
Build = Callable[[], nn.Module]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def weights_of(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


def outputs_of(made: object) -> list[Tensor]:
    outputs = made if isinstance(made, tuple) else (made,)
    return [t for t in outputs if isinstance(t, Tensor) and t.requires_grad]


def entering(*shapes: tuple[int, ...]) -> list[list[Tensor]]:
    return [[torch.randn(shape) for shape in shapes] for _ in range(MICROBATCHES)]


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


def compared(build: Build, *shapes: tuple[int, ...], data=None, numerics=None, more: bool = False) -> float:
    """Compare a split backward with a whole one; return the part of the work that is in W.

    `more`: the halves may be more work than the whole.
    """
    data = data or entering(*shapes)
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
    """A layer that is a function of a weight [5, 4], a bias [5], and its inputs."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.bias = nn.Parameter(torch.randn(5))
        self.function = function

    def forward(self, *xs: Tensor) -> Tensor:
        return self.function(self, *xs)


def conv_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))


ATEN = torch.ops.aten
IMAGE, ROWS = (2, 3, 8, 8), (6, 4)
HALF = pytest.approx(0.5)

LAYERS = {
    "convolution and norm": (conv_norm, [IMAGE], HALF),
    "in-place ReLU": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(True), nn.Flatten()), [IMAGE], HALF),
    "grouped": (lambda: nn.Conv1d(4, 8, 3, groups=2, dilation=2, padding="same"), [(2, 4, 9)], None),
    "circular": (lambda: nn.Conv1d(4, 8, 3, padding=1, padding_mode="circular"), [(2, 4, 9)], HALF),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1), [IMAGE], HALF),
    "of 3 dimensions": (lambda: nn.Conv3d(2, 3, 2), [(1, 2, 4, 4, 4)], HALF),
    "linear of 3 dimensions": (lambda: nn.Linear(4, 5), [(2, 3, 4)], HALF),
    "one sample": (lambda: nn.Linear(4, 5), [(4,)], 0.5),
    "GPT": (lambda: gpt(1, 2, 8, 6, 20)[1:], [(2, 6, 8)], HALF),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        [(2, 6, 8)],
        HALF,
    ),
    "attention": (
        lambda: Calls.of(nn.MultiheadAttention(8, 2, add_bias_kv=True), lambda m, q, k: m(q, k, k)[0]),
        [(6, 2, 8), (5, 2, 8)],
        pytest.approx(0.4, abs=0.1),
    ),
    "matrix product": (lambda: Calls(lambda m, x: x @ m.weight.t()), [ROWS], HALF),
    "mm": (lambda: Calls(lambda m, x: x.mm(m.weight.T) + m.bias), [ROWS], HALF),
    "addmm": (lambda: Calls(lambda m, x: torch.addmm(m.bias, x, m.weight.t(), alpha=2)), [ROWS], HALF),
    "addmm of two": (lambda: Calls(lambda m, x, y: torch.addmm(y, x, m.weight.t())), [ROWS, (6, 5)], HALF),
    "baddbmm": (
        lambda: Calls(lambda m, x: torch.baddbmm(m.bias, x, m.weight.t().expand(2, 4, 5))),
        [(2, 3, 4)],
        HALF,
    ),
    "einsum": (lambda: Calls(lambda m, x: torch.einsum("ni,oi->no", x, m.weight)), [ROWS], HALF),
    "einsum of a list": (lambda: Calls(lambda m, x: torch.einsum("ni,oi->no", [x, m.weight])), [ROWS], HALF),
    "tensordot": (lambda: Calls(lambda m, x: torch.tensordot(m.weight, x, dims=([1], [1]))), [ROWS], HALF),
    "slices of a weight": (
        lambda: Calls(lambda m, x: F.linear(x, m.weight[:3]) @ F.linear(x, m.weight[2:]).t().exp()),
        [ROWS],
        pytest.approx(0.3, abs=0.1),
    ),
    "by name": (lambda: Calls(lambda m, x: F.linear(input=x, bias=m.bias, weight=m.weight)), [ROWS], HALF),
    "traced": (
        lambda: Calls(lambda m, x: ATEN.addmm.default(m.bias, x, ATEN.t.default(m.weight))),
        [ROWS],
        HALF,
    ),
    "traced convolution": (
        lambda: Calls.of(
            nn.Conv2d(3, 4, 3), lambda m, x: ATEN.conv2d.padding(x, m.weight, m.bias, [1, 1], "same")
        ),
        [IMAGE],
        HALF,
    ),
    "traced convolution in general": (
        lambda: Calls.of(
            nn.Conv2d(3, 4, 3),
            lambda m, x: ATEN.convolution.default(
                x, m.weight, m.bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1
            ),
        ),
        [IMAGE],
        HALF,
    ),
    "several inputs": (lambda: nn.Bilinear(4, 3, 5), [ROWS, (6, 3)], None),
    "an input twice": (lambda: Calls.of(nn.Bilinear(4, 4, 5), lambda m, x: m(x, x)), [ROWS], None),
    "no weights": (lambda: nn.Sequential(nn.Tanh(), nn.MaxPool1d(2), nn.Flatten()), [ROWS], 0.0),
    "product of inputs": (lambda: Calls(lambda m, x: x @ x.t()), [ROWS], 0.0),
    "product of weights": (lambda: Calls(lambda m, x: x * (m.weight @ m.weight.t()).sum()), [ROWS], 0.0),
    "recurrent": (lambda: Calls.of(nn.LSTM(4, 5, 2), lambda m, x: m(x)[0]), [(3, 2, 4)], 0.0),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 5)), [ROWS], 0.0),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 5)), [ROWS], 0.0),
    "without gradient inside": (
        lambda: Calls(lambda m, x: F.linear(x, m.weight) * no_grad(F.linear, x, m.weight)),
        [ROWS],
        HALF,
    ),
    "functional_call": (
        lambda: Calls.of(
            nn.Linear(4, 5), lambda m, x: torch.func.functional_call(m, {"bias": m.bias * 2}, (x,))
        ),
        [ROWS],
        None,
    ),
    "vmap": (
        lambda: Calls(lambda m, x: torch.vmap(lambda row: F.linear(row, m.weight, m.bias))(x)),
        [ROWS],
        0.0,
    ),
}


def no_grad(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    with torch.no_grad():
        return function(*args)


def _of(module: nn.Module, function: Callable[..., Tensor]) -> nn.Module:
    """Return a layer that calls a function of this module and its inputs."""
    layer = Calls(lambda m, *xs: function(m.inner, *xs))
    del layer.weight, layer.bias
    layer.inner = module
    return layer


Calls.of = staticmethod(_of)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_s_gradients_are_those_of_a_whole_backward(name):
    build, shapes, part = LAYERS[name]
    found = compared(build, *shapes)
    if part is not None:
        assert found == part


@pytest.mark.parametrize(
    ("build", "width"),
    [(lambda: vgg16(width=4)[5:9], 16), (lambda: resnet18()[2:4], 64)],
    ids=["VGG", "ResNet"],
)
def test_stages_of_vision_models(build, width):
    assert compared(build, (2, width, 4, 4)) == pytest.approx(0.5, abs=0.1)


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
                return Calls.of(network.modules[index], lambda m, *xs: leaves_of(run(xs)))

            compared(build, data=[given])
            assert Trained(build, [given], split=True).flops[1] == layer.weight_flops
        made.append(layer.output)


def test_channels_last():
    data = [[torch.randn(IMAGE).to(memory_format=torch.channels_last)] for _ in range(MICROBATCHES)]
    assert compared(lambda: conv_norm().to(memory_format=torch.channels_last), data=data) == HALF


# Weights


class Tied(nn.Module):
    """The mean of an embedding, then layers, and a head with the embedding's weight."""

    def __init__(self, *layers: nn.Module, sparse: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4, sparse=sparse)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return F.linear(self.layers(x + self.tokens(ids)), self.tokens.weight)


def tied(uses: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(4, 4) for _ in range(uses)]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))


@pytest.mark.parametrize("uses", [2, 3])
def test_a_weight_of_several_layers(uses):
    assert compared(lambda: tied(uses), ROWS) == HALF


@pytest.mark.parametrize("between", [[], [nn.Linear(4, 4)], [Tied(), nn.Linear(7, 4)]], ids=len)
def test_an_embedding_tied_with_the_head(between):
    data = [[torch.randn(ROWS), torch.randint(7, (6,))] for _ in range(MICROBATCHES)]

    def build() -> nn.Module:
        made = Tied(nn.Linear(4, 4), nn.LayerNorm(4))
        made.more = nn.Embedding(7, 4)
        made.more.weight = made.tokens.weight
        plain = made.forward
        made.forward = lambda x, ids: plain(x + made.more(ids), ids)  # three uses
        return made

    assert compared(build, data=data) == HALF


def test_a_sparse_gradient():
    data = [[torch.randn(ROWS), torch.randint(7, (6,))] for _ in range(MICROBATCHES)]
    embedding = lambda: Calls.of(nn.Embedding(7, 4, sparse=True), lambda m, x, ids: x * m(ids))  # noqa: E731
    compared(embedding, data=data)


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_layer_that_is_frozen_in_part(trained):
    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name.endswith(trained))
        return module

    # The gradient of a bias is a sum, for which nothing need be kept.
    assert compared(build, ROWS) == (HALF if trained == "weight" else 0)


def test_complex_weights():
    data = [[torch.randn(ROWS, dtype=torch.complex64)] for _ in range(MICROBATCHES)]
    assert compared(lambda: nn.Linear(4, 5, dtype=torch.complex64), data=data) == HALF


@pytest.mark.parametrize("build", [conv_norm, lambda: tied(3)], ids=["convolution", "a weight three times"])
def test_autocast(build):
    shape = IMAGE if build is conv_norm else ROWS
    part = compared(build, shape, numerics=partial(torch.autocast, "cpu", torch.bfloat16))
    assert part == HALF


def test_attention_under_autocast():
    build, shapes, part = LAYERS["transformer"]
    assert compared(build, *shapes, numerics=partial(torch.autocast, "cpu", torch.bfloat16)) == part


# Layers that differentiate or recompute


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_that_recomputes_has_its_gradients_in_i(reentrant):
    part = compared(lambda: nn.Sequential(nn.Linear(4, 4), Recomputed(reentrant), nn.Linear(4, 4)), ROWS)
    assert 0.1 < part < 0.4


def slope(layer: nn.Module, x: Tensor, wanted: list[Tensor], create: bool = False) -> list[Tensor]:
    return list(torch.autograd.grad(layer(x).square().sum(), wanted, create_graph=create))


class Slope(nn.Module):
    """Adds the gradient that its layer has at x, of x or of the layer's weight."""

    def __init__(self, of_weight: bool, create: bool = False) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.of_weight, self.create = of_weight, create

    def forward(self, x: Tensor) -> Tensor:
        wanted = self.inner[0].weight if self.of_weight else x
        (made,) = slope(self.inner, x, [wanted], self.create)
        return self.inner(x) + made.sum()


@pytest.mark.parametrize("of_weight", [False, True])
def test_a_layer_that_differentiates_within_its_forward(of_weight):
    build = lambda: nn.Sequential(nn.Linear(4, 4), Slope(of_weight), nn.Linear(4, 4))  # noqa: E731
    compared(build, ROWS)


def test_a_layer_that_differentiates_twice_is_refused():
    with pytest.raises(RuntimeError, match="choose a schedule without I and W"):
        compared(lambda: Slope(of_weight=False, create=True), ROWS)


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


def test_what_a_hook_differentiates_during_i_is_its_own():
    compared(lambda: nn.Sequential(nn.Linear(4, 4), Solve(), nn.Linear(4, 4)), ROWS, more=True)


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


def test_functions_of_one_s_own():
    compared(lambda: Calls(lambda m, x: F.linear(Doubled.apply(x, m.weight), m.weight.t())), ROWS)


def test_an_operation_that_no_gradient_reaches_leaves_its_weight_without_one():
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.unused = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            return Stopped.apply(self.a(x), self.b(x))

    compared(Ends, ROWS)


def test_hooks_of_modules_are_called():
    seen: list[tuple[int, ...]] = []

    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        module.register_full_backward_hook(lambda m, back, grads: seen.append(back[0].shape))
        module[0].register_full_backward_hook(lambda m, back, grads: (3 * back[0],))
        return module

    compared(build, ROWS)
    assert seen == [ROWS] * 2 * MICROBATCHES


def test_a_layer_without_an_input_that_needs_a_gradient():
    """Its weight gradient is put off as well, though I has nothing to do there."""
    data = [[torch.randn(6, 5), torch.arange(6)[:, None] > 2] for _ in range(MICROBATCHES)]

    def build() -> nn.Module:
        return Calls(lambda m, x, mask: x + F.linear(mask.to(x.dtype), m.weight[:, :1]))

    compared(build, data=data)


def test_a_tuple_goes_in_and_out():
    def pair(m: Calls, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = F.linear(x, m.weight)
        return made, y * 2, made.detach() > 0

    assert compared(lambda: Calls(pair), ROWS, (6, 2)) == HALF


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
    gc.collect()
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


# Stages


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SPLIT = Saving(split=True)


def stage(layers: nn.Module, skips: bool = False, **arguments: Any) -> Stage:
    made = Stage(1, part_of(layers, before=1), SGD, lambda update: 1.0, **arguments)
    made.observers = observers_of(made, skips)
    return made


def states(of: Stage) -> list[Tensor]:
    return [t.clone() for t in of.module.state_dict().values()]


def test_a_step_between_the_halves_of_a_later_batch_over_an_older_version():
    """As in v_async: two batches read version 0, and the step of the first comes before the second's W."""

    def make() -> Stage:
        torch.manual_seed(1)
        return stage(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)))

    whole, split = make(), make()
    xs, grads = torch.randn(3, 6, 4), torch.randn(3, 6, 4)
    for of in (whole, split):
        for mb in range(2):
            of.forward(mb, (xs[mb],), 0, saving=SPLIT if of is split else WHOLE)
    wanted = whole.backward(0, (grads[0],), 0)
    found = split.backward_input(0, (grads[0],), 0)
    later = split.backward_input(1, (grads[1],), 0)
    split.backward_weight(0, 0)
    assert torch.equal(*wanted, *found)
    for of in (whole, split):
        of.reduce()
        of.step(keep=True)
        of.forward(2, (xs[2],), 1, saving=SPLIT if of is split else WHOLE)
    assert torch.equal(*whole.backward(1, (grads[1],), 0), *later)
    newest = split.backward_input(2, (grads[2],), 1)  # over the other version, before W of the older one
    split.backward_weight(1, 0)
    for of in (whole, split):
        of.reduce()
        of.weights.release(0)
        of.step(keep=True)
    assert torch.equal(*whole.backward(2, (grads[2],), 1), *newest)
    split.backward_weight(2, 1)
    for of in (whole, split):
        of.reduce()
        of.step(keep=False)
    for a, b in zip(states(whole), states(split), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("skips", [False, True])
def test_a_weight_gradient_that_is_not_finite_shows_when_the_batch_is_reduced(skips):
    """I sees the gradient of the input alone, which is finite here."""
    middle = stage(nn.Sequential(nn.Linear(4, 4)).double(), skips=skips)
    before = states(middle)
    middle.forward(0, (torch.full((2, 4), 1e300, dtype=torch.float64),), 0, saving=SPLIT)
    (back,) = middle.backward_input(0, (torch.full((2, 4), 1e10, dtype=torch.float64),), 0)
    assert back.isfinite().all()
    middle.backward_weight(0, 0)
    if skips:
        middle.reduce()
        middle.step(keep=False)
        assert middle.skipped == 1
        assert all(torch.equal(a, b) for a, b in zip(before, states(middle), strict=True))
    else:
        with pytest.raises(TrainingStopped, match="the gradient of"):
            middle.reduce()


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("attention", [False, True])
def test_a_forward_that_is_recomputed_has_a_split_backward(attention, selective):
    def make(selective: bool) -> Stage:
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) if attention else nn.Linear(8, 8)
        return stage(nn.Sequential(nn.Linear(8, 8), layer, nn.BatchNorm1d(6)), selective=selective)

    whole, split = make(False), make(selective)
    x, grad = torch.randn(2, 6, 8), torch.randn(2, 6, 8)
    torch.manual_seed(3)
    outputs = whole.forward(0, (x,), 0)
    torch.manual_seed(3)
    assert torch.equal(*split.forward(0, (x,), 0, saving=Saving(split=True, recomputed=True)), *outputs)
    split.recompute(0, 0)
    assert torch.equal(*split.backward_input(0, (grad,), 0), *whole.backward(0, (grad,), 0))
    split.backward_weight(0, 0)
    for of in (whole, split):
        of.reduce()
        of.step(keep=False)
    for a, b in zip(states(whole), states(split), strict=True):
        assert torch.equal(a, b)
