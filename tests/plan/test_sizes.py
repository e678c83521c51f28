"""What a stage holds of a microbatch, from the estimates of its layers: each storage once, for any cuts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipetrain.network.numerics import Numerics
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan.estimate import Layer, estimate
from pipetrain.plan.sizes import (
    LossSizes,
    assumed_loss,
    known_state,
    loss_sizes,
    optimizer_state,
    stage_sizes,
)
from pipetrain.schedule.memory import Sizes
from pipetrain.tasks import Classification, LanguageModelling, Regression, Task

FLOAT = 4


def entry(*shape: int) -> ValueSpec:
    return ValueSpec((TensorSpec(shape, torch.float32),))


def layers_of(model: nn.Module, *shape: int, **numerics: bool) -> list[Layer]:
    return estimate(model.train(), entry(*shape), Numerics(**numerics))


def held(model: nn.Module, shape: tuple[int, ...], start: int, end: int, **options: bool) -> Sizes:
    return stage_sizes(layers_of(model, *shape), entry(*shape), start, end, **options)


CHAIN = nn.Sequential(nn.Linear(48, 12), nn.Tanh(), nn.Linear(12, 10), nn.ReLU())


def test_each_storage_counts_once():
    # A linear layer saves its input, tanh and ReLU their output, which is also what leaves.
    assert held(CHAIN, (2, 48), 0, 4).saved == 2 * (48 + 12 + 10) * FLOAT
    assert held(CHAIN, (2, 48), 0, 2).saved == 2 * (48 + 12) * FLOAT
    assert held(CHAIN, (2, 48), 2, 4).saved == 2 * (12 + 10) * FLOAT
    # What the first layer makes leaves and is not saved; it is held all the same.
    assert held(CHAIN, (2, 48), 0, 1).saved == 2 * (48 + 12) * FLOAT


def test_before_its_recomputation_a_microbatch_holds_its_inputs():
    assert held(CHAIN, (2, 48), 2, 4).before_r == 2 * 12 * FLOAT
    assert held(CHAIN, (2, 48), 2, 4, selective=True).before_r == 2 * (12 + 10) * FLOAT
    norm = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    assert held(norm, (2, 8), 0, 2).before_r == 2 * 8 * FLOAT + 2 * 8 * FLOAT + 8  # and its statistics


def test_after_i_it_holds_the_inputs_and_output_gradients_of_products():
    assert held(CHAIN, (2, 48), 2, 4).after_i == 2 * (12 + 10) * FLOAT
    assert held(CHAIN, (2, 48), 1, 4).after_i == 2 * (12 + 10) * FLOAT
    # The first stage has no I, and holds what it has until W, with the gradient that came.
    assert held(CHAIN, (2, 48), 0, 2).after_i == 2 * (48 + 12) * FLOAT + 2 * 12 * FLOAT


def test_after_i_it_holds_the_gradients_of_weights_that_were_not_put_off():
    model = nn.Sequential(nn.Linear(48, 12), nn.Linear(12, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))
    # The inputs of the linear layers, the gradients of their outputs, and those of the norm's two weights.
    assert held(model, (2, 48), 1, 4).after_i == (2 * 12 + 2 * 10 + 2 * 10 + 2 * 3 + 2 * 10) * FLOAT


def test_a_view_is_the_storage_that_it_is_of():
    model = nn.Sequential(nn.Linear(48, 12), nn.Unflatten(1, (3, 4)), nn.Identity(), nn.Linear(4, 4))
    assert held(model, (2, 48), 0, 4).saved == 2 * (48 + 12) * FLOAT
    assert held(model, (2, 48), 1, 4).saved == 2 * 12 * FLOAT


def test_what_is_overwritten_is_not_kept_by_a_selective_recomputation():
    def before_r(inplace: bool) -> int:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 8))
        return held(model, (2, 8), 1, 4, selective=True).before_r

    assert before_r(False) - before_r(True) == 2 * 8 * FLOAT


def test_under_autocast_the_casts_of_weights_are_saved_and_bf16_crosses():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    found = layers_of(model, 2, 8, autocast=True)
    there = stage_sizes(found, entry(2, 8), 1, 3)
    # bf16: what enters, or its cast, the input of the second layer, and both casts of weights.
    assert there.saved == pytest.approx(2 * 8 * 2 * 2 + 2 * 64 * 2, abs=2 * 8 * 6)


def test_fake_tensors_are_counted_as_real_ones(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    shape = (2, 3, 8, 8)
    real = held(model, shape, 0, 5)
    monkeypatch.setattr("pipetrain.plan.estimate.CHEAP", -1)
    assert held(model, shape, 0, 5) == real
    own = 2 * 3 * 64 + 2 * 4 * 36 * 2 + 2 * 4  # input, convolution, ReLU; mean and deviation
    assert real.saved == own * FLOAT + 2 * 4 * 9 * 8  # and the pool's indices


def test_weights_are_counted_by_name():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    found = layers_of(model, 2, 4)
    trained, fixed = (16 + 4 + 4) * FLOAT, 4 * FLOAT + 2 * 4 * FLOAT + 8
    sizes = stage_sizes(found, entry(2, 4), 0, 3)
    assert (sizes.weights, sizes.version, sizes.gradient) == (trained + fixed, trained, trained)
    assert stage_sizes(found, entry(2, 4), 0, 3, averaged=True).weights == 2 * trained + fixed


# The loss


def scores(*shape: int) -> ValueSpec:
    return ValueSpec((TensorSpec(shape, torch.float32),))


@pytest.mark.parametrize("real", [True, False])
def test_a_cross_entropy_saves_its_log_probabilities(real, monkeypatch):
    if not real:
        monkeypatch.setattr("pipetrain.plan.sizes.MOST_REAL", -1)
    found = loss_sizes(Classification(), scores(6, 10), torch.float32)
    assert found.targets == 6 * 8
    assert total(found) == pytest.approx(6 * 10 * FLOAT, abs=8)
    tokens = loss_sizes(LanguageModelling(), scores(2, 3, 10), torch.float32)
    assert (tokens.targets, total(tokens)) == (6 * 8, pytest.approx(6 * 10 * FLOAT, abs=8))


def total(loss: LossSizes) -> int:
    return sum(loss.storages.made[number] for number in loss.storages.saved if number >= 0)


def test_a_squared_error_saves_the_outputs_themselves():
    found = loss_sizes(Regression(), scores(6, 2), torch.float32)
    assert found.targets == 6 * 2 * FLOAT
    assert found.storages.saved == {-1}
    layers = layers_of(nn.Sequential(nn.Linear(4, 2)), 6, 4)
    assert stage_sizes(layers, entry(6, 4), 0, 1, found).saved == (6 * 4 + 6 * 2 + 6 * 2) * FLOAT


def test_a_loss_that_takes_other_targets_is_assumed_to_save_its_outputs_once():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise KeyError("boxes")

    assert loss_sizes(Task(loss), scores(6, 10), torch.float32) == assumed_loss(scores(6, 10), torch.float32)


# The optimizer


def test_the_state_of_an_optimizer_is_found_by_a_step_on_small_parameters():
    matrix, vector = TensorSpec((30, 20), torch.float32), TensorSpec((20,), torch.float32)
    adam = optimizer_state(lambda params: torch.optim.AdamW(params, 0.1))
    assert [adam(matrix), adam(vector)] == [2 * 600 * FLOAT, 2 * 20 * FLOAT]
    momentum = optimizer_state(lambda params: torch.optim.SGD(params, 0.1, momentum=0.9))
    assert momentum(matrix) == 600 * FLOAT
    assert optimizer_state(lambda params: torch.optim.SGD(params, 0.1))(matrix) == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {"amsgrad": True})],
)
def test_the_state_of_known_optimizers_is_what_a_step_finds(name, options):
    spec = TensorSpec((30, 20), torch.float32)
    stepped = optimizer_state(lambda params: getattr(torch.optim, name)(params, lr=0.1, **options))
    kept = known_state(f"torch.optim.{name}", options)
    assert kept is not None
    assert stepped(spec) == kept * spec.nbytes
    assert known_state("torch.optim.Adafactor", {}) is None
    assert known_state("somebody.SGD", {}) is None
