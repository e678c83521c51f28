"""Any module as a network of layers: cut anywhere, it computes what the module does, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipetrain.network import draws
from pipetrain.network.network import INPUT, Made, Slice
from pipetrain.network.tracing.trace import trace
from pipetrain.network.values import TensorSpec, ValueSpec
from tests.support.tracing import assert_equal, example, inputs, tokens


class Branches(nn.Module):
    """Two branches of one trunk, a dict with what is no tensor, dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.left = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.5)
        self.right = nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = torch.relu(self.trunk(x))
        left = self.drop(self.left(h))
        right = self.norm(self.right(h)).relu_()
        return {"y": self.head(torch.cat([left, right], 1) + h.repeat(1, 2)), "h": h, "none": None, "k": 3}


def test_branches_travel_straight_to_where_they_join():
    network = assert_equal(Branches(), example((8,)), samples=5)
    assert network.names == ["trunk", "left", "right", "head"]
    assert network.takes(3, ()) == (Made(0, 0), Made(1, 0), Made(2, 0))
    assert network.drawing == {1}


class Named(nn.Module):
    """Layers that are called as a part's own attributes are."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("holders", "constants", "slice", "pack", "observed"):
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x).tanh()
        return x


def test_layers_may_have_any_names():
    assert_equal(Named(), example((8,)), samples=3)


class Block(nn.Module):
    """torchvision's BasicBlock: ReLU and the residual sum in place."""

    def __init__(self, inside: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inside, out, 1, stride), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(Block(4, 4), Block(4, 4))
        self.layer2 = nn.Sequential(Block(4, 8, 2), Block(8, 8))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(self.maxpool(self.relu(self.bn1(self.conv1(x))))))
        return self.fc(torch.flatten(nn.functional.adaptive_avg_pool2d(x, 1), 1))


def test_a_residual_block_with_operations_in_place_stays_whole():
    network = assert_equal(ResNet(), example((3, 12, 12)))
    assert network.names == ["conv1", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "fc"]
    assert all(len(network.takes(index, ())) == 1 for index in range(6))


class Level(nn.Module):
    """A level of a U-Net around the lower ones."""

    def __init__(self, inside: int, width: int, depth: int) -> None:
        super().__init__()
        self.encode = nn.Conv2d(inside, width, 3, padding=1)
        self.inner = Level(width, 2 * width, depth - 1) if depth else None
        self.decode = nn.Conv2d(3 * width if depth else width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.encode(x))
        if self.inner is not None:
            inner = self.inner(nn.functional.max_pool2d(h, 2))
            h = torch.cat([h, nn.functional.interpolate(inner, scale_factor=2.0)], 1)
        return torch.relu(self.decode(h))


def test_a_nested_unet_sends_its_skips_straight():
    network = assert_equal(Level(3, 4, 3), example((3, 16, 16)))
    names = ["encode", "inner.encode", "inner.inner.encode", "inner.inner.inner"]
    assert network.names == [*names, "inner.inner.decode", "inner.decode", "decode"]
    # Each decoder takes the skip, and what its inner level made; it joins them itself.
    assert network.takes(4, ()) == (Made(2, 0), Made(3, 0))
    assert network.takes(6, ()) == (Made(0, 0), Made(5, 0))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, 2, dropout=0.3, batch_first=True)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = self.lstm(x)
        z, weights = self.attention(y, y, y, need_weights=True)
        return self.head((y + z).mean(1)), weights


def test_an_lstm_and_attention_with_its_weights_as_an_output():
    network = assert_equal(Recurrent(), example((4, 8)))
    assert network.names == ["lstm", "attention", "head"]
    assert network.takes(2, ()) == (Made(1, 0), Made(1, 1))  # the weights are handed on as they are


class Drop(nn.Module):
    """A stochastic depth, which does nothing in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(x.shape[0], 1, 1, device=x.device) < 0.5) * 2


class Encoder(nn.Module):
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


def test_tied_weights_a_mask_by_keyword_and_what_only_training_does():
    model = Encoder()
    network = assert_equal(model, tokens("mask", "ids", length=6))
    assert network.names == ["embed", "mlps.0", "mlps.1", "mlps.2", "head"]
    assert [Made(INPUT, 1) in network.takes(k, ()) for k in range(5)] == [True, False, False, False, False]
    assert network.drawing == {1, 2, 3}
    # Tied weights have their first name, in each layer that uses them; others are somewhere.
    names = [[name for name, _ in module.named_parameters()] for module in network.modules]
    assert names[0] == ["embed.weight", "unused.weight", "unused.bias"]
    assert names[4] == ["embed.weight"]
    assert network.modules[4].get_parameter("embed.weight") is model.head.weight
    assert dict(network.modules[1].named_buffers()).keys() == {"scale"}
    assert "scale" not in network.modules[1].state_dict()  # as in the model, it is not persistent


def test_a_transformer_of_torch():
    model = nn.Transformer(8, 2, 1, 2, 16, batch_first=True)
    network = assert_equal(model, example((3, 8), (4, 8)))
    assert network.names == ["encoder", "decoder.layers.0", "decoder.layers.1"]
    assert [network.takes(k, ()) for k in range(1, 3)] == [
        (Made(INPUT, 1), Made(0, 0)),
        (Made(0, 0), Made(1, 0)),
    ]


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


def test_weights_that_are_computed_are_computed_where_they_are_used():
    network = assert_equal(Normalised(), example((4,)))
    where = [k for k, held in enumerate(network.placed) if "a.parametrizations.weight.original0" in held]
    assert len(where) > 1


def test_names_of_a_part_are_those_of_the_model():
    model = Branches()
    network = trace(model, example((8,)))
    named = {}
    for module in network.modules:
        named |= module.state_dict(keep_vars=True)
    assert named.keys() == model.state_dict().keys()
    assert all(named[name] is tensor for name, tensor in model.state_dict(keep_vars=True).items())


def test_a_part_computes_with_what_stands_in_the_places_of_its_weights():
    network = trace(Branches(), example((8,)))
    (x,) = inputs(example((8,)), 2)
    part = network.part(Slice(0, 1, (Made(INPUT, 0),), (Made(0, 0),)))
    (before,) = part(x)
    holder = part.get_submodule("trunk")
    holder._parameters["weight"] = nn.Parameter(torch.zeros(16, 8))
    holder._parameters["bias"] = nn.Parameter(torch.ones(16))
    assert torch.equal(part(x)[0], torch.ones(2, 16))
    assert torch.equal(network.modules[0](x)[0], before)
    other = copy.deepcopy(part)
    other.get_submodule("trunk")._parameters["bias"] = nn.Parameter(torch.full((16,), 2.0))
    assert torch.equal(part(x)[0], torch.ones(2, 16))
    assert torch.equal(other(x)[0], torch.full((2, 16), 2.0))


def test_layers_one_by_one_are_the_part():
    model = Branches().eval()
    network = trace(model, example((8,)))
    (x,) = inputs(example((8,)), 2)
    part = network.part(Slice(0, 4, (Made(INPUT, 0),), network.alone(3).leaves))
    seen = []

    def see(name: str, module: nn.Module, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen.append((name, len(outputs)))
        return tuple(t.clone() for t in outputs)

    torch.testing.assert_close(part.observed((x,), see), part(x), rtol=0, atol=0)
    assert seen == [("trunk", 1), ("left", 1), ("right", 1), ("head", 2)]
    assert part.pack(part(x)).keys() == {"y", "h", "none", "k"}


def test_a_layer_draws_by_its_number():
    model = Branches()
    network = trace(model, example((8,)))
    h = torch.ones(2, 16)
    alone = network.modules[1]
    with draws.drawing(draws.Seeds(1, 2, 3)):
        torch.manual_seed(0)
        (first,) = alone(h)
        torch.manual_seed(1)
        assert torch.equal(alone(h)[0], first)
    with draws.drawing(draws.Seeds(1, 2, 4)):
        assert not torch.equal(alone(h)[0], first)


def test_the_model_and_the_generators_are_as_before():
    model = Branches()
    model.norm.eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    trace(model, example((8,)))
    assert torch.equal(torch.rand(1), expected)
    assert model.training
    assert not model.norm.training
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())


def test_a_model_on_the_meta_device_has_the_same_layers():
    with torch.device("meta"):
        model = Branches()
    network = trace(model, example((8,)))
    whole = trace(Branches(), example((8,)))
    assert network.names == whole.names
    assert [network.takes(k, ()) for k in range(4)] == [whole.takes(k, ()) for k in range(4)]
    part = network.part(whole.alone(0)).to_empty(device="cpu")
    for parameter in part.parameters():
        nn.init.ones_(parameter)
    assert torch.equal(part(torch.ones(1, 8))[0], torch.full((1, 16), 9.0))


@pytest.mark.parametrize("case", ["autocast", "channels_last", "float64"])
def test_other_numerics(case: str):
    model = ResNet().eval()
    of = example((3, 12, 12))
    (x,) = inputs(of, 2)
    if case == "float64":
        model, x = model.double(), x.double()
        of = ValueSpec((TensorSpec((3, 12, 12), torch.float64),))
    network = trace(model, of)
    if case == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
        model.to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        whole, values = model(x), (x,)
        for module in network.modules:
            values = module(*values)
    torch.testing.assert_close(values[0], whole, rtol=0, atol=0)


def test_a_part_runs_on_another_device_than_that_of_the_trace():
    network = trace(Encoder(), tokens("mask", "ids", length=6))
    part = network.part(Slice(0, 2, network.takes(0, ()), network.alone(1).leaves)).to("meta")
    outputs = part(*[torch.zeros(2, 6, dtype=torch.int64, device="meta") for _ in range(2)])
    assert [(t.device.type, tuple(t.shape)) for t in outputs] == [("meta", (2, 6, 16))]


class Written(nn.Module):
    """What `a` has made is written after `b` has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        first = h[:, :2]
        y = self.c(self.b(h) * 1)
        first.mul_(2)
        return h + y


def test_what_is_written_through_a_view_stays_on_one_stage_with_the_reason():
    network = assert_equal(Written(), example((4,)))
    assert network.names == ["a", "c"]  # a sends what it made before the constant was added
    (why,) = network.joins
    assert why.startswith("b and c stay together because aten.mul_.Tensor at test_tracing.py:")
    assert why.endswith(" writes in place a tensor that was made before")
