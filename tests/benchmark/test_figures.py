"""Ratios are taken within a round, and held against their targets as they are printed."""

from __future__ import annotations

import pytest

from benchmark.figures import Verdict, ratio, timed_row

# The machine halves its speed from the third round on.
SERIES = {"theirs": [0.2, 0.2, 0.4, 0.4], "ours": [0.1, 0.1, 0.2, 0.2], "slow": [0.2004, 0.2004, 0.4008, 0.4]}


def test_a_ratio_does_not_see_the_machine_drift():
    assert ratio(SERIES["theirs"], SERIES["ours"]) == pytest.approx(2.0)


def test_a_ratio_is_the_median_over_the_rounds():
    assert ratio([1, 1, 1], [1, 2, 100]) == 0.5


def test_rounds_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        ratio([1, 2], [1])


def test_a_row_of_times():
    row = timed_row("suite", "ours", SERIES, {"x theirs": "theirs", "x slow": "slow"}, {"x theirs": 2.5})
    assert row.values == [100, 100, 200, 200]
    assert row.unit == "ms"
    assert row.ratios == {"x theirs": pytest.approx(2.0), "x slow": pytest.approx(2.004)}
    assert row.verdicts == [Verdict("x theirs >= 2.50", False)]


@pytest.mark.parametrize(("least", "met"), [(0.998, True), (0.9981, False), (0.999, False)])
def test_a_target_is_held_against_the_figure_as_printed(least, met):
    row = timed_row("suite", "slow", SERIES, {"x theirs": "theirs"}, {"x theirs": least})
    assert row.verdicts[0].met is met
