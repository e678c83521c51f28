"""What is measured: times by a clock that a test holds, messages, all together; and the file that stays."""

from __future__ import annotations

import json
from copy import deepcopy
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_planned

from pipetrain import Pipeline
from pipetrain.config.settings import Settings
from pipetrain.model.chain import Chain
from pipetrain.model.numerics import Numerics
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import estimate
from pipetrain.plan.costs import SECONDS, LayerTime, Profile, profile_conditions
from pipetrain.plan.plan import Plan
from pipetrain.runtime import clock, layer_profile
from pipetrain.runtime.layer_profile import (
    LARGE_BYTES,
    SMALL_BYTES,
    latency_and_byte_time,
    measure,
    measure_layers,
)
from pipetrain.runtime.stage import split_backward as split
from pipetrain.runtime.stage import stage as stage_module
from pipetrain.runtime.stage.parameter_store import OptimizerFactory
from tests.support import models
from tests.support.cases import options_of
from tests.support.pretended_gpu.world import alone
from tests.support.refusals import refusal

SGD: OptimizerFactory = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)


def measured(
    model: nn.Sequential,
    shape: tuple[int, ...] = (3, 32, 32),
    optimizer: OptimizerFactory = SGD,
    device: str = "cpu",
) -> list[dict[str, float]]:
    """Measure microbatches of two samples; the weights stay what they are."""
    example, before = ValueSpec((TensorSpec(shape, torch.float32),)), deepcopy([*model.parameters()])
    layers = estimate(deepcopy(model), example.of(Size(2)))
    how = Numerics(), optimizer, torch.device(device)
    found = measure_layers(Chain(model), layers, example, Size(2), *how, layer_profile.MIN_WINDOWS)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, model.parameters(), strict=True))
    return [dict(zip(SECONDS, seconds, strict=True)) for seconds in found]


# Times


class SetClock:
    """A clock that goes on only where something says that it takes time."""

    now = 0.0


class Steps(torch.optim.SGD):
    def step(self) -> None:
        super().step()
        SetClock.now += 7


class Halves(nn.Linear):
    """A forward takes 1 s, the gradient of its input 2 s, and that of its weight 5 s."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda grad: take(2))
        made = super().forward(x)
        if not is_planned():
            take(1)
            if not hasattr(self.weight, "hook"):  # a leaf of a version, which stays
                self.weight.hook = self.weight.register_hook(lambda grad: None if grad is None else take(5))
        return made


def take(seconds: float) -> None:
    SetClock.now += seconds


@pytest.mark.parametrize("start_s", [0, 3])
def test_each_layer_s_times_are_its_own_and_what_starting_a_backward_costs_is_a_stage_s(monkeypatch, start_s):
    """A stage starts one for all its layers; a layer that takes no time is given a tenth of what it took."""
    run = split.differentiate

    def started(*tensors: Any) -> None:
        take(start_s)
        run(*tensors)

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: SetClock.now))
    for module in (stage_module, split):
        monkeypatch.setattr(module, "differentiate", started)
    model = nn.Sequential(Halves(12, 12), nn.Tanh(), Halves(12, 12))
    *layers, stage = measured(model, (12,), partial(Steps, lr=0.1))
    column = {name: [layer[name] for layer in layers] for name in SECONDS}
    assert column["forward_s"] == column["recorded_s"] == [1, 0, 1]
    assert column["backward_s"] == pytest.approx([5, start_s / 10, 7])
    assert column["input_s"] == pytest.approx([0, start_s / 10, 2])  # none before the first
    assert (column["weight_s"][1:], column["step_s"]) == ([0, 5], [7, 0, 7])
    assert [stage[f"{name}_s"] for name in ("forward", "backward", "input", "weight")] == [
        0,
        start_s,
        start_s,
        0,
    ]


class Interrupted(Halves):
    """Its whole forward takes 6 s more in one window."""

    def __init__(self, window: int) -> None:
        super().__init__(12, 12)
        self.calls, self.long = 0, window * FORWARDS + 2

    def forward(self, x: Tensor) -> Tensor:
        if not is_planned():
            take(6 if self.calls == self.long else 0)
            self.calls += 1
        return super().forward(x)


FORWARDS = 4  # of a layer in a window: recomputed twice, whole, and halved


def test_what_interrupts_now_one_layer_and_then_another_is_in_the_sum_of_their_times(monkeypatch):
    """Medians are shares of the mean pass, so that no layer is taken for one that is slow."""
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: SetClock.now))
    monkeypatch.setattr(layer_profile, "ENOUGH_S", 0.0)
    monkeypatch.setattr(layer_profile, "MIN_WINDOWS", layer_profile.WARMUP_WINDOWS + 4)
    *layers, _ = measured(nn.Sequential(*map(Interrupted, (2, 4))), (12,), partial(Steps, lr=0.1))
    assert [layer["forward_s"] for layer in layers] == [2.5, 2.5]  # (4 x 2 + 2 x 6) / 4 = 5
    assert [layer["recorded_s"] for layer in layers] == [1, 1]


class Adding(nn.Linear):
    """To add to a gradient of its weight that is there takes 3 s."""

    def forward(self, x: Tensor) -> Tensor:
        leaf = self.weight
        if not is_planned() and not hasattr(leaf, "hook"):
            leaf.hook = leaf.register_hook(lambda grad: take(1 if leaf.grad is None else 1 + 3))
        take(1)
        return super().forward(x)


def test_a_backward_adds_to_a_gradient_as_that_of_most_microbatches_of_a_batch_does(monkeypatch):
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: SetClock.now))
    layer, *_ = measured(nn.Sequential(Adding(12, 12), Halves(12, 12)), (12,), partial(Steps, lr=0.1))
    assert layer["backward_s"] == 1 + 3


# Any model


@pytest.mark.parametrize(
    "build",
    [
        *(models.with_norm, models.recomputing_reentrant, models.shared_statistics, models.complex_inside),
        *(models.in_place_behind_a_view, models.caching, models.frozen_end, models.tied),
    ],
)
def test_any_model_that_can_train_can_be_measured_in_the_modes_of_its_layers(build):
    model = build()
    model[1].eval()
    *layers, stage = measured(model)
    assert len(layers) == len(model)
    assert all(layer["forward_s"] > 0 for layer in (*layers, stage))
    assert layers[-1]["backward_s"] > 0
    assert not model[1].training


def test_a_gpu_is_measured_by_its_events():
    with alone():
        layers = measured(nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 3)), (12,), device="cuda")
    assert all(layer["forward_s"] > 0 and layer["weight_s"] > 0 for layer in layers)


def test_the_line_goes_through_both_times():
    latency_s, s_per_byte = latency_and_byte_time(2.0, 5.0)
    assert latency_s + SMALL_BYTES * s_per_byte == pytest.approx(2.0)
    assert latency_s + LARGE_BYTES * s_per_byte == pytest.approx(5.0)
    assert latency_and_byte_time(2.0, 1.0) == (2.0, 0.0)  # noise: no message is faster for being larger


def test_a_time_is_the_median_of_all_ranks():
    model, example = nn.Sequential(nn.Linear(12, 3)), ValueSpec((TensorSpec((12,), torch.float32),))
    told = [[[9.0, 1.0] * 4, [1.0] * 8], [[2.0, 3.0] * 4, [1.0] * 8], [[1.0, 2.0] * 4, [4.0] * 8]]
    world, cpu = SimpleNamespace(rank=0, size=1), torch.device("cpu")
    groups = SimpleNamespace(world=world, device=cpu, gather=lambda what, mine: told)
    layers = estimate(deepcopy(model), example.of(Size(2)))
    found = measure(groups, Settings(samples=8), {}, Chain(model), SGD, layers, example, Numerics())
    assert found.layers == [LayerTime("0", 2 * 3 * 4, *[2.0, 2.0] * 4)]
    assert (found.stage, found.machine["ranks"]) == (LayerTime("", 0, *[1.0] * 8), 3)


# Together


def dropping() -> nn.Sequential:
    """Draws random numbers as it trains, and counts statistics."""
    torch.manual_seed(0)
    norm = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Tanh())
    return nn.Sequential(norm, nn.Dropout(0.3), nn.Linear(12, 12), nn.Dropout(0.3), nn.Linear(12, 3))


def trained(partition: object) -> tuple[Plan, list[float], dict[str, Tensor]]:
    """Train on ranks of two stages each, so that three pairs of neighbours are of the same two ranks."""
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(12, 12, generator=generator), torch.arange(12) % 3) for _ in range(3)]
    options = {"microbatches": 4, "partition": partition, "device": "cpu"}
    with Pipeline(dropping(), cross_entropy, SGD, "interleaved_1f1b", **options) as pipe:
        losses = list(pipe.train(batches))
        return pipe.plan, losses, pipe.state_dict() | {"random": torch.get_rng_state()}


def by_measured_cuts() -> dict:
    """Train by the cuts of a profile that is taken now, then by the same cuts as they are given."""
    plan, losses, state = trained("profile")
    _, others, given = trained(plan.cuts)
    assert losses == others
    assert all(torch.equal(tensor, given[name]) for name, tensor in state.items())
    return plan.table.times.to_json() | {"cuts": plan.cuts}


def test_a_run_by_measured_cuts_is_the_run_by_the_same_cuts_to_the_last_bit(ranks):
    first, second = ranks(by_measured_cuts)
    assert first == second
    assert all(a < b for a, b in pairwise([0, *first.pop("cuts"), 5]))
    measured = Profile.from_json(json.loads(json.dumps(first)))
    assert (measured.machine["ranks"], measured.conditions["microbatch"], len(measured.layers)) == (2, 3, 5)
    assert measured.latency_s + measured.s_per_byte > 0
    assert 0 < measured.alone <= 1


class Broken(nn.Module):
    """Can be planned, and fails where numbers enter it."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_planned():
            raise RuntimeError("no\nnumbers")
        return x


def profile_broken() -> str:
    model, sample = nn.Sequential(nn.Linear(12, 3), Broken()), (torch.randn(4, 12), torch.arange(4) % 3)
    options = {"partition": "profile", "device": "cpu", "sample": sample}
    return refusal(partial(Pipeline, model, cross_entropy, SGD, **options))


def test_a_layer_that_fails_is_said_in_one_sentence_on_all_ranks(ranks):
    said = "layer 1 (1) of the model cannot be profiled: RuntimeError: no numbers"
    assert ranks(profile_broken) == [said, said]


# Conditions


def test_conditions_are_what_changes_what_is_measured():
    def conditions_of(*words: str) -> dict:
        cfg = options_of(["data=digits", "batch_size=12", "microbatches=4", "model=mlp", *words])
        return dict(profile_conditions(Settings.composed(cfg, "1f1b", 1), cfg["optim"]))

    base = conditions_of("optim.lr=0.3", "seed=4", "schedule=pipedream")
    assert base == conditions_of()
    assert (base["microbatch"], base["optimizer"]) == (3, "SGD momentum=0.9 weight_decay=0.0005 fused=None")
    for word in ("dtype=float64", "optim.momentum=0", "microbatches=2", "model=vgg11"):
        assert conditions_of(word) != base
