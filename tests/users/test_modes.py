"""Modes, frozen weights and attributes that a program sets itself, before and between passes."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

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
        self.config = layers[5].config = SimpleNamespace(scale=2.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x / self.temperature * self.config.scale / 2 + self.shift


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


def unfrozen(model: nn.Module) -> None:
    layers_of(model)[4].weight.requires_grad_(True)


def frozen(model: nn.Module) -> None:
    for p in layers_of(model)[0].parameters():
        p.requires_grad_(False)


def other_attributes(model: nn.Module) -> None:
    layers_of(model)[5].temperature = 0.5
    layers_of(model)[4].momentum = 0.3


def another_config(model: nn.Module) -> None:
    model.config.scale = 3.0


def one_of_the_class(model: nn.Module) -> None:
    vars(model)["shift"] = 0.5


def another_layer(model: nn.Module) -> None:
    vars(model)["before"] = layers_of(model)[2]
    layers_of(model)[2] = nn.Tanh()


def one_more_layer(model: nn.Module) -> None:
    vars(model)["longer"] = True
    layers_of(model).append(nn.Tanh())


def a_hook(model: nn.Module) -> None:
    module = model.layers[2] if isinstance(model, Blocks) else model
    vars(model)["hook"] = module.register_forward_hook(lambda _, __, output: 2 * output)


def another_forward(model: nn.Module) -> None:
    layer = layers_of(model)[2]
    vars(layer)["forward"] = torch.relu
    vars(model)["undo"] = lambda: vars(layer).pop("forward")


def another_tensor(model: nn.Module) -> None:
    norm = layers_of(model)[4]
    before, norm.running_mean = norm.running_mean, torch.ones_like(norm.running_mean, device="cpu")
    vars(model)["undo"] = lambda: setattr(norm, "running_mean", before)


def other_modes(model: nn.Module) -> None:
    layers_of(model)[1].train()
    layers_of(model)[4].eval()


def refusals(
    change: Callable[[nn.Module], object], undo: Callable[[nn.Module], object], traced: bool
) -> list[str]:
    """Return what is said of a change before a training and before an evaluation; undone, it goes on."""
    model, said = normed(traced), []
    some_in_evaluation(model)
    with Pipeline(model, mse_loss, sgd, microbatches=MICROBATCHES, device="cpu") as pipe:
        list(pipe.train(batches()))
        change(model)
        for goes_on in (lambda: pipe.step(*batches()[0]), lambda: pipe.evaluate(batches())):
            try:
                goes_on()
            except ConfigError as error:
                said.append(str(error))
            else:
                said.append("")
        undo(model)
        pipe.step(*batches()[0])
    return said


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (unfrozen, "layers.4.weight of the model was frozen .*requires_grad=True now"),
        (frozen, "layers.0.weight of the model was trained .*requires_grad=False now"),
    ],
)
def test_weights_that_are_frozen_or_unfrozen_later_are_refused(ranks, change, sentence, traced):
    sentence = sentence if traced else sentence.removeprefix("layers.")
    for rank, (trained, tested) in enumerate(ranks(refusals, change, restored, traced)):
        assert re.search(sentence, trained)
        assert not tested
        assert trained.startswith("rank 0 stopped") == bool(rank)


def restored(model: nn.Module) -> None:
    for p in model.parameters():
        p.requires_grad_(True)
    layers = layers_of(model)
    some_in_evaluation(model)
    layers[4].train()
    layers[4].momentum, layers[5].temperature = 0.1, 1.0
    if replaced := getattr(model, "before", None):
        layers[2] = replaced
    if getattr(model, "longer", False):
        del layers[-1]
    if hook := getattr(model, "hook", None):
        hook.remove()
    vars(model).pop("undo", lambda: None)()
    if isinstance(model, Blocks):
        model.config.scale = 2.0
        vars(model).pop("shift", None)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (other_attributes, "layers.4.momentum of the model was 0.1 when it was traced and has been changed"),
        (another_config, " config.scale of the model was 2.0 when it was traced and has been changed since"),
        (one_of_the_class, "shift of the model was 0.0 when it was traced and has been changed since"),
        (another_layer, "layers.2 of the model has been replaced since it was cut into stages"),
        (another_forward, "layers.2.forward of the model has been replaced since it was cut into stages"),
        (another_tensor, "layers.4.running_mean of the model has been replaced since it was cut into stages"),
        (one_more_layer, "of the model has been added since it was cut into stages"),
        (a_hook, "the hooks of layers.2 have been changed since it was cut into stages"),
        (other_modes, "layers.1.training of the model was False when it was traced and has been changed"),
    ],
)
def test_attributes_of_a_traced_model_that_change_later_are_refused(ranks, change, sentence):
    for trained, tested in ranks(refusals, change, restored, True):
        assert sentence in f" {trained}"
        assert tested == ("" if change is other_modes else trained)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (another_layer, "2 of the model has been replaced since it was cut into stages"),
        (one_more_layer, "of the model has been added since it was cut into stages"),
        (a_hook, "the hooks of the model have been changed since it was cut into stages"),
    ],
)
def test_a_sequential_that_is_changed_later_is_refused(ranks, change, sentence):
    for said in ranks(refusals, change, restored, False):
        assert all(sentence in one for one in said)


@pytest.mark.parametrize("change", [other_attributes, other_modes])
def test_the_layers_of_a_sequential_follow_what_a_program_changes(ranks, change):
    for each in ranks(apart, some_in_evaluation, change):
        assert each < 1e-12
