"""What an update is made of, against one process: parameter groups."""

from __future__ import annotations

import pytest

from tests.support.cases import Case, compare, run_in_threads

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


@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 1), ("1f1b", 3), ("pipedream", 2)])
def test_parameter_groups_are_those_of_the_whole_model(schedule, ranks):
    case = Case(schedule, ranks, (NORM, "partition=even", "epochs=2", "microbatches=3", *GROUPS))
    compare(case, *run_in_threads(case))


@pytest.mark.parametrize(
    ("schedule", "ranks", "more"),
    [("1f1b", 1, ()), ("gpipe", 3, ("optim=adamw", "optim.lr=0.01")), ("pipedream", 2, ("window=2",))],
)
def test_evaluations_are_of_torch_s_moving_average(schedule, ranks, more):
    overrides = (NORM, "partition=even", "epochs=2", "microbatches=3", "ema=0.75", *more)
    case = Case(schedule, ranks, overrides)
    compare(case, *run_in_threads(case))
