"""The microbatches of a window: their numbers, their shares, and who may ask for what."""

from __future__ import annotations

import pytest
import torch

from pipetrain.training.feed import WindowFeed

CPU = torch.device("cpu")
LABELS = torch.arange(100, 120)


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


# Two batches: one of 5 samples in pieces of 3 and 2, one of 4 in pieces of 1 and 3.
BATCHES = [[ids(7, 1, 4), ids(0, 2)], [ids(9), ids(3, 5, 6)]]


def feed(images=None) -> WindowFeed:
    return WindowFeed(BATCHES, LABELS, images, CPU)


def test_microbatches_are_numbered_through_the_window():
    assert [feed().size(mb) for mb in range(4)] == [3, 2, 1, 3]


def test_labels_are_those_of_the_microbatch_and_shares_those_of_its_batch():
    targets = [feed().target(mb) for mb in range(4)]
    assert [target.labels.tolist() for target in targets] == [
        [107, 101, 104],
        [100, 102],
        [109],
        [103, 105, 106],
    ]
    assert [target.share for target in targets] == [3 / 5, 2 / 5, 1 / 4, 3 / 4]


def test_targets_may_be_asked_for_in_any_order_and_again():
    window = feed()
    assert window.target(3).labels.tolist() == window.target(3).labels.tolist() == [103, 105, 106]
    assert window.target(0).share == 3 / 5


def test_images_come_one_microbatch_after_another():
    images = iter(torch.arange(4.0).split(1))
    window = feed(images)
    assert [window.input(mb).item() for mb in range(4)] == [0, 1, 2, 3]
    with pytest.raises(StopIteration):
        window.input(4)


def test_two_windows_of_an_epoch_share_one_iterator():
    images = iter(torch.arange(4.0).split(1))
    first, second = (WindowFeed([batch], LABELS, images, CPU) for batch in BATCHES)
    assert [first.input(mb).item() for mb in range(2)] == [0, 1]
    assert [second.input(mb).item() for mb in range(2)] == [2, 3]


def test_the_next_images_are_made_ahead_once_and_never_those_of_the_next_window():
    images = iter(torch.arange(4.0).split(1))
    first, second = (WindowFeed([batch], LABELS, images, CPU) for batch in BATCHES)
    assert first.input(0).item() == 0
    first.prepare()
    first.prepare()
    assert first.input(1).item() == 1
    first.prepare()
    assert [second.input(mb).item() for mb in range(2)] == [2, 3]
    feed().prepare()  # a rank that has none


def test_a_rank_without_the_first_stage_has_no_images():
    with pytest.raises(AssertionError, match="no images to give for microbatch 1"):
        feed().input(1)
