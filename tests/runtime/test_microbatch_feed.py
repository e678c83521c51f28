"""The microbatches of a window: their numbers, their shares, and who may ask for what."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipetrain.model.specs import Size
from pipetrain.runtime.microbatch_feed import FeedSettings, WindowFeed, WindowPart
from pipetrain.tasks import Classification

# Two batches: one of 5 samples in pieces of 3 and 2, one of 4 in pieces of 2.
SIZES = [Size(5), Size(4)]
LABELS = [torch.tensor([7, 1, 4, 0, 2]), torch.tensor([9, 3, 5, 6])]
IGNORED = [torch.tensor([7, -100, 4, -100, -100]), torch.tensor([9, -100, 5, 6])]


class Listed(WindowFeed):
    """The microbatches of one rank, from iterators of their inputs and of their batches' targets."""

    def __init__(self, part: WindowPart, inputs: Any, targets: Any) -> None:
        super().__init__(part)
        self.inputs, self.targets = inputs, targets

    def _read_inputs(self, mb: int) -> Any:
        return next(self.inputs)

    def _read_targets(self, batch: int) -> Any:
        return next(self.targets), None


def feed(inputs: Any = (), targets: Any = (), weight: Any = len, sizes: Any = SIZES) -> WindowFeed:
    every = [0] * 2 * len(sizes)
    settings = FeedSettings(0, weight, torch.device("cpu"), torch.float64)
    part = WindowPart(sizes, 2, every, every, settings)
    return Listed(part, iter(inputs), iter(targets))


@pytest.mark.parametrize(
    ("labels", "weight", "weights", "shares"),
    [
        (LABELS, len, [3, 2, 2, 2], [3 / 5, 2 / 5, 1 / 2, 1 / 2]),
        (IGNORED, Classification().weight, [2, 0, 1, 2], [1, 0, 1 / 3, 2 / 3]),
        (LABELS, lambda labels: labels.sum(), [12, 2, 12, 11], [12 / 14, 2 / 14, 12 / 23, 11 / 23]),
        (LABELS, lambda labels: 0.0, [0] * 4, [0.5] * 4),  # shares of the batch's NaN
    ],
    ids=["samples", "targets that are not ignored", "what the task says", "nothing"],
)
def test_targets_are_those_of_the_microbatch_and_shares_those_of_its_batch(labels, weight, weights, shares):
    """A batch is read when it is asked for."""
    read = []
    window = feed(targets=(read.append(len(batch)) or batch for batch in labels), weight=weight)
    targets = {1: window.target(1)}
    assert read == [5]
    targets |= {mb: window.target(mb) for mb in (0, 3, 2)}
    assert [targets[mb].value.tolist() for mb in range(4)] == [
        piece.tolist() for batch in labels for piece in batch.tensor_split(2)
    ]
    assert [window.size(mb) for mb in range(4)] == [Size(targets[mb].samples) for mb in range(4)]
    assert [targets[mb].weight for mb in range(4)] == weights
    assert [targets[mb].share for mb in range(4)] == pytest.approx(shares)


def test_several_tensors_keep_their_order_and_whole_numbers_their_dtype():
    inputs, targets = (torch.arange(3), torch.ones(3, 2)), (torch.zeros(5, 2), torch.arange(5))
    window = feed([inputs], [targets], lambda value: len(value[0]))
    for tensors in (window.input(0)[::-1], window.target(0).value):
        assert [(t.dtype, len(t)) for t in tensors] == [(torch.float64, 3), (torch.int64, 3)]


def test_of_what_a_window_leaves_out_nothing_is_read_ahead():
    """A reader would send its targets, which nobody takes, and wait for good."""
    inputs = iter(torch.arange(4.0).split(1))
    window = feed(inputs)
    assert window.input(0)[0].tolist() == [0]
    window.truncate(2)
    assert window.input(1)[0].tolist() == [1]
    window.prefetch()
    assert next(inputs).tolist() == [2]


def test_two_windows_share_one_iterator_and_neither_takes_ahead_what_is_the_other_s():
    inputs = iter(torch.arange(4.0).split(1))
    first, second = (feed(inputs, sizes=[batch]) for batch in SIZES)
    seen = [first.input(0)]
    first.prefetch()
    first.prefetch()
    seen.append(first.input(1))
    first.prefetch()
    seen += [second.input(mb) for mb in range(2)]
    assert [tensor.item() for (tensor,) in seen] == [0, 1, 2, 3]
