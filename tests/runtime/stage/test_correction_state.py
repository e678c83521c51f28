"""What a correction knows of weights. What it does with that: tests/whole/test_corrections.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipetrain.config.rate import LearningRate
from pipetrain.correction import Correction, GapAware, MomentumAhead, StepsAhead
from pipetrain.runtime.stage.correction_state import DECAY, RATE, SQUARE, STEP, CorrectionState
from pipetrain.runtime.stage.parameter_store import ParameterStore
from pipetrain.runtime.stage.weight_versions import Weights
from pipetrain.schedule.actions import Predicted

GROUP = {"momentum": 0.5}


def late(correction: Correction, rates: list[float]) -> tuple[CorrectionState, nn.Parameter]:
    p = nn.Parameter(torch.ones(2))
    return CorrectionState(
        {"w": p}, [{"params": [p], **GROUP}], lambda update: [rates[update]], correction
    ), p


def moved(of: CorrectionState, p: nn.Parameter, update: int, by: float) -> None:
    with of.following(update):
        p.data += by


def test_the_last_step_counts_at_the_rate_of_the_coming_update():
    of, p = late(MomentumAhead(), [1.0, 0.5, 0.0, 1.0])
    ahead = [p.data.clone()]
    of.advance(ahead, 2, 0)
    assert ahead[0].tolist() == [1, 1]  # nothing is known yet
    moved(of, p, 0, by=-0.25)
    of.advance(ahead, 2, 1)
    assert ahead[0].tolist() == [1 - 0.75 * 0.5 * 0.25] * 2
    moved(of, p, 1, by=-0.25)
    moved(of, p, 2, by=0.0)
    before = ahead[0].clone()
    of.advance(ahead, 2, 3)  # at a rate of 0 nothing moved
    assert ahead[0].equal(before)


def test_the_typical_step_is_a_mean_at_the_peak_rate():
    of, p = late(GapAware(), [0.5, 1.0, 0.0])
    for update, by in enumerate([0.5, 3.0, 0.0]):
        moved(of, p, update, by)
    first, second = 1.0, 9.0
    weight = (1 - DECAY) / (1 - DECAY**2)
    assert of.state[p][SQUARE].tolist() == pytest.approx([first + weight * (second - first)] * 2)
    assert of.state[p][STEP].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64], ids=str)
def test_typical_steps_of_any_dtype_have_squares_and_a_gradient_of_0_stays_it(dtype):
    p = nn.Parameter(torch.zeros(2, dtype=dtype))
    of = CorrectionState({"w": p}, [{"params": [p], **GROUP}], lambda update: [1.0], GapAware())
    leaf = nn.Parameter(p.data.clone())
    with of.following(0):
        p.data[0] += 2**-13  # whose square float16 does not have
    leaf.grad = torch.tensor([1.0, 0.0], dtype=dtype)
    of.weigh({"w": leaf})
    torch.testing.assert_close(leaf.grad, torch.tensor([0.5, 0.0], dtype=dtype))
    kept, form = (
        of.named_values(p),
        CorrectionState({"w": p}, [], lambda update: [1.0], GapAware()).named_values(p),
    )
    assert {key: t.dtype for key, t in kept.items()} == {key: t.dtype for key, t in form.items()}


def test_nothing_is_kept_where_nothing_asks_for_it():
    of, p = late(Correction(), [1.0])
    moved(of, p, 0, by=1.0)
    assert not of.state


def test_a_load_keeps_what_is_asked_for_and_a_weight_that_was_frozen_goes_on_from_nothing():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    frozen, trained = (layer.weight for layer in module)

    def weights(correction: Correction) -> Weights:
        store = ParameterStore(module, lambda named: torch.optim.SGD([p for _, p in named], lr=0.5))
        return Weights(store, LearningRate(), correction=correction)

    def step(of: Weights) -> None:
        trained.grad = torch.ones(1, 2)
        of.step(keep=False)

    frozen.requires_grad_(False)
    first = weights(GapAware())
    step(first)
    frozen.requires_grad_(True)
    then, plain = weights(StepsAhead()), weights(Correction())
    for of in (then, plain):
        of.load_optimizer_state(first.optimizer_state(), 1)
    assert [[*state] for state in then.correction_state.state.values()] == [[STEP], [STEP, RATE]]
    then.begin_window([Predicted(0, 1)])
    leaves = then.store.leaves(Predicted(0, 1))
    assert leaves[0].equal(frozen)
    assert leaves[1].equal(trained - 0.5)
    step(then)
    assert then.correction_state.state[frozen][STEP].tolist() == [[0, 0], [0, 0]]
    assert not plain.correction_state.state  # a step that gets older would be saved again


def test_what_was_saved_before_the_first_update_predicts_nothing():
    of, p = late(StepsAhead(), [])
    of.state[p] = of.named_values(p)
    ahead = [p.data.clone()]
    of.advance(ahead, 1, 0)  # there is no rate of an update before
    assert ahead[0].equal(p)


def test_what_is_predicted_is_made_with_its_version_and_its_storage_used_again():
    module = nn.Linear(2, 1, bias=False)
    store = ParameterStore(module, lambda named: torch.optim.SGD([p for _, p in named], lr=0.5))
    weights = Weights(store, LearningRate(), correction=StepsAhead())
    weights.begin_window([Predicted(0, 1)])
    assert store.leaves(Predicted(0, 1))[0].equal(module.weight)
    module.weight.grad = torch.ones(1, 2)
    before = module.weight.detach().clone()
    weights.step(keep=False, predicted=[Predicted(1, 2)])
    assert store.older() == [Predicted(0, 1), Predicted(1, 2)]
    torch.testing.assert_close(store.leaves(Predicted(1, 2))[0].detach(), before - 0.5 * 3)
    storage = store.leaves(Predicted(0, 1))[0].data_ptr()
    store.release(Predicted(0, 1))
    module.weight.grad = torch.ones(1, 2)
    weights.step(keep=False, predicted=[Predicted(2, 1)])
    assert store.leaves(Predicted(2, 1))[0].data_ptr() == storage
