"""Modes, frozen weights and attributes that a program sets itself, before and between passes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipetrain import ConfigError, Pipeline
from tests.users import programs
from tests.users.programs import sgd


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


def statistics(traced: bool) -> list[int]:
    """Return how many microbatches each BatchNorm has counted, the first one of which is in evaluation."""
    model = normed(traced)
    some_in_evaluation(model)
    with Pipeline(model, mse_loss, sgd, microbatches=2, device="cpu", partition="profile") as pipe:
        list(pipe.train(batches()))
        pipe.evaluate(batches())
        state = pipe.state_dict()
    return [int(tensor) for name, tensor in state.items() if name.endswith("tracked")]


@pytest.mark.parametrize("traced", [False, True])
def test_neither_planning_nor_measuring_puts_a_layer_into_training_mode(ranks, traced):
    assert ranks(statistics, traced) == [[0, 4], []]


def warnings_of(traced: bool) -> tuple[float, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipetrain").addHandler(handler)
    try:
        return apart(nn.Module.eval, unchanged, traced), said
    finally:
        logging.getLogger("pipetrain").removeHandler(handler)


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


def doubled(module: nn.Module, given: object, output: Tensor) -> Tensor:
    return 2 * output


ONES = torch.ones(6, dtype=torch.float64)
Change = Callable[[Any, Any], AbstractContextManager[object]]
CHANGES: list[tuple[Change, str, str]] = [
    (
        lambda _, layers: having(layers[4].weight, "requires_grad", True),
        "4.weight.requires_grad",
        "both tests",
    ),
    (
        lambda _, layers: having(layers[0].weight, "requires_grad", False),
        "0.weight.requires_grad",
        "both tests",
    ),
    (lambda _, layers: having(layers[1], "training", True), "1.training", "tests"),
    (lambda _, layers: having(layers[4], "momentum", 0.3), "4.momentum", ""),
    (lambda model, _: having(model.config, "scale", 3.0), "config.scale", ""),
    (lambda model, _: patch.object(model, "shift", 0.5), "shift", ""),
    (lambda _, layers: having(layers, "2", nn.Tanh()), "2", "both"),
    (lambda _, layers: patch.object(layers[2], "forward", torch.relu), "2.forward", ""),
    (lambda _, layers: having(layers[4], "running_mean", ONES), "4.running_mean", ""),
    (lambda _, layers: longer(layers), "7", "both"),
    (lambda model, _: having(model, "final", torch.tanh), "final", ""),
    (lambda _, layers: layers[0].weight.register_hook(torch.abs), "0.weight", "both"),
    (
        lambda model, layers: (layers[2] if layers is not model else model).register_forward_hook(doubled),
        "(2|it)",
        "both",
    ),
]
"""A change, and what is named; `both`: of an nn.Sequential too; `tests`: an evaluation may go on."""


def changes(traced: bool) -> list[tuple[Change, str, str]]:
    return [change for change in CHANGES if traced or "both" in change[2]]


def refusals(traced: bool) -> list[list[str]]:
    """Return what is said of each change before a training and an evaluation; undone, it goes on."""
    model, said = normed(traced), []
    some_in_evaluation(model)
    with Pipeline(model, mse_loss, sgd, microbatches=2, device="cpu") as pipe:
        list(pipe.train(batches()))
        for change, *_ in changes(traced):
            with change(model, layers_of(model)):
                said.append(
                    [said_of(lambda: pipe.step(*batches()[0])), said_of(lambda: pipe.evaluate(batches()))]
                )
            pipe.step(*batches()[0])
    return said


def said_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("traced", [False, True])
def test_what_cannot_be_followed_is_refused_on_all_ranks(ranks, traced):
    for rank, found in enumerate(ranks(refusals, traced)):
        for (trained, tested), (_, named, where) in zip(found, changes(traced), strict=True):
            wanted = rf"which do not follow, this has changed: (hooks of )?(layers\.)?{named};"
            assert re.search(wanted, trained), trained
            assert tested == ("" if "tests" in where else trained)
            assert trained.startswith("rank 0 stopped") == bool(rank)
