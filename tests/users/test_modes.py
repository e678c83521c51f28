"""Modes, frozen weights and attributes that a program sets itself, before and between passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipetrain import ConfigError, Pipeline
from tests.support.plain import evaluated, of_pairs, plainly

BATCHES = 3
MICROBATCHES = 2


class Blocks(nn.Module):
    """A model that is traced."""

    shift = 0.0

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.temperature = 1.0
        self.final = torch.clone
        self.config = layers[5].config = SimpleNamespace(scale=2.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.final(x / self.temperature * self.config.scale / 2 + self.shift)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x / self.temperature


def normed(traced: bool) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.Sequential(nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(6, 6),
        nn.BatchNorm1d(6),
        Scaled(),
        nn.Linear(6, 2),
    ).double()
    layers[1].running_mean.fill_(0.3)
    return Blocks(layers) if traced else layers


def layers_of(model: nn.Module) -> Any:
    return model.layers if isinstance(model, Blocks) else model


def batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    of = partial(torch.randn, generator=made, dtype=torch.float64)
    return [(of(8, 4), of(8, 2)) for _ in range(BATCHES)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def in_two_passes(model: nn.Module, between: Callable[[nn.Module], object]) -> tuple[list[float], float]:
    """Train two passes in this process, with an evaluation between them; return losses and its loss."""
    optimizer, loss = sgd(model.parameters()), of_pairs(mse_loss, MICROBATCHES)
    losses = plainly(model, optimizer, loss, batches())
    test = sum(evaluated(model, of_pairs(mse_loss), batches())) / BATCHES
    between(model)
    return losses + plainly(model, optimizer, loss, batches()), test


def some_in_evaluation(model: nn.Module) -> None:
    layers_of(model)[1].eval()  # a BatchNorm
    layers_of(model)[2].eval()  # a Dropout within
    layers_of(model)[4].weight.requires_grad_(False)


def apart(
    prepare: Callable[[nn.Module], object], between: Callable[[nn.Module], object], **options: Any
) -> float:
    """Return the most by which a pipeline differs from one process: losses, weights, buffers and modes."""
    model = normed(options.pop("traced", False))
    prepare(model)
    twin = deepcopy(model)
    modes = [module.training for module in model.modules()]
    with Pipeline(model, mse_loss, sgd, microbatches=MICROBATCHES, device="cpu", **options) as pipe:
        losses = list(pipe.train(batches()))
        test = pipe.evaluate(batches())["loss"]
        assert [module.training for module in model.modules()] == modes
        between(model)
        losses += list(pipe.train(batches()))
        state = pipe.state_dict()
    wanted, wanted_test = in_two_passes(twin, between)
    other = twin.state_dict()
    differences = [abs(a - b) for a, b in zip([*losses, test], [*wanted, wanted_test], strict=True)]
    return max(*differences, *(float((state[name] - other[name]).abs().max()) for name in state), 0.0)


def unchanged(model: nn.Module) -> None:
    """Leave a model as it is."""


class Kept(nn.Sequential):
    """Keeps some layers in evaluation mode."""

    def train(self, mode: bool = True) -> Kept:
        super().train(mode)
        some_in_evaluation(self)
        return self


def in_training(model: nn.Module) -> None:
    model.__class__ = Kept
    model.train()


def test_a_sequential_may_have_a_train_of_its_own(ranks):
    for each in ranks(apart, in_training, in_training):
        assert each < 1e-12


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("traced", [False, True])
def test_what_is_in_evaluation_mode_is_trained_so(ranks, traced, schedule):
    for each in ranks(partial(apart, some_in_evaluation, unchanged, traced=traced, schedule=schedule)):
        assert each < 1e-12


def statistics(traced: bool) -> list[int]:
    """Return how many microbatches each BatchNorm has counted, the first one of which is in evaluation."""
    model = normed(traced)
    some_in_evaluation(model)
    with Pipeline(model, mse_loss, sgd, microbatches=MICROBATCHES, device="cpu", partition="profile") as pipe:
        list(pipe.train(batches()))
        pipe.evaluate(batches())
        state = pipe.state_dict()
    return [int(tensor) for name, tensor in state.items() if name.endswith("tracked")]


@pytest.mark.parametrize("traced", [False, True])
def test_neither_planning_nor_measuring_puts_a_layer_into_training_mode(ranks, traced):
    assert ranks(statistics, traced) == [[0, BATCHES * MICROBATCHES], []]


def warnings_of(prepare: Callable[[nn.Module], object], traced: bool) -> tuple[float, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipetrain").addHandler(handler)
    try:
        return apart(prepare, unchanged, traced=traced), said
    finally:
        logging.getLogger("pipetrain").removeHandler(handler)


@pytest.mark.parametrize("traced", [False, True])
def test_a_model_that_is_all_in_evaluation_mode_is_trained_so_with_a_warning(ranks, traced):
    (first, said), (second, silent) = ranks(warnings_of, nn.Module.eval, traced)
    assert max(first, second) < 1e-12
    assert len(said) == 1
    assert "call model.train() before" in said[0]
    assert not silent


# What is changed between two passes


def other_attributes(model: nn.Module) -> None:
    layers_of(model)[5].temperature = 0.5
    layers_of(model)[4].momentum = 0.3


def other_modes(model: nn.Module) -> None:
    layers_of(model)[1].train()
    layers_of(model)[4].eval()


@pytest.mark.parametrize("change", [other_attributes, other_modes])
def test_the_layers_of_a_sequential_follow_what_a_program_changes(ranks, change):
    for each in ranks(apart, some_in_evaluation, change):
        assert each < 1e-12


@contextmanager
def having(target: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(target, name)
    setattr(target, name, value)
    yield
    setattr(target, name, before)


@contextmanager
def longer(layers: nn.Sequential) -> Iterator[None]:
    layers.append(nn.Tanh())
    yield
    del layers[-1]


def doubled(module: nn.Module, given: object, output: Tensor) -> Tensor:
    return 2 * output


CHANGES: dict[str, Callable[[Any, Any], AbstractContextManager[object]]] = {
    "unfrozen": lambda model, layers: having(layers[4].weight, "requires_grad", True),
    "frozen": lambda model, layers: having(layers[0].weight, "requires_grad", False),
    "attribute": lambda model, layers: having(layers[4], "momentum", 0.3),
    "mode": lambda model, layers: having(layers[1], "training", True),
    "layer": lambda model, layers: having(layers, "2", nn.Tanh()),
    "tensor": lambda model, layers: having(layers[4], "running_mean", torch.ones(6, dtype=torch.float64)),
    "forward": lambda model, layers: patch.object(layers[2], "forward", torch.relu),
    "config": lambda model, layers: having(model.config, "scale", 3.0),
    "of the class": lambda model, layers: patch.object(model, "shift", 0.5),
    "one more": lambda model, layers: longer(layers),
    "function": lambda model, layers: having(model, "final", torch.tanh),
    "weight's hook": lambda model, layers: layers[0].weight.register_hook(torch.abs),
    "hook": lambda model, layers: (layers[2] if layers is not model else model).register_forward_hook(
        doubled
    ),
}


def refusals(change: str, traced: bool) -> list[str]:
    """Return what is said of a change before a training and before an evaluation; undone, it goes on."""
    model, said = normed(traced), []
    some_in_evaluation(model)
    with Pipeline(model, mse_loss, sgd, microbatches=MICROBATCHES, device="cpu") as pipe:
        list(pipe.train(batches()))
        with CHANGES[change](model, layers_of(model)):
            for goes_on in (lambda: pipe.step(*batches()[0]), lambda: pipe.evaluate(batches())):
                try:
                    goes_on()
                except ConfigError as error:
                    said.append(str(error))
                else:
                    said.append("")
        pipe.step(*batches()[0])
    return said


@pytest.mark.parametrize(
    ("change", "traced", "named"),
    [
        ("unfrozen", False, "4.weight.requires_grad"),
        ("unfrozen", True, "layers.4.weight.requires_grad"),
        ("frozen", True, "layers.0.weight.requires_grad"),
        ("mode", True, "layers.1.training"),
        ("attribute", True, "layers.4.momentum"),
        ("config", True, "config.scale"),
        ("of the class", True, "shift"),
        ("layer", True, "layers.2"),
        ("layer", False, "2"),
        ("forward", True, "layers.2.forward"),
        ("tensor", True, "layers.4.running_mean"),
        ("one more", True, "layers.7"),
        ("one more", False, "7"),
        ("function", True, "final"),
        ("weight's hook", True, "hooks of layers.0.weight"),
        ("weight's hook", False, "hooks of 0.weight"),
        ("hook", True, "hooks of layers.2"),
        ("hook", False, "hooks of it"),
    ],
)
def test_what_cannot_be_followed_is_refused_on_all_ranks(ranks, change, traced, named):
    for rank, (trained, tested) in enumerate(ranks(refusals, change, traced)):
        assert f"cut into stages, which do not follow, this has changed: {named};" in trained
        assert tested == ("" if change in ("unfrozen", "frozen", "mode") else trained)
        assert trained.startswith("rank 0 stopped") == bool(rank)
