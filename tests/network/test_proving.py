"""The parts of a chain make what it makes in one process, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipetrain import ConfigError, Pipeline, Pop, Stash
from pipetrain.models import gpt
from pipetrain.network.chain import Chain
from pipetrain.network.proving import prove_parts
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan.cut import cut_layers
from pipetrain.plan.estimate import estimate
from tests.support.models import Join, skipping

NUMBERS = ValueSpec((TensorSpec((6,), torch.float32),))
IMAGES = ValueSpec((TensorSpec((3, 32, 32), torch.float32),))
TOKENS = ValueSpec((TensorSpec((5,), torch.int64),))


def prove(model: nn.Sequential, cuts: list[int], example: ValueSpec = NUMBERS) -> None:
    chain = Chain(model)
    modes = [estimate(chain.twin(), example.of(2), training=training) for training in (True, False)]
    slices = [cut_layers({2: layers}, cuts, example).slices for layers in modes]
    prove_parts(chain, list(zip(*slices, strict=True)), example, [chain.names[cut] for cut in cuts])


class Says(nn.Module):
    """Returns what it is given, and leaves something in a box."""

    def __init__(self, box: dict[str, object], what: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.box, self.what = box, what

    def forward(self, x: Tensor) -> Tensor:
        self.box["left"] = self.what(x)
        return x


class Hears(nn.Module):
    def __init__(self, box: dict[str, object], when: bool | None = None) -> None:
        super().__init__()
        self.box, self.when = box, when

    def forward(self, x: Tensor) -> Tensor:
        return x * self.box.get("left", 1) if self.when in (None, self.training) else x


def exchanging(what: Callable[[Tensor], object], when: bool | None = None) -> nn.Sequential:
    box: dict[str, object] = {}
    return nn.Sequential(nn.Linear(6, 6), Says(box, what), nn.Linear(6, 6), Hears(box, when))


class Counts(nn.Module):
    """Adds to a buffer that another layer has made its own."""

    def __init__(self, holder: nn.Module) -> None:
        super().__init__()
        self.holder = (holder,)

    def forward(self, x: Tensor) -> Tensor:
        self.holder[0].seen.add_(1)
        return x


def sharing_a_buffer() -> nn.Sequential:
    norm = nn.BatchNorm1d(6)
    norm.register_buffer("seen", torch.zeros(()))
    return nn.Sequential(nn.Linear(6, 6), norm, nn.Linear(6, 6), Counts(norm))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (partial(exchanging, lambda x: float(x.detach().sum())), "training .*: output 0 differs"),
        (partial(exchanging, lambda x: 2, False), "evaluation .*: output 0 differs"),
        (partial(exchanging, lambda x: 1 + (len(x) == 3)), "training .*: output 0 differs"),
        (partial(exchanging, lambda x: x), "training .*: (output 0|the gradient of 0.weight) differs"),
        (sharing_a_buffer, "training .*: buffer 1.seen differs"),
    ],
)
def test_what_layers_exchange_across_a_cut_is_refused_and_within_a_part_it_is_not(make, says):
    with pytest.raises(ConfigError, match=f"cut before 2, the model would not compute in {says}"):
        prove(make(), [2])
    if make is not sharing_a_buffer:
        prove(make(), [1])


def tied() -> nn.Sequential:
    shared = nn.Linear(6, 6)
    stash = Stash()
    layers = [shared, stash, nn.Dropout(0.5), nn.BatchNorm1d(6), nn.ReLU(inplace=True), Pop(stash), Join()]
    return nn.Sequential(*layers, shared)


def with_a_function() -> nn.Sequential:
    """What cannot be told apart by copies is not compared."""
    model = exchanging(lambda x: float(x.detach().sum()))
    model[0].function = lambda: model
    return model


@pytest.mark.parametrize(
    ("make", "cuts", "example"),
    [
        (tied, [3, 5], NUMBERS),
        (skipping, [2, 4], IMAGES),
        (lambda: gpt(1, 2, 8, 5, 11, dropout=0.5, tied=True), [1, 3], TOKENS),
        (with_a_function, [2], NUMBERS),
    ],
)
def test_a_model_whose_layers_return_all_is_the_same_over_stages_and_stays_as_it_is(make, cuts, example):
    model = make()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    prove(model, cuts, example)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(p.grad is None for p in model.parameters())


def refused() -> str:
    x = torch.ones(4, 6)
    with pytest.raises(ConfigError) as error:
        Pipeline(
            exchanging(lambda x: float(x.detach().sum())), mse_loss, partial(torch.optim.SGD, lr=0.1),
            sample=(x, x), partition=[2], device="cpu",
        )  # fmt: skip
    return str(error.value)


def test_a_pipeline_refuses_it_on_every_rank(ranks):
    for said in ranks(refused):
        assert "cut before 2, the model would not compute in training what it does in one process" in said
