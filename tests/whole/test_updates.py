"""What an update is made of, against one process: parameter groups, moving average, clipping."""

from __future__ import annotations

import pytest
import torch

from pipetrain.schedule.actions import has_norms
from tests.support.cases import Case, compare, make_run, run_in_threads
from tests.support.refusals import refusal

pytestmark = pytest.mark.slow

NORM = "model._target_=tests.support.models.with_norm"
GROUPS = (
    "optim=adamw",
    "optim.lr=0.01",
    "optim.weight_decay=0.3",
    "optim.groups.late.params='^[89]'",
    "optim.groups.late.lr=0.02",
    "optim.groups.norms_and_biases.weight_decay=0",
)


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 3), ("pipedream", 2)])
def test_parameter_groups_are_those_of_the_whole_model(schedule, ranks):
    case = Case(schedule, ranks, (NORM, "partition=even", "epochs=2", "microbatches=3", *GROUPS))
    compare(case, *run_in_threads(case))


@pytest.mark.parametrize(
    ("schedule", "ranks", "more"),
    [("gpipe", 3, ("optim=adamw", "optim.lr=0.01")), ("pipedream", 2, ("window=2",))],
)
def test_evaluations_are_of_torch_s_moving_average(schedule, ranks, more):
    overrides = (NORM, "partition=even", "epochs=2", "microbatches=3", "ema=0.75", *more)
    case = Case(schedule, ranks, overrides)
    compare(case, *run_in_threads(case))


# Clipping: over the model where the pipeline is flushed, over each stage otherwise


def clipped(schedule: str, ranks: int, *more: str, norms: bool) -> None:
    """Train with a clip that binds, and hold it against torch.nn.utils.clip_grad_norm_."""
    case = Case(schedule, ranks, (NORM, "partition=even", "epochs=2", "clip_grad_norm=0.25", *more))
    assert has_norms(make_run(case).plan.window.program) == norms
    state, figures = run_in_threads(case)
    compare(case, state, figures)
    free, _ = run_in_threads(Case(schedule, ranks, (NORM, "partition=even", "epochs=2", *more)))
    assert not all(torch.allclose(free[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("schedule", "ranks", "more"),
    [
        ("gpipe", 3, ("microbatches=3", "window=2")),
        ("1f1b", 2, ("microbatches=3", "optim.groups.norms_and_biases.weight_decay=0")),
        ("interleaved_1f1b", 2, ("microbatches=4", "window=3")),
    ],
)
def test_a_flush_schedule_clips_by_the_norm_of_the_model(schedule, ranks, more):
    clipped(schedule, ranks, *more, norms=True)


@pytest.mark.parametrize("schedule", ["pipedream_2bw", "fbp"])
def test_an_asynchronous_schedule_clips_each_stage_by_its_own_norm(schedule):
    clipped(schedule, 2, "microbatches=3", norms=False)


def test_an_asynchronous_schedule_may_clip_by_the_norm_of_the_model():
    clipped("pipedream", 3, "microbatches=3", "clip_grad_norm_over=model", norms=True)


def test_a_flush_schedule_may_clip_each_stage_by_its_own_norm():
    clipped("1f1b", 3, "microbatches=3", "clip_grad_norm_over=stage", norms=False)


def test_a_policy_cannot_clip_by_the_norm_of_the_model():
    words = ("microbatches=3", "clip_grad_norm=1", "clip_grad_norm_over=model")
    assert refusal(lambda: make_run(Case("fbp", 2, words))) == (
        "clip_grad_norm_over=model needs a schedule with a fixed order, and fbp decides its order while it "
        "runs: choose clip_grad_norm_over=stage, or another schedule"
    )
