"""Cuts: against every way of cutting, and every way of asking for what cannot be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.errors import ConfigError
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan.balance import balance, choose_cuts
from pipetrain.plan.estimate import Layer
from pipetrain.settings import STRATEGIES

steady = settings(derandomize=True, deadline=None)
OUT = ValueSpec((TensorSpec((1, 10), torch.float32),))


def layers(params: list[int], flops: list[int]) -> list[Layer]:
    return [Layer(f"l{i}", p, f, OUT) for i, (p, f) in enumerate(zip(params, flops, strict=True))]


FOUR = layers(params=[9, 1, 1, 1], flops=[1, 1, 1, 9])
ALL_FOUR = "0 l0, 1 l1, 2 l2, 3 l3"
ONE_OF_FOUR = f"give 1 rising numbers from 1 to 3, their first layers, out of: {ALL_FOUR}"


def loads(weights: list[int], cuts: list[int]) -> list[int]:
    return [sum(weights[a:b]) for a, b in pairwise([0, *cuts, len(weights)])]


def test_balance_can_be_seen():
    assert balance([1, 1, 1, 9], range(2)) == [3]
    assert balance([9, 1, 1, 1], range(2)) == [1]
    assert balance([2, 3, 4, 5, 6, 7], range(3)) == [3, 5]  # 2 3 4 | 5 6 | 7: nothing is below 11
    assert balance([4, 4, 4, 4], range(4)) == [1, 2, 3]
    assert balance([5], range(1)) == []


@steady
@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.data())
def test_balance_is_the_best_of_all_cuts(weights, data):
    stages = data.draw(st.integers(1, len(weights)))
    cuts = balance(weights, range(stages))
    every = [list(cut) for cut in combinations(range(1, len(weights)), stages - 1)]
    assert cuts in every  # rising, inside the model, no stage empty
    assert max(loads(weights, cuts)) == min(max(loads(weights, cut)) for cut in every)


def test_strategies_weigh_different_things():
    assert choose_cuts("params", FOUR, [0, 1]) == [1]
    assert choose_cuts("flops", FOUR, [0, 1]) == [3]
    assert choose_cuts("even", FOUR, [0, 1]) == [2]
    assert {choose_cuts(strategy, FOUR, [0]) == [] for strategy in STRATEGIES} == {True}


@steady
@given(st.integers(1, 60), st.data())
def test_even_stages_differ_by_one_layer_at_most(n, data):
    stages = data.draw(st.integers(1, n))
    sizes = loads([1] * n, choose_cuts("even", layers([0] * n, [0] * n), range(stages)))
    assert len(sizes) == stages
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("partition", "stages", "says"),
    [
        ("flops", 5, f"stages=5 needs at least as many layers, but the model has 4: {ALL_FOUR}"),
        ([1, 2], 2, f"partition=[1, 2] does not cut the model into 2 stages: {ONE_OF_FOUR}"),
        ([0], 2, ONE_OF_FOUR),
        ([4], 2, ONE_OF_FOUR),
        (
            [2, 2],
            3,
            "partition=[2, 2] does not cut the model into 3 stages: give 2 rising numbers from 1 to 3",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_list_of_layers(partition, stages, says):
    with pytest.raises(ConfigError) as refusal:
        choose_cuts(partition, FOUR, range(stages))
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


# Several stages a rank


def size(weights: list[float], cuts: Sequence[int], where: Sequence[int]) -> float:
    """The largest rank and the largest stage together."""
    held = dict.fromkeys(where, 0.0)
    sums = loads(weights, list(cuts))
    for rank, weight in zip(where, sums, strict=True):
        held[rank] += weight
    return max(held.values()) + max(sums)


def test_the_two_stages_of_a_rank_of_a_v_add_up() -> None:
    """Nearly equal stages would leave rank 0 with 9 of 16."""
    weights = [3.0, 1.0, 4.0, 1.0, 2.0, 5.0]
    assert loads(weights, balance(weights, range(4))) == [4, 4, 3, 5]
    assert loads(weights, balance(weights, [0, 1, 1, 0])) == [3, 5, 3, 5]
    assert balance(weights, [0, 0, 0, 0]) == balance(weights, range(4))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), st.integers(2, 3), st.booleans())
def test_ranks_of_several_stages_are_nearly_as_even_as_any_cuts_make_them(
    data: st.DataObject, ranks: int, v: bool
) -> None:
    weights = data.draw(st.lists(st.floats(0, 5), min_size=2 * ranks, max_size=10))
    where = [*range(ranks), *(reversed(range(ranks)) if v else range(ranks))]
    cuts = balance(weights, where)
    found = size(weights, cuts, where)
    every = combinations(range(1, len(weights)), len(where) - 1)
    least = min(size(weights, other, where) for other in every)
    assert found <= size(weights, balance(weights, range(len(where))), where) + 1e-12
    assert found <= 1.15 * least + 1e-12
