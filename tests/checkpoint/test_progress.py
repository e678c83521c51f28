"""What is known of a run: which epoch was the best, and that what is read is what was written."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from pipetrain.checkpoint.files import Manifest, Position
from pipetrain.checkpoint.progress import Progress, best_epoch, by_update, read_progress
from pipetrain.tally import Tally
from tests.support.figures import figures


@pytest.mark.parametrize(
    ("correct", "best"),
    [
        ([5], 1),
        ([5, 9, 6], 2),
        ([5, 9, 9], 2),
        ([0, 0], 1),
        ([None, 0, 0], 2),
        ([None, -7, -6], 3),  # as of a loss
        ([1, None], 1),
        ([None, None], 1),
    ],
)
def test_the_best_epoch_is_the_first_of_the_highest_score(correct, best):
    history = [
        replace(figures(epoch), score=math.nan if right is None else float(right))
        for epoch, right in enumerate(correct, 1)
    ]
    assert best_epoch(history).epoch == best


def test_what_is_written_is_read():
    tally = Tally(3.5, 11.5, 12, {"acc": [2.0, 12.0], "ppl": []})
    progress = Progress([figures(1), figures(2)], tally, 1.5, 7.0, figures(2).stages, [2.5, 2.0, 1.5])
    saved = json.loads(json.dumps(progress.to_json()))
    manifest = Manifest("r", Position(2, 3, 11), {}, {"placement": [0, 1]}, {}, saved, {})
    assert read_progress(manifest) == progress


def test_losses_are_means_of_so_many_updates_each_whatever_they_are():
    assert by_update([1.0, 3.0, 5.0], 7, 2) == {8: 2.0, 9: 5.0}
    assert by_update([math.inf, 1.0, 1e308, 1e308], 1, 2) == {2: math.inf, 4: math.inf}
    assert by_update([], 7, 2) == {}
    assert math.isnan(by_update([math.inf, -math.inf], 1, 2)[2])
