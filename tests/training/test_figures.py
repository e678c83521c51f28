"""What is known of a run: which epoch was the best, and that what is read is what was written."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from pipetrain.checkpoint.files import Manifest, Position
from pipetrain.tally import Tally
from pipetrain.training.figures import Progress, by_update, most_accurate, read_progress
from tests.support.figures import figures

NOTHING = Tally()  # has no accuracy


@pytest.mark.parametrize(
    ("correct", "best"),
    [
        ([5], 1),
        ([5, 9, 6], 2),
        ([5, 9, 9], 2),
        ([0, 0], 1),
        ([None, 0, 0], 2),
        ([1, None], 1),
        ([None, None], 1),
    ],
)
def test_the_best_epoch_is_the_first_of_the_most_accurate_ones(correct, best):
    history = [
        replace(figures(epoch, right or 0), **({} if right is not None else {"evaluated": NOTHING}))
        for epoch, right in enumerate(correct, 1)
    ]
    assert most_accurate(history).epoch == best


def test_what_is_written_is_read():
    progress = Progress(
        [figures(1), figures(2)], Tally(3.5, 2, 12), 1.5, 7.0, figures(2).stages, [2.5, 2.0, 1.5]
    )
    saved = json.loads(json.dumps(progress.to_json()))
    manifest = Manifest("r", Position(2, 3, 11), {}, {"placement": [0, 1]}, {}, saved, {})
    assert read_progress(manifest) == progress


def test_losses_are_means_of_so_many_updates_each_whatever_they_are():
    assert by_update([1.0, 3.0, 5.0], 7, 2) == {8: 2.0, 9: 5.0}
    assert by_update([math.inf, 1.0, 1e308, 1e308], 1, 2) == {2: math.inf, 4: math.inf}
    assert by_update([], 7, 2) == {}
    assert math.isnan(by_update([math.inf, -math.inf], 1, 2)[2])
