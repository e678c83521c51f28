from __future__ import annotations

import pytest

from pipetrain.schedule.actions import Op, most_open
from pipetrain.schedule.check import check
from pipetrain.schedule.greedy import Preference, WorkTimes, listed
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import zb_h1
from pipetrain.schedule.programs.order import newest, v_placement, versioned
from pipetrain.schedule.simulate import simulate, unit_cost
from pipetrain.schedule.timeline import Costs

FORWARD_FIRST = Preference(((Op.F, 1), (Op.I, 0), (Op.F, 0), (Op.I, 1)))


def test_as_deep_as_1f1b_it_takes_zb_h1s_time_and_memory() -> None:
    times = WorkTimes.of(unit_cost, range(4))
    orders, makespan = listed(range(4), 1, 8, times, 4, Preference(((Op.F, 0), (Op.I, 0)), depth=1.5))
    program = [versioned(order, 8, newest) for order in orders]
    assert (
        makespan == simulate(lower(program), 8).makespan == simulate(lower(zb_h1(4, 1, 8)), 8).makespan == 27
    )
    assert most_open(program) == 4


@pytest.mark.parametrize("limit", [2, 3, 5, 8])
@pytest.mark.parametrize("depth", [None, 1.0])
def test_a_v_ends_with_any_memory_for_two_stages(limit: int, depth: float | None) -> None:
    where = v_placement(4)
    rule = Preference(FORWARD_FIRST.order, 0.5, depth)
    orders, _ = listed(where, 2, 5, WorkTimes.of(unit_cost, where), limit, rule)
    program = [versioned(order, 5, newest) for order in orders]
    check(lower(program), 2, 5)
    assert most_open(program) <= limit


def test_the_backward_of_stage_0_is_whole_and_costs_what_was_measured_of_it() -> None:
    times = WorkTimes.of(Costs({(0, Op.F): 1, (0, Op.B): 3, (1, Op.F): 1, (1, Op.B): 2}), (0, 1))
    assert (times.i, times.w) == ((0.0, 1.0), (3.0, 1.0))
    orders, _ = listed((0, 1), 1, 3, times, 2, Preference(((Op.F, 0), (Op.I, 0))))
    kinds = [(op, mb) for op, _, mb in orders[0]]
    assert all(kinds[kinds.index((Op.I, mb)) + 1] == (Op.W, mb) for mb in range(3))


def test_messages_on_one_rank_take_no_time() -> None:
    costs = Costs({(s, op): 1.0 for s in range(4) for op in (Op.SEND_F, Op.SEND_B)})
    times = WorkTimes.of(costs, v_placement(2))
    assert (times.ahead, times.back) == ((1.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0))
