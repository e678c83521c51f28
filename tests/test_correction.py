"""Corrections: their formulas, and that they change nothing without a delay."""

from __future__ import annotations

import pytest
import torch

from pipetrain.correction import (
    Auto,
    Correction,
    GapAware,
    Hybrid,
    MomentumAhead,
    NesterovAhead,
    PipeMare,
    StepsAhead,
    together,
)
from pipetrain.errors import ConfigError

ALL = [Correction(), StepsAhead(), MomentumAhead(), NesterovAhead(), PipeMare(), GapAware()]


def test_how_far_forwards_look_ahead():
    assert [StepsAhead().reach(n, 0.9) for n in (1, 3, 7)] == [1, 3, 7]
    series = [MomentumAhead().reach(n, 0.9) for n in (1, 3, 7, 15)]
    assert series == pytest.approx([0.9, 2.439, 4.695, 7.147], abs=0.001)
    assert series == pytest.approx([(0.9 - 0.9 ** (n + 1)) / (1 - 0.9) for n in (1, 3, 7, 15)])
    assert [NesterovAhead().reach(n, 0.99) for n in (1, 7)] == [0.99, 0.99]


def test_the_rate_of_late_gradients_rises_to_its_own():
    mare = PipeMare(updates=100)
    assert [mare.rate(update, 4) for update in (0, 50, 100, 200)] == [0.25, 0.5, 1, 1]
    assert {mare.rate(update, delay) for update in (0, 50) for delay in (0, 1)} == {1}


def test_a_gradient_counts_less_the_further_its_weight_has_moved():
    gradient = torch.ones(3)
    GapAware().weigh([gradient], [torch.tensor([0.0, 0.5, -1.5])], [torch.full((3,), 0.5)])
    assert gradient.tolist() == pytest.approx([1, 0.5, 0.25])


@pytest.mark.parametrize("one", ALL, ids=lambda one: type(one).__name__)
def test_without_a_delay_nothing_changes(one):
    assert (one.reach(0, 0.9), one.rate(0, 0)) == (0, 1)
    gradient = torch.rand(4)
    before = gradient.clone()
    one.weigh([gradient], [torch.zeros(4)], [torch.rand(4)])
    assert torch.equal(gradient, before)


def test_a_share_of_the_run_is_synchronous():
    first, last = Hybrid(share=0.2), Hybrid(share=0.2, first=False)
    assert [first.window(n, 10) for n in range(10)] == [1, 1, *[None] * 8]
    assert [last.window(n, 10) for n in range(10)] == [8, 7, 6, 5, 4, 3, 2, 1, 1, 1]
    assert together([GapAware(), first]).window(1, 10) == 1
    assert Hybrid(updates=100).window(19, 10) == 1
    with pytest.raises(ConfigError, match=r"give Hybrid\(updates=\) or Auto"):
        first.window(0, None)


def test_several_answer_their_own_questions():
    both = together([GapAware(), MomentumAhead(), PipeMare(updates=10)])
    assert (both.predicts, both.rates, both.weighs, both.copies) == (True, True, True, 2)
    assert (both.reach(1, 0.9), both.rate(0, 2)) == (0.9, 0.5)
    assert [together([]), together([PipeMare()])] == [Correction(), PipeMare()]
    assert str(both) == "gap_aware+msnag+pipemare"
    with pytest.raises(ConfigError, match="auto chooses all there is"):
        together([Auto(), GapAware()])
    with pytest.raises(ConfigError, match="both say which weights a forward reads"):
        together([StepsAhead(), MomentumAhead()])
