"""Cuts: against every way of cutting, and every way of asking for what cannot be."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.boundary import Boundary, TensorSpec
from pipetrain.errors import ConfigError
from pipetrain.partition.balance import STRATEGIES, balance, choose_cuts
from pipetrain.partition.estimate import Layer

steady = settings(derandomize=True, deadline=None)
OUT = Boundary((TensorSpec((1, 10), torch.float32),))


def layers(params: list[int], flops: list[int]) -> list[Layer]:
    return [
        Layer(f"l{i}", p, f, OUT, False, False) for i, (p, f) in enumerate(zip(params, flops, strict=True))
    ]


FOUR = layers(params=[9, 1, 1, 1], flops=[1, 1, 1, 9])
ALL_FOUR = "0 l0, 1 l1, 2 l2, 3 l3"
ONE_OF_FOUR = f"give 1 first layers out of: {ALL_FOUR}"
RISING = f"give 1 rising numbers from 1 to 3 out of: {ALL_FOUR}"


def loads(weights: list[int], cuts: list[int]) -> list[int]:
    return [sum(weights[a:b]) for a, b in pairwise([0, *cuts, len(weights)])]


def test_balance_can_be_seen():
    assert balance([1, 1, 1, 9], 2) == [3]
    assert balance([9, 1, 1, 1], 2) == [1]
    assert balance([2, 3, 4, 5, 6, 7], 3) == [3, 5]  # 2 3 4 | 5 6 | 7: nothing is below 11
    assert balance([4, 4, 4, 4], 4) == [1, 2, 3]
    assert balance([5], 1) == []


@steady
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_balance_is_the_best_of_all_cuts(weights, data):
    stages = data.draw(st.integers(1, len(weights)))
    cuts = balance(weights, stages)
    every = [list(cut) for cut in combinations(range(1, len(weights)), stages - 1)]
    assert cuts in every  # rising, inside the model, no stage empty
    assert max(loads(weights, cuts)) == min(max(loads(weights, cut)) for cut in every)


@steady
@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.data())
def test_layers_of_no_weight_still_give_every_stage_one(weights, data):
    weights = [0] * len(weights)
    stages = data.draw(st.integers(1, len(weights)))
    sizes = loads([1] * len(weights), balance(weights, stages))
    assert len(sizes) == stages
    assert min(sizes) >= 1


def test_strategies_weigh_different_things():
    assert choose_cuts("params", FOUR, 2) == [1]
    assert choose_cuts("flops", FOUR, 2) == [3]
    assert choose_cuts("even", FOUR, 2) == [2]
    assert {choose_cuts(strategy, FOUR, 1) == [] for strategy in STRATEGIES} == {True}


@steady
@given(st.integers(1, 60), st.data())
def test_even_stages_differ_by_one_layer_at_most(n, data):
    stages = data.draw(st.integers(1, n))
    sizes = loads([1] * n, choose_cuts("even", layers([0] * n, [0] * n), stages))
    assert len(sizes) == stages
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


def test_given_cuts_are_taken_as_they_are():
    assert choose_cuts([1, 3], FOUR, 3) == [1, 3]
    assert choose_cuts((2,), FOUR, 2) == [2]
    assert choose_cuts([], FOUR, 1) == []


@pytest.mark.parametrize(
    ("partition", "stages", "says"),
    [
        ("flops", 5, f"stages=5 needs at least as many layers, but the model has 4: {ALL_FOUR}"),
        ([1, 2, 3, 4], 5, f"stages=5 needs at least as many layers, but the model has 4: {ALL_FOUR}"),
        ([1, 2], 2, f"partition=[1, 2] cuts the model into 3 stages, but there are 2; {ONE_OF_FOUR}"),
        ([], 2, f"partition=[] cuts the model into 1 stages, but there are 2; {ONE_OF_FOUR}"),
        ([0], 2, f"partition=[0] leaves a stage without layers; {RISING}"),
        ([4], 2, f"partition=[4] leaves a stage without layers; {RISING}"),
        ([9], 2, f"out of: {ALL_FOUR}"),
        ([-1], 2, f"out of: {ALL_FOUR}"),
        ([2, 2], 3, f"out of: {ALL_FOUR}"),
        ([3, 1], 3, f"out of: {ALL_FOUR}"),
        ("middle", 2, "partition=middle is unknown; choose one of even, params, flops, profile, or give the"),
        ("", 2, "is unknown; choose one of even, params, flops"),
    ],
)
def test_what_cannot_be_is_refused_with_the_list_of_layers(partition, stages, says):
    with pytest.raises(ConfigError) as refusal:
        choose_cuts(partition, FOUR, stages)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@steady
@given(st.lists(st.integers(-3, 7), max_size=5), st.integers(1, 6))
def test_any_given_cuts_are_sound_or_refused(cuts, stages):
    try:
        chosen = choose_cuts(cuts, FOUR, stages)
    except ConfigError:
        assert stages > 4 or len(cuts) != stages - 1 or loads([1] * 4, cuts) != sorted_positive(cuts)
    else:
        assert chosen == cuts
        assert len(chosen) == stages - 1
        assert min(loads([1] * 4, chosen)) >= 1


def sorted_positive(cuts: list[int]) -> list[int] | None:
    """The stage sizes that these cuts make, or None where they make none."""
    sizes = [b - a for a, b in pairwise([0, *cuts, 4])]
    return sizes if min(sizes) > 0 else None
