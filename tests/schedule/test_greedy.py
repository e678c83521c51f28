from __future__ import annotations

from pipetrain.schedule.actions import Op, most_open
from pipetrain.schedule.greedy import Preference, WorkTimes, listed
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs.order import newest, v_placement, versioned
from pipetrain.schedule.simulate import simulate, unit_cost
from pipetrain.schedule.timeline import Costs


def test_as_deep_as_1f1b_it_takes_zb_h1s_time_and_memory() -> None:
    times = WorkTimes.of(unit_cost, range(4))
    orders, makespan = listed(range(4), 1, 8, times, 4, Preference(((Op.F, 0), (Op.I, 0)), depth=1.5))
    program = [versioned(order, 8, newest) for order in orders]
    assert makespan == simulate(lower(program), 8).makespan == 27
    assert most_open(program) == 4


def test_the_backward_of_stage_0_is_whole_and_messages_on_one_rank_take_no_time() -> None:
    times = WorkTimes.of(Costs({(0, Op.F): 1, (0, Op.B): 3, (1, Op.F): 1, (1, Op.B): 2}), (0, 1))
    assert (times.i, times.w) == ((0.0, 1.0), (3.0, 1.0))
    costs = Costs({(s, op): 1.0 for s in range(4) for op in (Op.SEND_F, Op.SEND_B)})
    times = WorkTimes.of(costs, v_placement(2))
    assert (times.ahead, times.back) == ((1.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0))
