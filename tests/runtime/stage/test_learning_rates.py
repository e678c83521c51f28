"""Rates that a program sets, a function of the update, a correction's factor. In a training: tests/users."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from pipetrain.config.rate import LearningRate
from pipetrain.correction import PipeMare
from pipetrain.errors import ConfigError
from pipetrain.runtime.stage.learning_rates import Rates
from pipetrain.runtime.stage.parameter_store import ParameterStore
from pipetrain.runtime.stage.weight_versions import Weights


def stepped(optimizer: Any, how: LearningRate, **options: Any) -> tuple[Weights, nn.Module]:
    module = nn.Linear(1, 1, bias=False)
    return Weights(ParameterStore(module, optimizer), how, **options), module


def updated(weights: Weights, module: nn.Module, delay: int = 0, skip: Any = None) -> float:
    """Make an update of a gradient of 1; return by how much the weight went down."""
    before = module.weight.item()
    weights.begin_window()
    module.weight.grad = torch.ones(1, 1)
    weights.step(False, skip, delay)
    return before - module.weight.item()


SGD = partial(torch.optim.SGD, lr=0.5)


def test_what_a_program_leaves_in_a_group_is_the_rate_and_a_correction_is_of_the_step_alone():
    weights, module = stepped(SGD, LearningRate(shown="weight"), correction=PipeMare(updates=4))
    (group,) = weights.store.optimizer.param_groups
    scheduler, factors = StepLR(weights.store.optimizer, 2, 0.1), [4**-1, 4**-0.75, 4**-0.5, 4**-0.25, 1]
    for number, factor in enumerate(factors):
        rate = 0.5 * 0.1 ** (number // 2)
        assert group["lr"] == pytest.approx(rate)
        moved = updated(weights, module, delay=4)
        assert moved == pytest.approx(rate * factor, rel=1e-4)
        assert group["lr"] == pytest.approx(rate)
        scheduler.step()
    assert weights.rates.take() == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005])
    assert weights.rates.take() == []
    group["lr"] = 0.25
    updated(weights, module, skip=torch.ones(1))  # which is left out
    assert weights.rates.take() == [0.25]


class Falling(torch.optim.SGD):
    """Halves its rate itself."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group["lr"] /= 2


@pytest.mark.parametrize(("delay", "how"), [(0, None), (4, None), (4, lambda update: 1.0)])
def test_an_optimizer_may_change_its_own_rate_which_a_function_sets_again(delay, how):
    weights, module = stepped(partial(Falling, lr=0.5), LearningRate(how), correction=PipeMare(updates=10**9))
    factor = 1 / max(delay, 1)
    moved = [updated(weights, module, delay) for _ in range(3)]
    rates = [0.5, 0.25, 0.125] if how is None else [0.5] * 3
    assert moved == pytest.approx([rate * factor for rate in rates], rel=1e-4)


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_a_function_sets_each_rate_and_a_program_that_does_too_is_refused(number):
    groups = [{"params": [], "lr": number(lr)} for lr in (0.5, 0.25)] + [{"params": []}]
    rates = Rates(SimpleNamespace(param_groups=groups), LearningRate(lambda update: 1 / (1 + update)), None)
    for update in range(3):
        rates.prepare(update)
        rates.prepare(update)
        with rates.corrected(0.5):
            used = [float(group["lr"]) for group in groups[:2]]
            assert used == pytest.approx([0.25 / (1 + update), 0.125 / (1 + update)])
    groups[1]["lr"] = number(0.125)
    says = (
        "lr_schedule= sets the rate of every update, and before update 3 .* group 1 to .*0.125.*: leave one"
    )
    with pytest.raises(ConfigError, match=says):
        rates.prepare(3)
    assert "lr" not in groups[2]


def test_a_torch_scheduler_is_stepped_after_each_update_and_its_rates_are_not_the_program_s():
    weights, module = stepped(SGD, LearningRate(None, "weight", lambda optimizer: StepLR(optimizer, 2, 0.5)))
    moved = [updated(weights, module, skip=torch.ones(1) if n == 1 else None) for n in range(5)]
    assert moved == pytest.approx([0.5, 0, 0.25, 0.25, 0.125], rel=1e-4)
    assert weights.rates.take() == [0.5, 0.5, 0.25, 0.25, 0.125]
    weights.store.optimizer.param_groups[0]["lr"] = 0.3
    with pytest.raises(
        ConfigError, match=r"before update 5 the program has set that of parameter group 0 to 0.3"
    ):
        weights.begin_window()
    two = LearningRate(None, "weight", lambda optimizer: LambdaLR(optimizer, [float, float]))
    with pytest.raises(ConfigError, match=r"lr_schedule= fails for the .* which has 1 of .*: Expected 1 lr"):
        stepped(SGD, two)


def test_a_rate_that_a_program_has_set_is_saved_and_one_that_it_has_not_may_be_another_later():
    weights, module = stepped(SGD, LearningRate())
    for lr, other, later in ((None, 0.25, 0.25), (0.05, 0.25, 0.05)):
        if lr:
            weights.store.optimizer.param_groups[0]["lr"] = lr
        updated(weights, module)
        for how, expected in ((LearningRate(), later), (LearningRate(lambda update: 0.5), other / 2)):
            again, twin = stepped(partial(torch.optim.SGD, lr=other), how)
            again.load_optimizer_state(weights.optimizer_state(), 1)
            assert updated(again, twin) == pytest.approx(expected, rel=1e-4)
