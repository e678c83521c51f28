"""What a plan says of ranks and stages, with replicas and without."""

from __future__ import annotations

import pytest

from tests.support.plans import planned


def test_a_plan_without_replicas_has_a_rank_a_stage_and_sums_nothing() -> None:
    plan = planned("1f1b", 2, 4, 1, "model=mlp")
    assert (plan.placement, plan.firsts, plan.ties, plan.replicated) == ([(0,), (1,)], [0, 1], [], False)
    assert plan.links == [((0, 1), (0, 1)), ((1, 0), (1, 0))]
    assert plan.pipeline.keys() == {"cuts", "placement", "recompute"}
    assert plan.layers_on(0) + plan.layers_on(1) == list(range(len(plan.layers)))


@pytest.mark.parametrize("microbatches", [4, 5])
def test_a_plan_with_replicas_has_links_between_all_that_exchange_microbatches(microbatches: int) -> None:
    plan = planned("1f1b", 2, microbatches, 1, "model=mlp", "replicas=[2,1]")
    assert (plan.placement, plan.firsts, plan.ties) == ([(0, 1), (2,)], [0, 2], [(0,)])
    assert plan.links == [((0, 1), (0, 2)), ((0, 1), (1, 2)), ((1, 0), (2, 0)), ((1, 0), (2, 1))]
    assert plan.layers_on(0) == plan.layers_on(1)
    assert plan.pipeline["ranks"] == [0, 1, 2]
    home = plan.window.home
    assert [home(0, mb) for mb in range(microbatches)] == [0, 1, 0, 1, 0][:microbatches]
    assert {home(1, mb) for mb in range(microbatches)} == {2}
