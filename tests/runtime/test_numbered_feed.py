"""The feed of samples by number: whose turn it is, and windows of one pass."""

from __future__ import annotations

from pipetrain.runtime.numbered_feed import turns


def test_microbatches_take_turns_in_each_batch_or_in_each_window():
    assert turns([3, 3], every=1) == [0, 1, 2, 0, 1, 2]
    assert turns([2] * 5, every=2) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert turns([2] * 3, every=2, done=1) == [0, 1, 0, 1, 2, 3]
    assert turns([1] * 4, every=None) == [0, 1, 2, 3]
