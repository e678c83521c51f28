"""What layers and models of users return and compute."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipetrain import ConfigError, Pipeline
from tests.support.plain import evaluated, of_pairs, plainly

DOUBLE: dict[str, Any] = {"dtype": torch.float64}
MICROBATCHES = 2


class Calls(nn.Module):
    """A layer that calls a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


class Noisy(nn.Module):
    """A model that is traced, with a layer in training that an evaluation leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, **DOUBLE) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x).tanh() if self.training or number % 2 else x
        return x


class Centred(nn.Module):
    """A model that is traced, whose first layer changes a buffer that its last one reads in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, **DOUBLE), nn.Linear(4, 4, **DOUBLE)
        self.register_buffer("centre", torch.zeros(4, **DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.training:
            self.centre.mul_(0.5).add_(h.detach().mean(0))
        y = self.last(h.tanh())
        return y if self.training else y - self.centre * 2


class Traced(nn.Module):
    """A model that is traced, and calls a function between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, **DOUBLE), nn.Linear(4, 4, **DOUBLE)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def apart(
    make: Callable[[], nn.Module], shape: tuple[int, ...], loss: Callable[..., Tensor], **options: Any
) -> float:
    """Return the most by which losses and weights differ from one process after two updates."""
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(8, *shape, **DOUBLE), torch.randn(8, 4, **DOUBLE)
    twin = deepcopy(model)
    sgd = partial(torch.optim.SGD, lr=0.1)
    with Pipeline(model, loss, sgd, microbatches=MICROBATCHES, device="cpu", **options) as pipe:
        found = [pipe.step(x, y), pipe.step(x, y), pipe.evaluate([(x, y)])["loss"]]
        state = pipe.state_dict()
    wanted = plainly(twin, sgd(twin.parameters()), of_pairs(loss, MICROBATCHES), [(x, y)] * 2)
    wanted += evaluated(twin, of_pairs(loss), [(x, y)])
    other = twin.state_dict()
    differences = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
    return max(*differences, *(float((state[name] - other[name]).abs().max()) for name in state))


# An nn.Sequential


def recurrent(last: bool) -> nn.Module:
    """Layers return (output, (hidden, cell)), a dict, and a list with None."""
    lstm = nn.LSTM(4, 4, batch_first=True, **DOUBLE)
    layers = [
        nn.Linear(4, 4, **DOUBLE),
        lstm,
        Calls(lambda made: {"output": made[0], "states": (made[1][0][0], None)}),
        Calls(lambda made: [made["output"][:, -1] * made["states"][0], made["states"][1]]),
        Calls(lambda made: made[0]),
        nn.Linear(4, 4, **DOUBLE),
    ]
    return nn.Sequential(*(layers[:2] if last else layers))


def of_the_sequence(outputs: Any, targets: Tensor) -> Tensor:
    sequence, (_, _) = outputs
    return mse_loss(sequence[:, -1], targets)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5])
def test_layers_return_tuples_in_tuples_and_dicts(ranks, cut):
    first, _ = ranks(partial(apart, partial(recurrent, False), (3, 4), mse_loss, partition=[cut]))
    assert first < 1e-12


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_model_returns_a_tuple_in_a_tuple(ranks, schedule):
    make = partial(recurrent, True)
    first, _ = ranks(partial(apart, make, (3, 4), of_the_sequence, schedule=schedule))
    assert first < 1e-12


def refused(make: Callable[[], nn.Module]) -> str:
    with pytest.raises(ConfigError) as error:
        apart(make, (4,), mse_loss)
    return str(error.value)


def sized() -> nn.Module:
    layers = [nn.Linear(4, 4, **DOUBLE), Calls(lambda x: (x, len(x))), Calls(lambda both: both[0])]
    return nn.Sequential(*layers)


def test_a_layer_that_returns_a_number_too_is_refused(ranks):
    for said in ranks(refused, sized):
        assert "layer 1 (1) of the model" in said
        assert "it returns a int, and a layer before the last must return a tensor, or tuples" in said


# A model that is traced


def mean_of_some(h: Tensor) -> Tensor:
    return h * h[h > 0].mean()


def writes_some(h: Tensor) -> Tensor:
    h = h.clone()
    h[h > 0] = 0.5 * h[h > 0]
    return h


def counts(h: Tensor) -> Tensor:
    return h * (h > 0).nonzero().double().mean() + torch.unique((h > 0).long()).double().sum()


def log_prob(h: Tensor) -> Tensor:
    return h * torch.distributions.Normal(h, torch.ones_like(h)).log_prob(h.detach() + 1)


@pytest.mark.parametrize("function", [mean_of_some, writes_some, counts, log_prob])
def test_tensors_whose_size_depends_on_the_data_stay_within_a_layer(ranks, function):
    first, _ = ranks(apart, partial(Traced, function), (4,), mse_loss)
    assert first < 1e-12


@pytest.mark.parametrize("make", [Noisy, Centred])
def test_what_only_training_runs(ranks, make):
    first, _ = ranks(apart, make, (4,), mse_loss)
    assert first < 1e-12


def mapped(h: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * row.sum())(h)


def differentiated(h: Tensor) -> Tensor:
    return torch.func.grad(lambda z: (z**2).sum())(h)


def distances(h: Tensor) -> Tensor:
    return torch.cdist(h, h) @ h


def by_size(h: Tensor) -> Tensor:
    return h * 2 if h.shape[0] > 5 else h


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (mapped, "uses torch.vmap or torch.func at HERE, which cannot be cut: write it for the whole"),
        (differentiated, "uses torch.vmap or torch.func at HERE"),
        (distances, "depends on the samples of a microbatch where it has more than 25.* compute_mode="),
        (by_size, "depends on the samples of a microbatch where it has more than 5, which a trace"),
    ],
)
def test_code_that_no_trace_holds_is_refused_with_its_place(ranks, function, sentence):
    for said in ranks(refused, partial(Traced, function)):
        assert re.search(sentence.replace("HERE", rf"{Path(__file__).name}:\d+"), said), said
