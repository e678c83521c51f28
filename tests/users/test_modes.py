"""Modes, frozen weights and attributes that a program sets itself, before and between passes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipetrain import Pipeline
from tests.users import programs
from tests.users.programs import ended, sgd


class Blocks(nn.Module):
    """A model that is traced."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.temperature = 1.0
        self.final = torch.clone

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.final(x / self.temperature)


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
    of = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [(of(8, 4), of(8, 2)) for _ in range(2)]


def unchanged(model: nn.Module) -> None:
    """Leave a model as it is."""


def some_in_evaluation(model: nn.Module) -> None:
    layers_of(model)[1].eval()  # a BatchNorm
    layers_of(model)[2].eval()  # a Dropout within
    layers_of(model)[4].weight.requires_grad_(False)


class Kept(nn.Sequential):
    """Keeps some layers in evaluation mode."""

    def train(self, mode: bool = True) -> Kept:
        super().train(mode)
        some_in_evaluation(self)
        return self


def with_a_train_of_its_own(model: nn.Module) -> None:
    model.__class__ = Kept
    model.train()


def other_attributes_and_modes(model: nn.Module) -> None:
    layers = layers_of(model)
    layers[5].temperature, layers[4].momentum = 0.5, 0.3
    layers[1].train()
    layers[4].eval()


def apart(before: Callable[[nn.Module], object], between: Any, traced: bool, **options: Any) -> float:
    model = normed(traced)
    before(model)
    return programs.apart(model, mse_loss, batches(), between, **options)


@pytest.mark.parametrize(
    ("before", "between", "traced", "schedule"),
    [
        (some_in_evaluation, unchanged, False, "1f1b"),
        (some_in_evaluation, unchanged, True, "zb_h1"),
        (some_in_evaluation, other_attributes_and_modes, False, "1f1b"),
        (with_a_train_of_its_own, with_a_train_of_its_own, False, "1f1b"),
    ],
)
def test_what_a_program_puts_into_evaluation_mode_and_what_it_changes_is_trained_so(
    ranks, before, between, traced, schedule
):
    assert max(ranks(partial(apart, schedule=schedule), before, between, traced)) < 1e-12


def measured(traced: bool) -> list[int]:
    """Return how many microbatches each BatchNorm has counted, the first one of which is in evaluation."""
    model = normed(traced)
    some_in_evaluation(model)
    with Pipeline(model, mse_loss, sgd, microbatches=2, device="cpu", partition="profile") as pipe:
        list(pipe.train(batches()))
        pipe.evaluate(batches())
        return [int(t) for name, t in pipe.state_dict().items() if name.endswith("tracked")]


@pytest.mark.parametrize("traced", [False, True])
def test_neither_planning_nor_measuring_puts_a_layer_into_training_mode(ranks, traced):
    assert ranks(measured, traced) == [[0, 4], []]


def warnings_of(traced: bool) -> tuple[float, list[str]]:
    said: list[str] = []
    with patch.object(logging.getLogger("pipetrain"), "warning", lambda text, *_: said.append(text)):
        return apart(nn.Module.eval, unchanged, traced), said


@pytest.mark.parametrize("traced", [False, True])
def test_a_model_that_is_all_in_evaluation_mode_is_trained_so_with_a_warning(ranks, traced):
    (first, (warning,)), (second, silent) = ranks(warnings_of, traced)
    assert max(first, second) < 1e-12
    assert "call model.train() before" in warning
    assert not silent


# What is changed between two passes, and cannot be followed


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


@contextmanager
def single(layer: nn.Module) -> Iterator[None]:
    layer.float()
    yield
    layer.double()


ONES = torch.ones(6, dtype=torch.float64)
Change = Callable[[Any, Any], AbstractContextManager[object]]
GRAD = "requires_grad"
CHANGES: list[tuple[str, str, Change]] = [
    ("temperature", "", lambda model, _: having(model, "temperature", 0.5)),
    (f"4.weight.{GRAD}", "both tests", lambda _, layers: having(layers[4].weight, GRAD, True)),
    (f"0.weight.{GRAD}", "both tests", lambda _, layers: having(layers[0].weight, GRAD, False)),
    ("1.training", "tests", lambda _, layers: having(layers[1], "training", True)),
    ("4.momentum", "", lambda _, layers: having(layers[4], "momentum", 0.3)),
    ("0.weight.dtype", "both", lambda _, layers: single(layers[0])),
    ("2", "both", lambda _, layers: having(layers, "2", nn.Tanh())),
    ("4.running_mean", "", lambda _, layers: having(layers[4], "running_mean", ONES)),
    ("7", "both", lambda _, layers: longer(layers)),
    ("final", "", lambda model, _: having(model, "final", torch.tanh)),
]
"""What is named, and a change. `both`: of an nn.Sequential too; `tests`: an evaluation may go on."""


def changes(traced: bool) -> list[tuple[str, str, Change]]:
    return [change for change in CHANGES if "both" in change[1] or traced]


def refusals(traced: bool) -> list[list[str]]:
    """Return what is said of each change before a training and an evaluation; undone, it goes on."""
    model, said = normed(traced), []
    some_in_evaluation(model)
    with Pipeline(model, mse_loss, sgd, microbatches=2, device="cpu") as pipe:
        calls = partial(pipe.step, *batches()[0]), partial(pipe.evaluate, batches())
        list(pipe.train(batches()))
        for *_, change in changes(traced):
            with change(model, layers_of(model)):
                said.append([ended(call) for call in calls])
            calls[0]()
    return said


@pytest.mark.parametrize("traced", [False, True])
def test_what_cannot_be_followed_is_refused_on_all_ranks(ranks, traced):
    for rank, found in enumerate(ranks(refusals, traced)):
        for (trained, tested), (named, where, _) in zip(found, changes(traced), strict=True):
            wanted = rf"which do not follow, this has changed: (layers\.)?{named};"
            assert re.search(wanted, trained), trained
            assert tested == ("" if "tests" in where else trained)
            assert trained.startswith("ConfigError: rank 0 stopped") == bool(rank)
