"""Orders made for the costs of the stages, against the reference, in one process over the local channel."""

from __future__ import annotations

import pytest

from pipetrain.errors import ConfigError
from pipetrain.plan.plan import with_costs
from pipetrain.schedule.actions import Op
from pipetrain.schedule.timeline import Costs
from tests.support.cases import Case, compare, make_run, run_in_threads

pytestmark = pytest.mark.slow

NORM = "model._target_=tests.support.models.with_norm"
PLAIN = "model._target_=tests.support.models.without_norm"
UNEVEN = {2: "partition=[1,4,8]", 3: "partition=[1,2,4,6,9]"}


@pytest.mark.parametrize(
    ("schedule", "ranks", "words"),
    [
        ("v_async", 3, (NORM, "microbatches=1", "window=null")),
        ("v_async", 2, (PLAIN, "microbatches=2", "window=3", "optim=adamw", "clip_grad_norm=0.25")),
        ("v_async", 3, (NORM, "microbatches=1", "schedule.like=v_half", "buffer_size=1")),
        ("zb_auto", 3, (NORM, "microbatches=3", "window=2", "schedule.memory=1.5", "clip_grad_norm=0.25")),
        ("zb_auto", 2, (PLAIN, "microbatches=4", "schedule.v=false", "optim=adamw", "buffer_size=1")),
    ],
)
def test_uneven_stages_equal_the_reference(schedule, ranks, words):
    cut = "partition=even" if "schedule.v=false" in words else UNEVEN[ranks]
    case = Case(schedule, ranks, (*words, cut, "epochs=2"))
    compare(case, *run_in_threads(case))


def test_the_order_is_made_for_the_stages_that_the_plan_has_cut_and_again_for_measured_times():
    even, uneven = (
        make_run(Case("v_async", 3, (NORM, f"partition={cut}"))).plan for cut in ("even", "[1,2,4,6,9]")
    )
    assert even.by_costs
    assert even.window.program != uneven.window.program
    slow = Costs({(s, op): 1 + (op is Op.I) for s in range(6) for op in (Op.F, Op.I, Op.W)})
    again = with_costs(uneven, slow)
    assert again.costs == slow
    assert again.window.program != uneven.window.program
    assert again.placement == uneven.placement
    fixed = make_run(Case("zbv", 3, (NORM, "partition=even"))).plan
    assert with_costs(fixed, slow).window is fixed.window


def test_updates_of_v_async_cannot_wait_for_all_stages():
    words = (NORM, "partition=even", "clip_grad_norm=1", "clip_grad_norm_over=model", "microbatches=1")
    with pytest.raises(
        ConfigError, match=r"cannot wait for the norm of the model: set clip_grad_norm_over=stage,"
    ):
        make_run(Case("v_async", 3, words))
