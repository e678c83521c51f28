"""What is known of a run: which epoch was the best, and what the ranks have of one."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pipetrain.checkpoint.epoch_record import best_epoch, best_update, by_update
from tests.support.run_files import figures


@pytest.mark.parametrize(
    ("correct", "best"),
    [
        ([5, 9, 9], 2),
        ([None, -7, -6], 3),  # as of a loss
        ([1, None], 1),
        ([None, None], None),
    ],
)
def test_the_best_epoch_is_the_first_of_the_highest_score(correct, best):
    history = [
        replace(figures(epoch), score=math.nan if right is None else float(right))
        for epoch, right in enumerate(correct, 1)
    ]
    found = best_epoch(history)
    assert (found and found.epoch) == best
    assert best_update(history) == (best and 4 * best)


def test_losses_are_means_of_so_many_updates_each_whatever_they_are():
    assert by_update([1.0, 3.0, 5.0], 7, 2) == {8: 2.0, 9: 5.0}
    assert by_update([math.inf, 1.0, 2.0, 3.0], 1, 2) == {2: math.inf, 4: 2.5}
    assert by_update([], 7, 2) == {}
