from __future__ import annotations

from itertools import product
from random import Random

import pytest

from pipetrain.schedule import automatic
from pipetrain.schedule.actions import Op, Program, asks_for, most_open
from pipetrain.schedule.automatic import FIXED, ZeroBubbleAuto
from pipetrain.schedule.check import check
from pipetrain.schedule.list_scheduler import WorkTimes
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs.order import v_placement
from pipetrain.schedule.simulate import Cost, simulate, unit_cost
from pipetrain.schedule.timeline import Costs, Kind
from pipetrain.schedule.transforms import joined


def random_costs(draw: Random, stages: int) -> Costs:
    """Return times of unequal stages and messages; a whole backward takes what its halves do."""
    uneven = draw.choice((0.0, 0.2, 0.6))
    seconds: dict[Kind, float] = {}
    shares = [draw.uniform(0.5, 1.5) for _ in range(3)]
    for stage in range(stages):
        size = 1 + draw.uniform(-uneven, uneven)
        f, i, w = (share * size * (1 + draw.uniform(-uneven, uneven) / 3) for share in shares)
        if stage == 0:
            i, w = 0.0, i + w
        seconds |= {(stage, Op.F): f, (stage, Op.I): i, (stage, Op.W): w, (stage, Op.B): i + w}
    travel = draw.choice((0.0, 0.1, 0.5))
    return Costs(seconds | {(s, op): travel for s in range(stages) for op in (Op.SEND_F, Op.SEND_B)})


def time(program: Program, m: int, cost: Cost = unit_cost) -> float:
    return simulate(lower(joined(program)), m, cost=cost).makespan


@pytest.mark.slow
@pytest.mark.parametrize("v", [True, False])
def test_no_fixed_rule_is_faster_by_any_of_many_tables_of_costs(v: bool) -> None:
    """The rules that keep to the same limit of memory, of the same placement, simulated at the same costs."""
    draw = Random(14)
    gains = []
    for _ in range(12):
        ranks, m, batches = draw.randint(2, 4), draw.randint(2, 7), draw.choice((1, 1, 3))
        cost, memory = random_costs(draw, ranks * (1 + v)), draw.choice((None, ranks / 2 + 1, 2 * ranks))
        mine = ZeroBubbleAuto(memory, v)(ranks, batches, m, costs=cost, buffer_size=2)
        check(lower(mine), batches, m)
        limit = (memory or ranks) * (1 + v)
        assert most_open(mine) <= limit
        rules = [rule(ranks, batches, m) for rule in FIXED[v]]
        rivals = [time(program, m, cost) for program in rules if most_open(program) <= limit]
        if rivals:
            gains.append(min(rivals) / time(mine, m, cost))
    assert min(gains) >= 1 - 1e-12
    assert max(gains) > 1.03


@pytest.mark.parametrize(("ranks", "batches", "m"), [(2, 1, 4), (4, 1, 8), (3, 2, 5)])
def test_the_known_optimum_where_all_times_are_equal(ranks: int, batches: int, m: int) -> None:
    """Rank r cannot begin before r forwards, half as long in a V: nothing is lost beyond what the last waits.

    With one stage a rank a batch drains before the next begins, unless twice the memory is given.
    """
    assert time(ZeroBubbleAuto()(ranks, batches, m), m) == 6 * m * batches + ranks - 1
    assert time(ZeroBubbleAuto(v=False)(ranks, batches, m), m) == batches * (3 * m + ranks - 1)
    twice = ZeroBubbleAuto(2 * ranks - 1, v=False)
    assert time(twice(ranks, batches, 2 * m), 2 * m) == 6 * m * batches + ranks - 1


def test_a_long_window_goes_on_as_its_first_batches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "_LARGE", 100)  # works over which orders are compared
    assert time(ZeroBubbleAuto()(2, 9, 8), 8) == 6 * 8 * 9 + 1


def test_it_is_made_again_for_other_costs_and_is_the_same_on_every_rank() -> None:
    slow = Costs({(s, op): 1.0 + s for s in range(6) for op in (Op.F, Op.I, Op.W)})
    schedule = ZeroBubbleAuto()
    assert asks_for(schedule) == {"costs", "buffer_size"}
    made = schedule(3, 1, 6, costs=slow, buffer_size=2)
    assert made == schedule(3, 1, 6, costs=Costs(dict(slow.seconds)), buffer_size=2)
    assert made != schedule(3, 1, 6)


def test_any_memory_from_one_microbatch_on_will_do() -> None:
    for memory, v in product((1, 1.5, 3), (True, False)):
        program = ZeroBubbleAuto(memory, v)(3, 2, 4)
        check(lower(program), 2, 4)
        assert most_open(program) <= memory * (1 + v)
        simulate(lower(program), 4, buffer_size=1)


def test_the_backward_of_stage_0_is_whole_and_messages_on_one_rank_take_no_time() -> None:
    times = WorkTimes.from_cost(Costs({(0, Op.F): 1, (0, Op.B): 3, (1, Op.F): 1, (1, Op.B): 2}), (0, 1))
    assert (times.i, times.w) == ((0.0, 1.0), (3.0, 1.0))
    costs = Costs({(s, op): 1.0 for s in range(4) for op in (Op.SEND_F, Op.SEND_B)})
    times = WorkTimes.from_cost(costs, v_placement(2))
    assert (times.ahead, times.back) == ((1.0, 0.0, 1.0, 0.0), (0.0, 1.0, 0.0, 1.0))
