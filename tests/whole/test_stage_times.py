"""What the plan says that each stage's time goes to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipetrain.plan.plan import Plan
from pipetrain.schedule.actions import Op
from pipetrain.schedule.timeline import Costs
from tests.support import plans


def planned(schedule: str, *words: str, batches: int = 1) -> Plan:
    return plans.planned(schedule, 2, 4, batches, "model=mlp", *words)


def predicted(plan):
    return plan.stage_times()


def test_without_costs_shares_of_time_follow_the_work_and_seconds_are_not_known():
    plan = planned("gpipe", "partition=[3]")
    costs = plan.stage_costs
    work = [sum(layer.flops for layer in plan.stage_layers(stage)) for stage in (0, 1)]
    assert costs.seconds[0, Op.F] / costs.seconds[1, Op.F] == pytest.approx(work[0] / work[1])
    assert costs.seconds[1, Op.B] == pytest.approx(2 * costs.seconds[1, Op.F])
    first, second = predicted(plan)
    assert (first.stage_time_s, second.stage_time_s) == (None, None)
    # A flush: all that is no computing is waiting, for a message or for the next window's first.
    for stage in (first, second):
        assert stage.wait == pytest.approx(stage.bubble)
        assert 0 < stage.bubble < 1
    # The first stage has more work here, so it waits less.
    assert work[0] > work[1]
    assert first.bubble < second.bubble


def test_without_costs_w_is_the_work_on_weights_and_all_of_it_at_the_first_stage():
    plan = planned("zb_h1", "partition=[3]")
    costs = plan.stage_costs.seconds
    assert 0.9 < costs[1, Op.W] / costs[1, Op.F] < 1  # what is not products with weights is in I alone
    assert costs[1, Op.I] + costs[1, Op.W] == costs[1, Op.B] == 2 * costs[1, Op.R]
    assert (costs[0, Op.I], costs[0, Op.W]) == (0, costs[0, Op.B])


def test_seconds_are_of_a_batch_and_the_end_of_an_epoch_is_no_wait():
    costs = Costs({(s, op): n for s in (0, 1) for op, n in ((Op.F, 1.0), (Op.B, 2.0))})
    first, second = predicted(replace(planned("pipedream", batches=5), costs=costs))
    makespan = 5 * 12 + 3
    assert (first.stage_time_s, second.stage_time_s) == pytest.approx((12.0, 12.0))
    assert (first.bubble, second.bubble) == pytest.approx((3 / makespan, 3 / makespan))
    assert (first.wait, second.wait) == pytest.approx((3 / makespan, 1 / makespan))  # it ends 2 earlier
