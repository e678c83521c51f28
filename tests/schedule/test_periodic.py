from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from pipetrain.schedule.actions import Op
from pipetrain.schedule.check import check
from pipetrain.schedule.list_scheduler import WorkTimes
from pipetrain.schedule.lower import lower
from pipetrain.schedule.periodic import offsets
from pipetrain.schedule.programs.order import newest, v_placement, versioned
from pipetrain.schedule.simulate import unit_cost
from pipetrain.schedule.timeline import Costs, Kind

NEAR = 1e-4  # periods, for times are rounded


def random_times(seed: int, ranks: int) -> WorkTimes:
    draw = Random(seed)
    seconds: dict[Kind, float] = {
        (s, op): draw.uniform(0.5, 1.5) for s in range(2 * ranks) for op in (Op.F, Op.I, Op.W)
    }
    seconds |= {(s, op): draw.uniform(0, 1) for s in range(2 * ranks) for op in (Op.SEND_F, Op.SEND_B)}
    return WorkTimes.from_cost(Costs(seconds), v_placement(ranks))


@pytest.mark.parametrize("ranks", range(1, 5))
@pytest.mark.parametrize("hop", [0.0, 0.25])
def test_no_two_works_of_a_rank_overlap_and_none_comes_before_its_input(ranks: int, hop: float) -> None:
    where, times = v_placement(ranks), random_times(ranks, ranks)
    found, period = offsets(where, times, hop), max(times.busy(where))
    start = {node: at / found.period for node, at in found.start.items()}
    of = {Op.F: times.f, Op.I: times.i, Op.W: times.w}
    took = {(op, stage): of[op][stage] / period for op, stage in start}
    for rank in range(ranks):
        mine = sorted((at % 1, took[node]) for node, at in start.items() if where[node[1]] == rank)
        for (at, length), (following, _) in pairwise([*mine, (mine[0][0] + 1, 0.0)]):
            assert at + length <= following + NEAR
    for s in range(2 * ranks):
        back = start[Op.I, s] + took[Op.I, s]
        assert start[Op.I, s] >= start[Op.F, s] + took[Op.F, s] - NEAR
        assert start[Op.W, s] >= back - NEAR
        if s:
            hops = hop if where[s] != where[s - 1] else 0
            travels = max(took[Op.F, s - 1] + times.ahead[s - 1] / period, hops)
            assert start[Op.F, s] >= start[Op.F, s - 1] + travels - NEAR
            assert start[Op.I, s - 1] >= back + times.back[s] / period - NEAR


def test_equal_times_give_the_offsets_of_v_min() -> None:
    """Qi et al. 2024: in slots, F_a at r, F_b at 2S-1-r, I_b at 2S+r, and I_a, but of stage 0, at 4S-1-r."""
    for ranks in (2, 4, 5):
        found = offsets(v_placement(ranks), WorkTimes.from_cost(unit_cost, v_placement(ranks)))
        for r in range(ranks):
            b = 2 * ranks - 1 - r
            wanted = {(Op.F, r): r, (Op.F, b): b, (Op.I, b): 2 * ranks + r}
            wanted |= {(Op.I, r): 4 * ranks - 1 - r} if r else {}
            slots = {node: 6 * found.start[node] / found.period for node in wanted}
            assert slots == pytest.approx(wanted, abs=1e-3)


def test_stages_without_weights_have_works_of_no_length() -> None:
    """Such as an activation alone in a stage: its W takes no time, and may begin inside of another work."""
    seconds: dict[Kind, float] = {}
    for s, size in enumerate((0.0, 1.0, 1e-9, 1.0, 1e-3, 1.0, 0.0, 1.0)):
        seconds |= {(s, Op.F): size, (s, Op.I): 1.1 * size, (s, Op.W): s % 2}
    times = WorkTimes.from_cost(Costs(seconds), v_placement(4))
    for hop in (0.0, 0.125, 0.25):
        orders = offsets(v_placement(4), times, hop).orders(v_placement(4), 5)
        check(lower([versioned(order, 1, newest) for order in orders]), 5, 1)
