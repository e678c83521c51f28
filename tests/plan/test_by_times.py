"""Cuts by measured times: against every way of cutting, under limits, and what is recomputed for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.errors import ConfigError
from pipetrain.plan.by_times import InSchedule, Predictor, balance_times
from pipetrain.plan.profile import LayerTime
from pipetrain.schedule.memory import GIB, Items
from pipetrain.settings import Mode
from tests.support.profiles import Skip, layer, predictor_of, table_of

steady = settings(derandomize=True, deadline=None, max_examples=60)
BYTES = st.integers(0, 20)
LAYER = st.builds(layer, forward_s=BYTES, backward_s=BYTES, step_s=BYTES, output_bytes=BYTES)

# Messages take 1 s and 0.01 s a byte; 4 microbatches.
LAYERS = [
    layer("a", 1, 2, step_s=10, output_bytes=100),
    layer("b", 2, 3, recorded_s=2.5, input_s=3, weight_s=0.25, step_s=20, output_bytes=200),
    layer("c", 4, 5),
]
TABLE = table_of(LAYERS, saved=[7, 8, 20], trained=[0, 0, 1000], inputs=9, latency_s=1, s_per_byte=0.01)


def seconds(made: Predictor, cuts: Sequence[int]) -> list[float]:
    return [stage.batch_s for stage in made.choice(cuts).stages]


def test_a_batch_is_compute_and_messages_of_every_microbatch_and_a_step():
    a_b, b_c = 2 * (1 + 1.0), 2 * (1 + 2.0)  # there and back
    three = predictor_of(TABLE, [0, 1, 2], [3, 2, 1])
    expected = [4 * (3 + a_b) + 10, 4 * (5 + a_b + b_c) + 20, 4 * (9 + b_c)]
    assert seconds(three, [1, 2]) == pytest.approx(expected)
    assert three.choice([1, 2]).slowest_s == pytest.approx(expected[1])
    halved = replace(three, split=True)
    assert seconds(halved, [1, 2])[1] == pytest.approx(4 * (2.5 + 3.25 + a_b + b_c) + 20)


def test_stages_on_one_rank_send_each_other_nothing():
    assert seconds(predictor_of(TABLE, [0, 0], [4, 4]), [1]) == pytest.approx([4 * 3 + 10, 4 * 14 + 20])


def test_skips_count_at_both_ends_alone():
    table = table_of(LAYERS, skips=[Skip(0, (2,), 60)], latency_s=1, s_per_byte=0.01)
    stages = predictor_of(table, [0, 1, 2], [1, 1, 1]).choice([1, 2]).stages
    ends, middle = 2 * (1 + 1.6), 2 * (1 + 1.0) + 2 * (1 + 2.0)
    assert [stage.messages_s for stage in stages[:2]] == pytest.approx([ends, middle])
    assert stages[2].messages_s == pytest.approx(2 * (1 + 2.6))


def test_a_stage_holds_what_the_schedule_has_it_hold():
    three = predictor_of(TABLE, [0, 1, 2], [3, 2, 1])
    # What enters and leaves, and is saved, of each microbatch; weights; a message each way.
    assert [stage.held_bytes for stage in three.choice([1, 2]).stages] == [
        3 * (9 + 7 + 100) + 100,
        2 * (100 + 8 + 200) + 100 + 200,
        1 * (200 + 20) + 2 * 1000 + 200,
    ]


@st.composite
def predictors(draw: st.DrawFn) -> Predictor:
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
    return predictor_of(table, placement, open_ones, microbatches=draw(st.integers(1, 4)))


@steady
@given(predictors(), st.data())
def test_cuts_by_times_are_the_best_of_all_that_may_be(predictor, data):
    inner = range(1, len(predictor.table.layers))
    allowed = data.draw(st.sets(st.sampled_from(inner)) if inner else st.just(set()))
    limit = data.draw(st.one_of(st.just(math.inf), st.integers(0, 400)))
    every = [
        list(cuts)
        for cuts in combinations(sorted(allowed), len(predictor.placement) - 1)
        if predictor.choice(cuts, limit).held_bytes <= limit
    ]
    if every:
        cuts = balance_times(predictor, allowed, limit)
        assert cuts in every
        best = min(predictor.choice(other).slowest_s for other in every)
        assert predictor.choice(cuts).slowest_s == pytest.approx(best)
    else:
        with pytest.raises(ConfigError):
            balance_times(predictor, allowed, limit)


def two_stages(held: Sequence[LayerTime], saved: Sequence[int] = (), s_per_byte: float = 0) -> Predictor:
    return predictor_of(table_of(held, saved, s_per_byte=s_per_byte), [0, 1], [1, 1], microbatches=1)


def test_messages_move_a_cut():
    """1 1 2 by compute alone is cut in the middle; where that sends a lot, before it."""
    held = [layer("small", 1, 0, output_bytes=1), layer("big", 1, 0, output_bytes=100), layer("slow", 2, 0)]
    assert balance_times(two_stages(held), {1, 2}) == [2]
    assert balance_times(two_stages(held, s_per_byte=0.1), {1, 2}) == [1]


def test_a_memory_limit_moves_a_cut_and_says_how_small_it_may_be():
    held = [layer(str(i), seconds, 0) for i, seconds in enumerate([1, 1, 1, 3])]
    eighths = two_stages(held, [n * GIB // 8 for n in (4, 4, 1, 1)])
    for limit, cuts in ((math.inf, [3]), (1.0 * GIB, [2]), (0.75 * GIB, [1])):  # first 9/8 GiB and 1/8
        assert balance_times(eighths, {1, 2, 3}, limit) == cuts
    with pytest.raises(ConfigError) as error:
        balance_times(eighths, {1, 2, 3}, limit=0.7 * GIB)
    assert str(error.value) == (
        "memory_limit=0.7 is too small: the smallest with which 2 stages fit is 0.7500 GiB; "
        "choose that, recompute=auto, more stages or smaller microbatches"
    )


def test_a_stage_recomputes_as_little_as_fits():
    """Saved whole it holds 2 microbatches of 1000 bytes; recomputed, one, and of each what enters."""
    made = predictor_of(table_of([layer("a", 1, 2, output_bytes=10)], [1000], inputs=10), [0], [2])
    again = InSchedule([Items(saved=1, before_r=1)], share=0.5)
    made = replace(made, modes=[{**made.modes[0], Mode.ALWAYS: again}])
    for limit, mode, batch_s in ((math.inf, "never", 4 * 3), (1500, "always", 4 * (3 + 0.5))):
        (stage,) = made.choice([], limit).stages
        assert (stage.mode, stage.batch_s) == (mode, batch_s)
    assert made.choice([], 10).stages[0].mode == "always"  # which holds the least


@pytest.mark.parametrize("limit", [math.inf, 1.0])
def test_where_no_cut_may_be_that_is_said(limit):
    with pytest.raises(ConfigError) as error:
        balance_times(predictor_of(table_of([layer()] * 4), [0, 1, 2], [1, 1, 1]), {2}, limit)
    assert "partition=profile cannot cut this model into 3 stages: only 1 of its 3 cuts part no" in str(
        error.value
    )
