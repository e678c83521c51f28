"""A factory's model has no numbers; another call of it gives those that a rank wants."""

from __future__ import annotations

import random
from copy import deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional, init

from pipetrain import ConfigError
from pipetrain.model.chain import Chain
from pipetrain.model.deferred_init import build
from pipetrain.model.materialise import materialise
from pipetrain.model.tensor_places import named_tensors
from pipetrain.models import gpt
from tests.runtime.stage.test_memory_meter import Live


def made(factory, seed: int = 0) -> dict[str, Tensor]:
    model, initial = build(factory, seed)
    return initial.tensors(named_tensors(model))


def changed(change):
    """Return a factory of two linear layers that does something to the first one."""

    def factory():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        change(model[0])
        return model

    return factory


def test_the_model_is_that_of_the_factory_without_its_parameters():
    def factory():
        weight = nn.Parameter(torch.ones(4, 4))
        norm, head = nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False)
        norm.weight.kind = "norm"
        norm.running_mean.fill_(7)
        head.weight, head.also, norm.same = weight, [weight], weight
        head.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        head.scale = torch.arange(3) * 2
        return nn.Sequential(nn.LSTM(3, 4), norm, head).double()

    (model, _), real = build(factory, 0), factory()
    assert str(model) == str(real)
    for name, tensor in named_tensors(real).items():
        mine = named_tensors(model)[name]
        assert mine.is_meta == isinstance(tensor, nn.Parameter), name
        assert type(mine) is type(tensor)
        assert (mine.shape, mine.dtype, mine.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert (mine.requires_grad, vars(mine)) == (tensor.requires_grad, vars(tensor))
        assert mine.is_meta or torch.equal(mine, tensor)
    assert model[2].weight is model[1].same is model[2].also[0]
    assert model[0]._flat_weights[0] is model[0].weight_ih_l0
    assert torch.equal(model[2].scale, real[2].scale)


def test_what_a_factory_draws_beside_is_of_the_seed_and_other_code_draws_as_if_it_had_not():
    def draw(layer):
        layer.register_buffer("drawn", torch.tensor([random.random(), np.random.rand(), torch.rand(())]))

    before = random.getstate(), torch.get_rng_state()
    one, same, other = (build(changed(draw), seed)[0][0].drawn for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert (one != other).all()
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


# The initial numbers


class Applied(nn.Module):
    """Initialises its layers itself, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(30, 30), nn.Embedding(40, 30)])
        self.scale = nn.Parameter(torch.empty(30))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.orthogonal_(module.weight)
        if isinstance(module, nn.Embedding):
            module.weight.data.mul_(5)
        if module is self:
            init.trunc_normal_(self.scale)


class Plain(nn.Module):
    """Its parameters are made by nobody else, one of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 7.0))
        self.drawn = nn.Parameter(torch.randn(20, 20))
        self.norm = nn.Parameter(self.scale.detach().square().sum())
        self.register_buffer("places", torch.arange(3, device=self.scale.device))


def of_torch() -> nn.Module:
    layers = nn.Conv2d(3, 40, 3), nn.LSTM(9, 9), nn.Embedding(50, 9, padding_idx=3), nn.PReLU()
    norms = nn.BatchNorm1d(9), nn.GroupNorm(1, 9), nn.LayerNorm(9)
    return nn.Sequential(*layers, *norms, nn.Bilinear(5, 5, 5), nn.MultiheadAttention(12, 2)).double()


def tied() -> nn.Module:
    """The head has made the weight, or the embedding."""
    first, second = nn.Embedding(40, 30), nn.Linear(30, 40)
    third, fourth = nn.Linear(30, 40), nn.Embedding(40, 30)
    first.weight, fourth.weight = second.weight, third.weight
    return nn.Sequential(first, second, third, fourth)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 40), 2, enable_nested_tensor=False)


def first_row(layer):
    init.ones_(layer.weight)
    layer.weight.data[0] = 0


FACTORIES = [
    of_torch,
    tied,
    Applied,
    Plain,
    encoder,
    lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(30, 30)),
    lambda: nn.utils.parametrizations.weight_norm(nn.Linear(30, 30)),
    changed(lambda layer: layer.bfloat16()),
    changed(first_row),
    changed(lambda layer: layer.load_state_dict({"weight": torch.ones(3, 3), "bias": torch.ones(3)})),
    changed(lambda layer: layer.weight.requires_grad_(False).copy_(torch.eye(3))),
    changed(lambda layer: functional.normalize(layer.weight.data, out=layer.weight.data)),
    changed(lambda layer: setattr(layer, "weight", nn.Parameter(torch.eye(3)))),
]


@pytest.mark.filterwarnings("ignore:for .* copying from a non-meta parameter")
@pytest.mark.parametrize("factory", FACTORIES)
def test_numbers_are_those_that_the_factory_would_make(factory):
    """In distribution, exactly where nothing is drawn; whichever others are made."""
    torch.manual_seed(0)
    real, (model, initial) = named_tensors(factory()), build(factory, 0)
    mine, state = initial.tensors(named_tensors(model)), torch.get_rng_state()
    assert mine.keys() >= {name for name, tensor in real.items() if isinstance(tensor, nn.Parameter)}
    for name, tensor in mine.items():
        wanted = real[name].detach()
        assert tensor.dtype == wanted.dtype
        assert tensor.isfinite().all(), name
        if wanted.unique().numel() <= 2:
            assert torch.equal(tensor, wanted), name
        elif wanted.numel() > 200:
            assert tensor.std().item() == pytest.approx(wanted.std().item(), rel=0.3), name
            assert tensor.abs().mean().item() == pytest.approx(wanted.abs().mean().item(), rel=0.3), name
        assert torch.equal(initial.tensors([name])[name], tensor), name
    assert torch.equal(torch.get_rng_state(), state)


def test_they_are_of_the_seed_and_the_place():
    sizes = {"heads": 2, "width": 8, "sequence": 5, "vocabulary": 11}
    two, more, other = (made(lambda n=n: gpt(depth=n, **sizes), seed) for n, seed in ((2, 3), (5, 3), (2, 4)))
    name = "block2.expand.weight"
    assert torch.equal(two[name], more[name])
    assert not torch.equal(two[name], two["block1.expand.weight"])
    assert not torch.equal(two[name], other[name])


def test_copies_begin_alike_as_in_one_process():
    def factory():
        student = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        teacher, other = deepcopy(student), deepcopy(student)
        other[0].reset_parameters()
        return nn.ModuleList([student, teacher, other])

    pairs = [("0.0", "1.0"), ("0.1", "1.1"), ("0.1", "2.1"), ("0.0", "2.0"), ("0.0", "0.1")]
    for tensors in (made(factory), named_tensors(factory())):
        alike = [torch.equal(tensors[f"{one}.weight"], tensors[f"{other}.weight"]) for one, other in pairs]
        assert alike == [True] * 3 + [False] * 2


@pytest.mark.parametrize("copies", [False, True])
def test_only_what_is_wanted_takes_memory(copies):
    def factory():
        layer = nn.Linear(64, 64)
        return nn.Sequential(*(deepcopy(layer) if copies else nn.Linear(64, 64) for _ in range(10)))

    initial = build(factory, 0)[1]
    with Live() as live:
        found = initial.tensors(["3.weight"])
    held = found["3.weight"].nbytes
    assert held <= live.peak <= 2 * held + 1024


def test_the_digest_tells_other_making_apart():
    changes = [(init.uniform_, 0, 1), (init.uniform_, 0, 1), (init.uniform_, 0.5, 1), (init.normal_,)]
    first, same, *others = (
        build(changed(lambda layer, fill=fill, by=by: fill(layer.weight, *by)), 0)[1].digest
        for fill, *by in changes
    )
    assert first == same
    assert len({first, *others}) == 3


# What is refused


class Looks(nn.Linear):
    """Needs another's numbers."""

    def reset_parameters(self) -> None:
        self.weight.data.fill_(self.bias.sum().item())


def another_each_time():
    models = iter([nn.Linear, nn.Identity])
    return lambda: nn.Sequential(next(models)(3, 3))


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (lambda: 3, "^the model's factory must return an nn.Module, not int$"),
        (lambda: Looks(3, 3), "<lambda>, called to make the model, failed: .* if it needs"),
        (another_each_time(), "0.weight of the model has no numbers when .* is called again"),
    ],
)
def test_a_function_that_makes_no_model_of_its_own_is_refused_in_one_sentence(factory, sentence):
    with pytest.raises(ConfigError, match=sentence) as raised:
        made(factory)
    assert "\n" not in str(raised.value)


# A rank's own


def network_of(factory, **given):
    model, initial = build(factory, 0)
    network = Chain(model)
    values = {name.replace("_", "."): value for name, value in given.items()}
    network.values = SimpleNamespace(tensors=lambda names: values) if given else initial
    return network


def test_only_the_layers_asked_for_and_what_is_named_get_their_numbers_and_what_is_shared_stays_shared():
    def factory():
        model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 5), nn.LayerNorm(4))
        model[2].weight = model[0].weight
        model[2].also = [model[0].weight]
        return model

    network = network_of(factory)
    materialise(network, [2], ["3.weight"])
    held = {name: t for name, t in named_tensors(network.model).items() if not t.is_meta}
    assert held.keys() == {"0.weight", "2.bias", "3.weight"}
    assert held["0.weight"] is network.model[2].weight is network.model[2].also[0]
    assert torch.equal(held["3.weight"], torch.ones(4))
    assert network.values is None


def test_numbers_of_a_file_lie_as_the_factory_lays_them():
    def factory():
        model = nn.Sequential(nn.Linear(2, 3))
        model[0].weight = nn.Parameter(torch.zeros(2, 3).t())
        return model

    network = network_of(factory, **{"0_weight": torch.arange(6.0).view(3, 2)})
    materialise(network, [0])
    assert network.model[0].weight.stride() == (1, 3)
    assert network.model[0].weight.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_model_that_is_there_is_overwritten_in_place_in_its_own_dtype_and_never_rounded():
    there = nn.Sequential(nn.Linear(1, 1).double())
    model, initial = build(lambda: there, 0)
    assert model is there
    assert not initial.tensors(["0.weight"])
    weight, bias, tenth = there[0].weight, there[0].bias.clone(), torch.full((1, 1), 0.1, dtype=torch.float64)
    materialise(network_of(lambda: there, **{"0_weight": tenth.float()}), [0])
    assert there[0].weight is weight
    assert weight.item() == tenth.float().item()
    assert torch.equal(there[0].bias, bias)
    narrow = network_of(lambda: nn.Sequential(nn.Linear(1, 1)), **{"0_weight": tenth})
    with pytest.raises(ConfigError, match=r"0.weight of the model is float64, and .* would round"):
        materialise(narrow, [0])
