"""What is measured: times by a clock that a test holds, messages, all together."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from copy import deepcopy
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.utils._python_dispatch import is_in_torch_dispatch_mode as is_planned

from pipetrain import measure
from pipetrain.building import make_model
from pipetrain.errors import ConfigError
from pipetrain.measure import (
    LARGE,
    REPEATS,
    SMALL,
    WARM_UP,
    line,
    measure_layers,
    slowest_link,
)
from pipetrain.network.chain import Chain, network_of
from pipetrain.network.network import Network
from pipetrain.network.numerics import Numerics
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan.costs import LayerTime, Profile, profile_conditions
from pipetrain.plan.estimate import estimate
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.optimizer import make_optimizer
from pipetrain.runtime.ranks import World
from pipetrain.runtime.weights import OptimizerFactory
from pipetrain.schedule.lower import edges
from pipetrain.schedule.programs import forward_only
from pipetrain.settings import Settings
from tests.support import models
from tests.support.cases import config
from tests.support.jobs import profile_that_fails, profile_then_train
from tests.support.runs import check_early
from tests.support.worlds import run_world

SGD: OptimizerFactory = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
WORDS = ["data=digits", "batch_size=12", "microbatches=4", "epochs=2", "timeout=60", "threads=1"]
CPU = torch.device("cpu")


def entry(*shape: int) -> ValueSpec:
    return ValueSpec((TensorSpec(shape, torch.float32),))


def measured(
    model: nn.Sequential, shape: tuple[int, ...] = (2, 3, 32, 32), optimizer: OptimizerFactory = SGD
) -> list[LayerTime]:
    """Measure; so that numbers stay ordinary, inputs and weights stay what they are."""
    layers, x = estimate(deepcopy(model), entry(*shape)), torch.randn(shape)
    given = [t.detach().clone() for t in (x, *model.parameters())]
    found = measure_layers(Chain(model), x, layers, optimizer, Numerics())
    assert all(torch.equal(a, b) for a, b in zip(given, (x, *model.parameters()), strict=True))
    return found


def column(name: str, layers: list[LayerTime]) -> list[int]:
    return [getattr(layer, name) for layer in layers]


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


@pytest.mark.parametrize("start_s", [0, 3])
def test_each_layer_s_times_are_its_own_without_what_starting_a_backward_costs(monkeypatch, start_s):
    """A stage starts one for all its layers."""
    run = torch.autograd.backward

    def started(*args: object, **options: object) -> None:
        SetClock.now += start_s
        run(*args, **options)

    monkeypatch.setattr(measure, "Clock", SetClock)
    monkeypatch.setattr(torch.autograd, "backward", started)
    held = measured(nn.Sequential(Takes(1), Takes(2), nn.Tanh()), (2, 12), partial(Steps, lr=0.1))
    assert column("forward_s", held) == [1, 2, 0]
    assert column("backward_s", held) == pytest.approx([10, 20, start_s / 10])
    assert column("input_s", held) == pytest.approx([0, 20, start_s / 10])
    assert column("step_s", held) == [7, 7, 0]


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
    assert Counting.calls >= 2 * (WARM_UP + REPEATS)  # each pass has a whole and a split backward


# Any model


def in_place() -> nn.Sequential:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(3072, 8), nn.Tanh(), nn.ReLU(True))


@pytest.mark.parametrize(
    "build",
    [
        *(models.with_norm, models.without_norm, models.recomputing, models.recomputing_reentrant),
        *(models.reused, models.shared_statistics, models.in_place_behind_a_view, models.caching),
        *(models.frozen_end, models.complex_inside, models.tied, in_place),
    ],
)
def test_any_model_that_can_train_can_be_measured(build):
    model = build()
    held = measured(model)
    assert [layer.name for layer in held] == list(model._modules)
    assert all(layer.forward_s > 0 for layer in held)
    assert held[-1].backward_s > 0


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


# Messages


def both_ways(placement: list[int]) -> list[tuple[int, int]]:
    up = edges(forward_only(placement, 1))
    return [edge for a, b in up for edge in ((a, b), (b, a))]


def link(world: World, store: Store, placement: list[int]) -> tuple[float, float]:
    mesh = Mesh(world, placement, both_ways(placement), CPU, store, 30)
    found = slowest_link(mesh, buffer_size=2)
    mesh.close()
    return found


@pytest.mark.processes
def test_all_ranks_learn_of_the_slowest_link():
    first, second, third = run_world(link, 3, [0, 1, 2, 0, 1, 2])
    assert first == second == third
    latency_s, s_per_byte = first
    assert 0 <= latency_s < 30
    assert 0 <= s_per_byte < 30 / LARGE
    assert latency_s + s_per_byte > 0


def test_the_line_goes_through_both_times():
    latency_s, s_per_byte = line(2.0, 5.0)
    assert latency_s + SMALL * s_per_byte == pytest.approx(2.0)
    assert latency_s + LARGE * s_per_byte == pytest.approx(5.0)
    assert line(2.0, 1.0) == (2.0, 0.0)  # noise: no message is faster for being larger


def model(name: str) -> str:
    return f"model._target_=tests.support.models.{name}"


# Together


@pytest.mark.processes
def test_a_run_by_measured_cuts_is_the_run_by_the_same_cuts_to_the_last_bit():
    (first, cuts), (second, others) = run_world(profile_then_train, 2, [*WORDS, model("dropping")])
    assert first == second
    assert cuts == others
    assert all(a < b for a, b in pairwise([0, *cuts, 5]))
    measured = Profile.from_json(json.loads(json.dumps(first)))
    assert measured.machine["ranks"] == 2
    assert measured.conditions["microbatch"] == 3
    assert len(measured.layers) == 5
    assert measured.latency_s + measured.s_per_byte > 0


@pytest.mark.processes
def test_a_layer_that_fails_is_said_once_and_all_ranks_know():
    sentence = "layer 2 (2) of the model cannot be profiled: RuntimeError: no numbers"
    said = run_world(profile_that_fails, 2, [*WORDS, model("no_numbers")])
    assert said == [sentence, sentence]


# Conditions


def test_conditions_are_what_changes_what_is_measured():
    def conditions_of(*words: str) -> dict:
        cfg = config([*WORDS, "model=mlp", *words])
        return dict(profile_conditions(Settings.composed(cfg, "1f1b", 1), cfg.optim))

    base = conditions_of()
    assert base == {
        "model": "mlp",
        "microbatch": 3,
        "dtype": "float32",
        "precision": "fp32",
        "memory_format": "auto",
        "optimizer": "SGD momentum=0.9 weight_decay=0.0005 fused=None",
    }
    assert conditions_of("optim.lr=0.3", "seed=4", "epochs=9", "schedule=pipedream") == base
    for word in ("dtype=float64", "optim.momentum=0", "optim=adamw", "microbatches=2", "model=vgg11"):
        assert conditions_of(word) != base


# A draft, and a file


def test_a_draft_is_cut_by_flops_until_there_are_times():
    words = [*WORDS, "model=mlp", "memory_limit=1e-9"]
    draft = check_early(config([*words, "partition=profile"]), "1f1b", 2)
    assert draft.cuts == check_early(config([*WORDS, "model=mlp"]), "1f1b", 2).cuts
    assert (draft.costs, draft.prediction) == (None, None)


def test_what_is_measured_alone_is_a_file_that_a_run_reads(tmp_path):
    """And the random generator is put back."""
    words, file = [*WORDS, model("dropping")], tmp_path / "profile.json"
    cfg = config([*words, "partition=profile"])
    draft = check_early(cfg, "1f1b", 1)

    def make() -> tuple[Network, OptimizerFactory]:
        model = make_model(cfg, 0, torch.float32)
        return network_of(model, draft.example), make_optimizer(cfg, model)

    torch.manual_seed(5)
    before, mesh = torch.get_rng_state(), Mesh(World(), draft.placement, [], CPU, None, 30)
    measured = measure.measure(mesh, draft, profile_conditions(draft.settings, cfg.optim), make)
    assert torch.equal(torch.get_rng_state(), before)
    assert (measured.latency_s, measured.s_per_byte) == (0, 0)
    assert measured.machine.items() >= {"device": "cpu", "ranks": 1, "torch": str(torch.__version__)}.items()
    file.write_text(json.dumps(measured.to_json()))
    read = check_early(config([*words, f"partition.profile={file}"]), "1f1b", 2)
    assert read.prediction is not None
    assert read.prediction.profile == measured
