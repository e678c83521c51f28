from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import pytest

from pipetrain.schedule import automatic
from pipetrain.schedule.actions import Op, ScheduleError, asks_for, most_open
from pipetrain.schedule.automatic import FIXED, ZeroBubbleAuto
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import lower
from pipetrain.schedule.simulate import simulate
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


@pytest.mark.parametrize("v", [True, False])
def test_no_fixed_rule_is_faster_by_any_of_many_tables_of_costs(v: bool) -> None:
    """The rules that keep to the same limit of memory, of the same placement, simulated at the same costs."""
    draw = Random(14)
    gains = []
    for _ in range(12):
        ranks, m = draw.randint(2, 4), draw.randint(2, 7)
        batches = draw.choice((1, 1, 3))
        cost = random_costs(draw, ranks * (1 + v))
        memory = draw.choice((None, ranks / 2 + 1, 2 * ranks))

        def time(program: list[list], m: int = m, cost: Costs = cost) -> float:  # type: ignore[type-arg]
            return simulate(lower(joined(program)), m, cost=cost).makespan

        mine = ZeroBubbleAuto(memory, v)(ranks, batches, m, costs=cost, buffer_size=2)
        check(lower(mine), batches, m)
        limit = (memory or ranks) * (1 + v)
        assert most_open(mine) <= limit
        rules = [rule(ranks, batches, m) for rule in FIXED[v]]
        rivals = [time(program) for program in rules if most_open(program) <= limit]
        if rivals:
            gains.append(min(rivals) / time(mine))
    assert min(gains) >= 1 - 1e-12
    assert max(gains) > 1.03


@pytest.mark.parametrize(("ranks", "batches", "m"), [(2, 1, 4), (4, 1, 8), (3, 2, 5)])
def test_the_known_optimum_where_all_times_are_equal(ranks: int, batches: int, m: int) -> None:
    """Rank r cannot begin before r forwards, half as long in a V: nothing is lost beyond what the last waits.

    With one stage a rank a batch drains before the next begins, unless twice the memory is given.
    """

    def time(memory: float | None, v: bool, m: int) -> float:
        return simulate(lower(ZeroBubbleAuto(memory, v)(ranks, batches, m)), m).makespan

    assert time(None, True, m) == 6 * m * batches + ranks - 1
    assert time(None, False, m) == batches * (3 * m + ranks - 1)
    assert time(2 * ranks - 1, False, 2 * m) == 6 * m * batches + ranks - 1


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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"memory": "much"}, "memory >= 1 microbatch; got memory=much"),
        ({"v": "maybe"}, "v to be true or false; got maybe"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ScheduleError, match=f"^schedule zb_auto needs {why}$"):
        ZeroBubbleAuto(**options)(2, 1, 4)


def test_a_long_window_goes_on_as_its_first_batches_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "_LARGE", 100)  # works over which orders are compared
    run = simulate(lower(ZeroBubbleAuto()(2, 9, 8)), 8)
    assert run.makespan == 6 * 8 * 9 + 1
