"""What is measured of each layer: bytes by hand, times by a clock that a test holds, nothing changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_planned

from pipetrain.errors import ConfigError
from pipetrain.network.boundary import Boundary, TensorSpec
from pipetrain.network.numerics import Numerics
from pipetrain.plan.estimate import estimate
from pipetrain.plan.profile import LayerTime
from pipetrain.runtime import measure
from pipetrain.runtime.measure import REPEATS, WARM_UP, measure_layers
from pipetrain.runtime.weights import OptimizerFactory
from tests.support import again, models
from tests.support.models import Fork, Join, Shrink, Through

SGD: OptimizerFactory = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
FLOAT = 4


def entry(*shape: int) -> Boundary:
    return Boundary((TensorSpec(shape, torch.float32),))


def measured(
    model: nn.Sequential, shape: tuple[int, ...] = (2, 3, 32, 32), optimizer: OptimizerFactory = SGD
) -> list[LayerTime]:
    layers = estimate(deepcopy(model), entry(*shape))
    return measure_layers(model, torch.randn(shape), layers, optimizer)


def column(name: str, layers: list[LayerTime]) -> list[int]:
    return [getattr(layer, name) for layer in layers]


# Bytes


def test_peaks_are_what_is_alive_beyond_what_was():
    class Twice(nn.Module):
        """Makes two tensors of its input's size, one after the other was let go."""

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                made = torch.ones_like(x) * 2
            return made

    held = measured(nn.Sequential(nn.Linear(48, 48), Twice(), nn.Linear(48, 4)), (2, 48))
    tensor, weight = 2 * 48 * FLOAT, 48 * 48 * FLOAT
    assert held[1].peak_bytes == 3 * tensor  # the first is let go once the second is made
    assert tensor + weight <= held[0].peak_bytes < 2 * (tensor + weight)


@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        (SGD, 49 * 12 * FLOAT),
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.AdamW, lr=0.1), 2 * 49 * 12 * FLOAT + 2 * FLOAT),  # two steps are counted
    ],
)
def test_what_the_optimizer_remembers_is_counted(optimizer, state):
    held = measured(nn.Sequential(nn.Linear(48, 12), nn.Tanh()), (2, 48), optimizer)
    assert column("state_bytes", held) == [state, 0]


def test_numbers_that_have_no_gradient_send_none_back():
    class Mask(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x > 0

    class Use(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return pair[0] * pair[1]

    held = measured(nn.Sequential(nn.Linear(48, 12), Mask(), Use()), (2, 48))
    assert column("output_bytes", held) == [96, 96 + 24, 96]
    assert column("gradient_bytes", held) == [96, 96, 96]


# Times


class SetClock:
    """A clock that goes on only where something says that it takes time."""

    now = 0.0

    def __init__(self, device: torch.device) -> None: ...

    def mark(self) -> float:
        return SetClock.now

    def durations(self, spans: Iterable[tuple[int, float, float]]) -> Iterator[tuple[int, float]]:
        return ((key, end - start) for key, start, end in spans)


class Takes(nn.Linear):
    """A layer whose forward takes so long, and its backward ten times that."""

    def __init__(self, seconds: float) -> None:
        super().__init__(12, 12)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        SetClock.now += self.seconds
        made = super().forward(x)
        made.register_hook(lambda grad: setattr(SetClock, "now", SetClock.now + 10 * self.seconds))
        return made


class Steps(torch.optim.SGD):
    def step(self) -> None:
        super().step()
        SetClock.now += 7


def test_each_layer_s_times_are_its_own(monkeypatch):
    monkeypatch.setattr(measure, "Clock", SetClock)
    held = measured(nn.Sequential(nn.Tanh(), Takes(1), Takes(2)), (2, 12), partial(Steps, lr=0.1))
    assert column("forward_s", held) == [0, 1, 2]
    assert column("backward_s", held) == [0, 10, 20]
    assert column("step_s", held) == [0, 7, 7]


def test_what_starting_a_backward_costs_is_no_layer_s(monkeypatch):
    """A stage starts one for all its layers."""
    run = torch.autograd.backward

    def started(*args: object, **options: object) -> None:
        SetClock.now += 3
        run(*args, **options)

    monkeypatch.setattr(measure, "Clock", SetClock)
    monkeypatch.setattr(torch.autograd, "backward", started)
    held = measured(nn.Sequential(Takes(1), Takes(2), nn.Tanh()), (2, 12))
    assert column("backward_s", held) == pytest.approx([10, 20, 0.3])
    assert column("input_s", held) == pytest.approx([0, 20, 0.3])


class Halves(nn.Linear):
    """A layer whose forward takes 1 s, and the gradient of its input 2 s; of its weight, see below."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda grad: setattr(SetClock, "now", SetClock.now + 2))
        made = super().forward(x)
        if not is_planned():
            SetClock.now += 1
        return made


def test_the_halves_of_a_backward_are_measured_apart(monkeypatch):
    monkeypatch.setattr(measure, "Clock", SetClock)
    model = nn.Sequential(Halves(12, 12), nn.BatchNorm1d(12), Halves(12, 12))
    for layer in (model[0], model[2]):
        layer.weight.register_hook(
            lambda grad: None if grad is None else setattr(SetClock, "now", SetClock.now + 5)
        )
    held = measured(model, (2, 12))
    assert column("forward_s", held) == column("recorded_s", held) == [1, 0, 1]
    assert column("backward_s", held) == [5, 0, 7]
    assert column("input_s", held) == [0, 0, 2]  # nothing before the first layer needs a gradient
    assert column("weight_s", held) == [5, 0, 5]


def test_a_layer_runs_often_enough_and_in_its_own_mode():
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            assert not self.training
            Counting.calls += not is_planned()
            return x

    measured(nn.Sequential(nn.Flatten(), Counting().eval(), nn.Linear(3072, 10)))
    # Each pass has a whole and a split backward.
    assert Counting.calls >= 2 * (WARM_UP + REPEATS)


# Any model


@pytest.mark.parametrize(
    "build",
    [
        *(models.with_norm, models.without_norm, models.recomputing, models.recomputing_reentrant),
        *(models.reused, models.shared_statistics, models.in_place_behind_a_view, models.caching),
        *(models.frozen_end, models.complex_inside, models.tied, again.differentiating),
    ],
)
def test_any_model_that_can_train_can_be_measured(build):
    model = build()
    held = measured(model)
    assert [layer.name for layer in held] == list(model._modules)
    assert all(layer.forward_s > 0 for layer in held)
    assert held[-1].backward_s > 0


def test_layers_that_work_in_place_spoil_neither_the_input_nor_each_other():
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(3072, 8), nn.Tanh(), nn.ReLU(True))
    x = torch.randn(2, 3, 32, 32)
    before = x.clone()
    layers = estimate(model, entry(2, 3, 32, 32))
    assert [layer.writes_input for layer in layers] == [True, False, False, False, True]
    measure_layers(model, x, layers, SGD)
    assert torch.equal(x, before)


def test_the_weights_stay_what_they_are():
    """So that numbers stay ordinary: a step takes as long at a rate of nothing."""
    model = nn.Sequential(
        Shrink(), nn.Conv2d(3, 4, 3), Fork(nn.Tanh()), Through(nn.Tanh()), Join(), nn.Flatten()
    )
    before = [p.detach().clone() for p in model.parameters()]
    measured(model)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


class Broken(nn.Module):
    """Fails where numbers enter it, or on the way back."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        if not is_planned() and not self.backward:
            raise RuntimeError("no\nnumbers")
        x = x * 1
        if not is_planned() and x.requires_grad:
            x.register_hook(lambda grad: [][0])
        return x


@pytest.mark.parametrize(
    ("backward", "why"), [(False, "RuntimeError: no numbers"), (True, "IndexError: list index out of range")]
)
def test_a_layer_that_fails_is_named_in_one_sentence(backward, why):
    with pytest.raises(ConfigError) as error:
        measured(nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), Broken(backward)))
    assert str(error.value) == f"layer 2 (2) of the model cannot be profiled: {why}"


def test_bf16_is_measured_in_bf16():
    wide = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    whole, half = (
        measure_layers(wide, torch.randn(3, 8), estimate(wide, entry(3, 8), numerics=numerics), SGD, numerics)
        for numerics in (Numerics(), Numerics(autocast=True))
    )
    assert [layer.output_bytes for layer in whole] == [3 * 16 * 4, 3 * 16 * 4, 3 * 4 * 4]
    assert [2 * layer.output_bytes for layer in half] == [layer.output_bytes for layer in whole]
