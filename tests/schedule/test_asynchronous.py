from __future__ import annotations

from functools import partial
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import Op, Program, most_open, shortened
from pipetrain.schedule.asynchronous import AsynchronousV
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import pipedream
from pipetrain.schedule.simulate import Cost, simulate
from pipetrain.schedule.timeline import Costs, Timeline


def costs(f: float, i: float, w: float) -> Cost:
    of = {Op.F: f, Op.I: i, Op.W: w, Op.B: i + w}
    return lambda action: of.get(action.op, 0.0)


def played(program: Program, cost: Cost) -> Timeline:
    return simulate(lower(program), 1, cost=cost)


def period(schedule: AsynchronousV, ranks: int, cost: Cost) -> float:
    """Return the time between microbatches once the pipeline is full."""
    lengths = [played(schedule(ranks, n, 1, costs=cost), cost).makespan for n in (16, 32)]
    return (lengths[1] - lengths[0]) / 16


def test_less_stale_and_less_held_than_pipedream_at_its_speed() -> None:
    """A stage of pipedream is two of the V's."""
    mine = played(AsynchronousV()(4, 128, 1), costs(1, 1, 1))
    other = played(pipedream(4, 128, 1), costs(2, 2, 2))
    assert (round(mine.bubble, 4), round(other.bubble, 4)) == (0.0141, 0.0229)
    for held, wanted, of_other in (("staleness", 1.5, 3), ("versions", 2.5, 4), ("activations", 2.5, 4)):
        by_stage = getattr(mine, held)
        assert max(map(sum, zip(by_stage, reversed(by_stage), strict=True))) / 2 == wanted
        assert max(getattr(other, held)) == of_other


@pytest.mark.parametrize(("i", "w"), [(0.8, 1.2), (1.5, 0.7)])
def test_no_rank_waits_once_it_is_full_whatever_i_and_w_take(i: float, w: float) -> None:
    """The order of V-Min would wait where I takes longer than F."""
    cost = costs(1, i, w)
    assert period(AsynchronousV(), 4, cost) == pytest.approx(2 * (1 + i + w), rel=0.01)
    assert (period(AsynchronousV("v_min"), 4, cost) > 2.2 * (1 + i + w)) == (i > 1)


def test_unequal_stages_and_messages_cost_only_what_the_busiest_rank_takes() -> None:
    draw = Random(0)
    for _ in range(3):
        table = {(s, op): draw.uniform(0.5, 1.5) for s in range(6) for op in (Op.F, Op.I, Op.W)}
        table |= {(s, op): draw.uniform(0, 0.5) for s in range(6) for op in (Op.SEND_F, Op.SEND_B)}
        busy = max(sum(table[s, op] for s in (r, 5 - r) for op in (Op.F, Op.I, Op.W)) for r in range(3))
        assert period(AsynchronousV(), 3, Costs(table)) == pytest.approx(busy, rel=0.01)  # type: ignore[arg-type]


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    size=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3)),
    kept=st.integers(1, 6),
    i=st.sampled_from([0.7, 1.0, 1.3]),
)
def test_a_window_may_end_early_and_one_of_another_length_reads_the_same_weights(size, kept, i) -> None:
    ranks, batches, m = size
    kept = min(kept, batches)
    schedule = partial(AsynchronousV(), costs=costs(1, i, 1))
    program = schedule(*size)
    cut = [shortened(actions, kept, m) for actions in lower(program)]
    check(cut, kept, m)
    simulate(cut, m, buffer_size=1)
    forwards = [[a for a in actions if a.op is Op.F] for actions in schedule(ranks, kept, m)]
    assert forwards == [[a for a in actions if a.op is Op.F and a.mb < kept * m] for actions in program]


def test_a_multiple_of_three_ranks_is_about_as_deep() -> None:
    """There the way back meets the way there, and some works wait: bounds in the place of formulas."""
    for batches, m in product((1, 5), (1, 4)):
        run = simulate(lower(AsynchronousV()(6, batches, m)), m, buffer_size=1)
        for stage, (held, late) in enumerate(zip(run.activations, run.staleness, strict=True)):
            behind = 11 - stage
            assert min((behind + 1) // 3, batches * m) <= held <= behind // 3 + 2
            assert late <= -(-(behind // 3 + 1) // m)


def test_memory_bounds_what_a_rank_holds() -> None:
    cost = costs(1, 1.2, 0.8)
    free, bounded = (AsynchronousV(memory=memory)(4, 32, 1, costs=cost) for memory in (None, 2.5))
    assert (most_open(free) / 2, most_open(bounded) / 2) == (3.0, 2.0)
    assert played(bounded, cost).makespan > played(free, cost).makespan
