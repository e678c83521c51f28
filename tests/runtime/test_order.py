"""A window that ends early. Which versions an order needs: whole/test_equivalence."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from pipetrain.runtime.order import Order
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import gpipe


@pytest.mark.parametrize("rank", [0, 1])
def test_a_window_ends_before_a_batch_of_which_no_receive_is_posted(rank):
    """Of 4 batches of 2 microbatches, with one receive ahead: two microbatches before that batch."""
    forgotten, said = [], []

    def ends(batches: int, begun: int) -> bool:
        said.append((batches, begun))
        return batches == 3

    mail = SimpleNamespace(channel=SimpleNamespace(forget=forgotten.append))
    order = Order(lower(gpipe(3, 4, 2))[rank], 4, 2, ends, ahead=1)
    seen = [(action, len(said)) for action in order.actions(mail)]
    asked = [str(one) for (_, before), (one, after) in pairwise([(None, 0), *seen]) if after > before]
    assert asked == [f"{rank}F{mb}@{mb // 2}" for mb in (0, 2, 4)]
    assert [action for action, _ in seen] == lower(gpipe(3, 3, 2))[rank]
    assert said == [(1, 1), (2, 2), (3, 3)]
    assert (order.batches, forgotten) == (3, [6])
