"""What the last stage counts."""

from __future__ import annotations

import math

import pytest
import torch

from pipetrain.tasks.running_sums import Accumulator, Tally


def counted() -> Accumulator:
    counter = Accumulator()
    counter.add(torch.tensor(2.0), 3, 4, {"acc": torch.tensor([2, 3]), "ppl": torch.zeros(0)})
    counter.add(torch.tensor(6.0), 1, 1, {"acc": torch.tensor([1, 1]), "ppl": torch.zeros(0)})
    return counter


def test_a_tally_weighs_by_what_counts_is_taken_once_and_goes_on_from_what_was_restored():
    counter, again = counted(), Accumulator()
    tally = counter.peek()
    assert (tally, tally.mean_loss) == (Tally(12.0, 4, 5, {"acc": [3.0, 4.0], "ppl": []}), 12 / 4)
    again.restore(tally, "cpu")
    for one in (counter, again):
        one.add(torch.tensor(1.0), 2.5, 2, {"acc": torch.tensor([1, 2])})
        one.add(torch.tensor(math.nan), 0, 3, {"acc": torch.tensor([0, 0])})  # a mean of nothing
        assert one.take() == Tally(14.5, 6.5, 10, {"acc": [4.0, 6.0], "ppl": []})
        assert one.take() == Tally()
    assert math.isnan(Tally().mean_loss)


@pytest.mark.parametrize("together", [1, 3])
def test_a_loss_is_weighted_in_float64(together):
    """However many are added up at once."""
    losses, weights = torch.tensor([0.1, 0.2, 0.7]), [3.0, 7.0, 11.0]
    counter = Accumulator()
    for number, (loss, weight) in enumerate(zip(losses, weights, strict=True), start=1):
        counter.add(loss, weight, 1, {})
        if number % together == 0:
            counter.add_up()
    wanted = sum(float(loss) * weight for loss, weight in zip(losses, weights, strict=True))
    assert counter.take().loss == pytest.approx(wanted, rel=1e-15)
