"""What the last stage counts."""

from __future__ import annotations

import math

import torch

from pipetrain.tally import Counter, Tally

SCORES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])


def test_a_tally_weighs_by_samples_and_is_taken_once():
    counter = Counter()
    counter.add(torch.tensor(2.0), SCORES, torch.tensor([0, 1, 1]))
    counter.add(torch.tensor(6.0), SCORES[:1], torch.tensor([1]))
    tally = counter.take()
    assert (tally.samples, tally.correct) == (4, 2)
    assert tally.mean_loss == (3 * 2.0 + 6.0) / 4
    assert tally.accuracy == 0.5
    assert counter.take() == Tally()


def test_of_nothing_there_is_no_mean():
    """As of an epoch in which every loss was skipped."""
    assert math.isnan(Tally().mean_loss)
    assert math.isnan(Tally().accuracy)
