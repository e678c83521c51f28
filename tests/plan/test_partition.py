"""Cuts: against every way of cutting, under limits, and every way of asking for what cannot be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.config.settings import STRATEGIES, Mode
from pipetrain.errors import ConfigError
from pipetrain.model.specs import TensorSpec, ValueSpec
from pipetrain.plan.cost_estimate import Layer
from pipetrain.plan.partition import Prices, StageWork, balance, balance_times, best_cuts, choose_cuts
from pipetrain.schedule.actions import Op, Placement
from pipetrain.schedule.memory import GIB, Items
from tests.support.plans import Skip, layer, prices_of, table_of
from tests.support.refusals import refusal

steady = settings(derandomize=True, deadline=None, max_examples=60)
OUT = ValueSpec((TensorSpec((1, 10), torch.float32),))


def layers(params: Sequence[int], flops: Sequence[int]) -> list[Layer]:
    return [Layer(f"l{i}", p, f, OUT) for i, (p, f) in enumerate(zip(params, flops, strict=True))]


def alone(stages: int) -> Placement:
    return [(stage,) for stage in range(stages)]


FOUR = layers(params=[9, 1, 1, 1], flops=[1, 1, 1, 9])


def loads(weights: Sequence[float], cuts: Sequence[int]) -> list[float]:
    return [sum(weights[a:b]) for a, b in pairwise([0, *cuts, len(weights)])]


def size(weights: Sequence[float], cuts: Sequence[int], where: Sequence[int]) -> float:
    """The largest rank and the largest stage together."""
    held = dict.fromkeys(where, 0.0)
    for rank, weight in zip(where, loads(weights, cuts), strict=True):
        held[rank] += weight
    return max(held.values()) + max(loads(weights, cuts))


@steady
@given(st.lists(st.floats(0, 50), min_size=1, max_size=10), st.integers(1, 3), st.booleans(), st.data())
def test_balance_is_the_best_of_all_cuts_or_near_it_where_ranks_have_several_stages(weights, ranks, v, data):
    stages = data.draw(st.integers(1, len(weights)))
    every = [list(cut) for cut in combinations(range(1, len(weights)), stages - 1)]
    apart = balance(weights, alone(stages))
    assert apart in every  # rising, inside the model, no stage empty
    assert max(loads(weights, apart)) == pytest.approx(min(max(loads(weights, cut)) for cut in every))
    until = [0.0, *accumulate(weights)]
    assert apart == best_cuts(len(weights), stages, lambda stage, a, b: until[b] - until[a])[0]
    if len(weights) >= 2 * ranks > 2:
        where = [*range(ranks), *(reversed(range(ranks)) if v else range(ranks))]
        found = size(weights, balance(weights, [(rank,) for rank in where]), where)
        least = min(size(weights, cut, where) for cut in combinations(range(1, len(weights)), len(where) - 1))
        assert found <= size(weights, balance(weights, alone(len(where))), where) + 1e-12
        assert found <= 1.15 * least + 1e-12


class Counted(float):
    """A number that counts how often sums of layers are taken from it."""

    taken = 0

    def __radd__(self, other: float) -> Counted:
        return Counted(float(self) + other)

    __add__ = __radd__

    def __sub__(self, other: float) -> float:
        Counted.taken += 1
        return float(self) - float(other)


@pytest.mark.parametrize(
    ("where", "most"),
    [(alone(100), 4 * 100 * 200), ([*alone(10), *reversed(alone(10))], 181 * 4 * (2 * 10 * 200))],
)
def test_cuts_of_many_stages_take_stages_times_layers_steps_and_a_move_those_of_two_stages(where, most):
    Counted.taken = 0
    balance([Counted(1 + n % 7) for n in range(200)], where)
    assert 0 < Counted.taken < most


@steady
@given(st.integers(1, 60), st.data())
def test_even_stages_differ_by_one_layer_at_most(n, data):
    stages = data.draw(st.integers(1, n))
    sizes = loads([1] * n, choose_cuts("even", layers([0] * n, [0] * n), alone(stages)))
    assert (len(sizes), min(sizes) >= 1, max(sizes) - min(sizes) <= 1) == (stages, True, True)


def test_strategies_weigh_different_things_and_what_cannot_be_is_refused():
    cuts = {"params": [1], "flops": [3], "even": [2]}
    assert {strategy: choose_cuts(strategy, FOUR, alone(2)) for strategy in STRATEGIES} == cuts
    for partition, stages, says in (
        ("flops", 5, "stages=5 needs at least as many layers, but the model has 4: 0 l0, 1 l1, 2 l2, 3 l3"),
        ([1, 2], 2, "partition=[1, 2] does not cut the model into 2 stages: give 1 rising numbers from 1 to"),
        ([0], 2, "their first layers, out of: 0 l0, 1 l1, 2 l2, 3 l3"),
        ([4], 2, "partition=[4] does not cut"),
        ([2], 1, "partition=[2] is of 2 stages, and there is one process: start the program by torchrun --n"),
        ([2, 2], 3, "partition=[2, 2] does not cut"),
    ):
        assert says in refusal(lambda: choose_cuts(partition, FOUR, alone(stages)))  # noqa: B023


# By measured times

BYTES = st.integers(0, 20)
LAYER = st.builds(layer, forward_s=BYTES, backward_s=BYTES, step_s=BYTES, output_bytes=BYTES)

# Messages take 1 s and 0.01 s a byte; 4 microbatches.
LAYERS = [
    layer("a", 1, 2, step_s=10, output_bytes=100),
    layer("b", 2, 3, recorded_s=2.5, input_s=3, weight_s=0.25, step_s=20, output_bytes=200),
    layer("c", 4, 5),
]
PRICED = {"latency_s": 1, "s_per_byte": 0.01}
TABLE = table_of(LAYERS, saved=[7, 8, 20], trained=[0, 0, 1000], inputs=9, **PRICED)


def seconds(made: Prices, cuts: Sequence[int]) -> list[float]:
    return [stage.batch_s for stage in made.choice(cuts).stages]


def test_a_batch_is_compute_and_messages_of_every_microbatch_and_a_step():
    a_b, b_c = 2 * (1 + 1.0), 2 * (1 + 2.0)  # there and back
    three = prices_of(TABLE, [0, 1, 2], [3, 2, 1])
    expected = [4 * (3 + a_b) + 10, 4 * (5 + a_b + b_c) + 20, 4 * (9 + b_c)]
    assert seconds(three, [1, 2]) == pytest.approx(expected)
    halved = prices_of(TABLE, [0, 1, 2], [3, 2, 1], split=True)
    assert seconds(halved, [1, 2])[1] == pytest.approx(4 * (2.5 + 3.25 + a_b + b_c) + 20)
    # Stages on one rank send each other nothing, and a skip counts at both its ends alone.
    assert seconds(prices_of(TABLE, [0, 0], [4, 4]), [1]) == pytest.approx([4 * 3 + 10, 4 * 14 + 20])
    skipping = prices_of(table_of(LAYERS, skips=[Skip(0, (2,), 60)], **PRICED), [0, 1, 2], [1, 1, 1])
    expected = [4 * (3 + 2 * (1 + 1.6)) + 10, expected[1], 4 * (9 + 2 * (1 + 2.6))]
    assert seconds(skipping, [1, 2]) == pytest.approx(expected)


def test_a_stage_holds_what_the_schedule_has_it_hold():
    three = prices_of(TABLE, [0, 1, 2], [3, 2, 1])
    # What enters and leaves, and is saved, of each microbatch; weights; a message each way.
    assert [stage.held_bytes for stage in three.choice([1, 2]).stages] == [
        3 * (9 + 7 + 100) + 100,
        2 * (100 + 8 + 200) + 100 + 200,
        1 * (200 + 20) + 2 * 1000 + 200,
    ]


@st.composite
def every_price(draw: st.DrawFn) -> Prices:
    """Any profile of few layers under any pipeline, interleaved ones too, with skips."""
    held = draw(st.lists(LAYER, min_size=1, max_size=7))
    stages = draw(st.integers(1, len(held)))
    ranks = draw(st.integers(1, stages))
    pairs = st.lists(st.integers(-1, len(held) - 1), min_size=2, max_size=4, unique=True).map(sorted)
    skips = [
        Skip(maker, tuple(users), draw(BYTES), draw(st.booleans())) for maker, *users in draw(st.lists(pairs))
    ]
    each = st.lists(BYTES, min_size=len(held), max_size=len(held))
    priced = {"latency_s": draw(BYTES), "s_per_byte": draw(BYTES)}
    table = table_of(held, draw(each), draw(each), draw(BYTES), skips, **priced)
    open_ones = draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    placement = [stage % ranks for stage in range(stages)]
    return prices_of(table, placement, open_ones, microbatches=draw(st.integers(1, 4)))


@steady
@given(every_price(), st.data())
def test_cuts_by_times_are_the_best_of_all_that_may_be(prices, data):
    inner = range(1, len(prices.table.layers))
    allowed = data.draw(st.sets(st.sampled_from(inner)) if inner else st.just(set()))
    limit = data.draw(st.one_of(st.just(math.inf), st.integers(0, 400)))
    every = [
        list(cuts)
        for cuts in combinations(sorted(allowed), len(prices.stages) - 1)
        if prices.choice(cuts, limit).held_bytes <= limit
    ]
    if every:
        cuts = balance_times(prices, allowed, limit)
        assert cuts in every
        best = min(prices.choice(other).slowest_s for other in every)
        assert prices.choice(cuts).slowest_s == pytest.approx(best)
    else:
        with pytest.raises(ConfigError):
            balance_times(prices, allowed, limit)


def test_a_memory_limit_moves_a_cut_and_says_how_small_it_may_be():
    held = [layer(str(i), seconds, 0) for i, seconds in enumerate([1, 1, 1, 3])]
    table = table_of(held, [n * GIB // 8 for n in (4, 4, 1, 1)])
    eighths = prices_of(table, [0, 1], [1, 1], microbatches=1)
    for limit, cuts in ((math.inf, [3]), (1.0 * GIB, [2]), (0.75 * GIB, [1])):  # first 9/8 GiB and 1/8
        assert balance_times(eighths, {1, 2, 3}, limit) == cuts
    said = refusal(lambda: balance_times(eighths, {1, 2, 3}, limit=0.7 * GIB))
    assert "memory_limit=0.7 is too small: the smallest with which 2 stages fit is 0.7500 GiB; choose" in said
    said = refusal(lambda: balance_times(prices_of(table, [0, 1, 2], [1, 1, 1]), {2}, GIB))
    assert "partition=profile cannot cut this model into 3 stages: only 1 of its 3 cuts part no" in said


def test_a_stage_recomputes_as_little_as_fits():
    """Saved whole it holds 2 microbatches of 1000 bytes; recomputed, one, and of each what enters."""
    made = prices_of(table_of([layer("a", 1, 2, output_bytes=10)], [1000], inputs=10), [0], [2])
    again = StageWork({Op.F: 4, Op.R: 2, Op.B: 4}, [Items(saved=1, before_r=1)])
    made = replace(made, stages=[{**made.stages[0], Mode.ALWAYS: again}])
    for limit, mode, batch_s in ((math.inf, "never", 4 * 3), (1500, "always", 4 * (3 + 0.5))):
        (stage,) = made.choice([], limit).stages
        assert (stage.mode, stage.batch_s) == (mode, batch_s)
    assert made.choice([], 10).stages[0].mode == "always"  # which holds the least
