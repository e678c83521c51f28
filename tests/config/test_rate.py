"""The learning rate of each update: its ends, its warm-up, and against torch's own schedulers."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR

from pipetrain.config.rate import SHAPES, LearningRate, asked_rate, constant, cosine, learning_rate
from pipetrain.errors import ConfigError


def rates(name: str, peak: float, warmup: float, updates: int) -> list[float]:
    fraction = learning_rate(name, warmup, updates)
    return [peak * fraction(update) for update in range(updates)]


def test_warm_up_is_a_line():
    for shape, by_progress in [
        (constant, {0: 0, 0.1: 0.5, 0.2: 1, 0.6: 1, 1: 1}),
        (cosine, {0: 0, 0.05: 0.25, 0.1: 0.5, 0.2: 1, 0.6: 0.5, 1: 0}),
    ]:
        assert {at: shape(at, 0.2) for at in by_progress} == pytest.approx(by_progress, abs=1e-15)


@settings(derandomize=True, deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.floats(0, 0.95), st.integers(1, 200), st.floats(1e-5, 10))
def test_any_rate_is_above_0_and_at_most_the_peak_rising_then_falling(name, warmup, updates, peak):
    seen = rates(name, peak, warmup, updates)
    assert len(seen) == updates
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in seen)
    rising = [b >= a - 1e-12 * peak for a, b in pairwise(seen)]
    turn = rising.index(False) if False in rising else len(rising)
    assert all(b <= a + 1e-12 * peak for a, b in pairwise(seen[turn:]))
    assert name != "constant" or turn == len(rising)


def torch_rates(make, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler, seen = make(optimizer), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


@pytest.mark.parametrize(("updates", "warmup"), [(10, 0.3), (50, 0.5)])
def test_cosine_and_one_cycle_are_torch_s(updates, warmup):
    """Progress is taken at an update's middle here, and at its beginning there: so of 2n updates ours at
    n + k lie on theirs of a scheduler that is stepped twice as finely.

    Torch's phases end at pct_start * steps - 1 and steps - 1: so many steps put them where ours are.
    """
    fine = torch_rates(lambda o: CosineAnnealingLR(o, T_max=2 * updates), 2 * updates)
    assert rates("cosine", 0.3, 0.0, updates) == pytest.approx(fine[1::2], rel=1e-9)
    steps = 2 * updates + 1
    options = {"total_steps": steps, "pct_start": (warmup * 2 * updates + 1) / steps, "cycle_momentum": False}
    fine = torch_rates(lambda o: OneCycleLR(o, max_lr=0.3, **options), steps - 1)
    assert rates("one_cycle", 0.3, warmup, updates) == pytest.approx(fine[1::2], rel=1e-9)


def test_a_program_gives_a_function_or_nothing():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)

    def halving(optimizer):
        return StepLR(optimizer, 1, 0.5)

    assert asked_rate(None, "a", optimizer) == LearningRate(shown="a")
    assert asked_rate(lambda update: 0.5, "a", optimizer).fraction(3) == 0.5
    assert asked_rate(halving, "a", optimizer) == LearningRate(shown="a", scheduler=halving)
    for junk, says in {
        0.1: r"lr_schedule=0.1 must be a function of the update \(0, 1, ...\) that returns a fraction",
        "cosine": "lr_schedule='cosine' must be a function",
        halving(optimizer): r"is a StepLR of one .* lr_schedule=lambda optimizer: StepLR\(optimizer",
        StepLR: "lr_schedule fails for update 0: TypeError: .*'step_size'; and of an optimizer: .*'step",
        ReduceLROnPlateau: "gives a ReduceLROnPlateau, which cannot be .* it needs a loss; make it in the ",
        partial(OneCycleLR, max_lr=1): "update 0: TypeError: .*; and of an optimizer: .* total_steps OR",
        (
            lambda update: -1.0
        ): "lr_schedule gives -1.0 for update 0; it must give a finite number of at least 0",
        (lambda update: [1][update + 1]): "fails for update 0: IndexError: ",
    }.items():
        with pytest.raises(ConfigError, match=says) as raised:
            asked_rate(junk, "a", optimizer)
        assert raised.type is ConfigError


def test_a_function_of_the_update_is_taken_as_it_is_after_a_trial():
    rate = learning_rate(lambda update: 1 / (1 + update), 0.5, 3)
    assert [rate(update) for update in (2, 0, 1)] == [1 / 3, 1, 1 / 2]
    assert learning_rate(lambda update: 0.5**update, 0.0, 1)(3) == 0.125  # tried for the first alone
    for function, says in [
        (lambda update: 1.0 - update, "lr_schedule gives -1.0 for update 2; it must give a finite number"),
        (lambda update: float("nan"), "lr_schedule gives nan for update 0; it must give a finite number"),
        (lambda update: 1 / (2 - update), "lr_schedule fails for update 2: ZeroDivisionError: divisi"),
    ]:
        with pytest.raises(ConfigError, match=says):
            learning_rate(function, 0.0, 3)
