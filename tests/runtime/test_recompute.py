"""Forwards that are run again: the same weights, statistics and figures to the last bit, and less memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.runtime.recompute import Again
from pipetrain.schedule.actions import Op
from tests.support.cases import SCHEDULES, Case, compare, make_run, run_in_threads

MODES = ("except_last", "always", "selective")
V = {"interleaved_1f1b": 2, "zbv": 2, "v_half": 2, "v_min": 2}  # two stages a rank
BF16 = ("precision=bf16", "dtype=float32", "optim.lr=0.02")


def model(name: str) -> str:
    return f"model._target_=tests.support.{name if '.' in name else f'again.{name}'}"


def recomputed(case: Case) -> int:
    """The number of stages that recompute something."""
    return len({a.stage for actions in make_run(case).plan.window.program for a in actions if a.op is Op.R})


def equal(schedule: str, ranks: int, *words: str, modes: tuple[str, ...] = MODES) -> None:
    """Train with and without recomputing."""
    wanted, figures = run_in_threads(Case(schedule, ranks, ("epochs=1", *words)))
    for mode in modes:
        case = Case(schedule, ranks, ("epochs=1", *words, f"recompute={mode}"))
        assert recomputed(case)
        state, found = run_in_threads(case)
        assert state.keys() == wanted.keys()
        assert [name for name, tensor in wanted.items() if not torch.equal(state[name], tensor)] == [], mode
        for one, other in zip(found, figures, strict=True):
            assert (one.trained, one.evaluated) == (other.trained, other.evaluated)


@pytest.mark.parametrize("schedule", sorted({*SCHEDULES} - {"fbp", "layer_dist"}))
def test_every_schedule_to_the_last_bit(schedule):
    """Dropout inside of skips, and BatchNorm; asynchronous ones over the version of the forward."""
    skips = (model("models.skipping"), "+model.dropout=0.3", "window=null", "microbatches=3")
    equal(schedule, V.get(schedule, 3), *skips)


@pytest.mark.parametrize("mode", MODES)
def test_a_policy_recomputes_what_it_has_decided(mode):
    words = (model("models.with_norm"), "microbatches=3", "epochs=2", f"recompute={mode}")
    case = Case("fbp", 3, words)
    state, figures = run_in_threads(case)
    compare(case, state, figures)
    again = [a.stage for program in figures.ran for actions in program for a in actions if a.op is Op.R]
    batches = make_run(case).settings.epochs * 4
    assert sorted(again) == [stage for stage in (0, 1) for _ in range(3 * batches)]


def test_a_forward_that_its_backward_follows_saves_all():
    assert not recomputed(Case("layer_dist", 3, ("microbatches=3", "recompute=always")))
    case = Case("1f1b", 3, ("microbatches=3", "recompute=always"))
    assert [*make_run(case).plan.recompute] == ["always", "always", "never"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("spectral", ()),
        ("overwritten", ()),
        ("models.recomputing", ()),
        ("models.recomputing_reentrant", ()),
        ("models.tied", ()),
        ("models.with_norm", BF16),
        ("models.with_norm", ("dtype=float32", "memory_format=channels_last")),
        ("attending", ()),
        ("attending", BF16),
        ("models.spoilt", ("model.layer=3", "model.at=4", "model.gradient=false", "on_nan=skip")),
        ("models.spoilt", ("model.layer=3", "model.at=4", "model.gradient=true", "on_nan=skip")),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_every_kind_of_layer(name, words):
    words = tuple(f"+{word}" if word.startswith("model.") else word for word in words)
    for schedule in ("pipedream", "zbv"):
        ranks = V.get(schedule, 3)
        if name == "models.tied" and schedule == "zbv":
            continue  # five layers
        layers = len(make_run(Case(schedule, 1, (model(name), *words, "partition=even"))).plan.layers)
        if layers >= 2 * ranks:
            equal(
                schedule, ranks, model(name), *words, "partition=even", "microbatches=3", modes=MODES[1:]
            )
