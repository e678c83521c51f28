"""The microbatches of a window: their numbers, their shares, and who may ask for what."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pipetrain.network.values import Value
from pipetrain.runtime.feed import Weight, WindowFeed
from pipetrain.tasks import Classification

CPU = torch.device("cpu")

# Two batches: one of 5 samples in pieces of 3 and 2, one of 4 in pieces of 1 and 3.
SIZES = [[3, 2], [1, 3]]
LABELS = [torch.tensor(labels) for labels in ([7, 1, 4], [0, 2], [9], [3, 5, 6])]


def samples(targets: Value) -> float:
    return len(targets)


def feed(
    inputs: Iterator[Value] | None = None,
    targets: list[Value] | None = None,
    weight: Weight = samples,
    sizes: list[list[int]] = SIZES,
    dtype: torch.dtype = torch.float32,
) -> WindowFeed:
    given = None if targets is None else iter(targets)
    return WindowFeed(sizes, inputs, given, weight, CPU, dtype)


def numbers() -> Iterator[Tensor]:
    return iter(torch.arange(4.0).split(1))


def given(window: WindowFeed, mb: int) -> float:
    (tensor,) = window.input(mb)
    return tensor.item()


def test_microbatches_are_numbered_through_the_window():
    assert [feed().size(mb) for mb in range(4)] == [3, 2, 1, 3]


# Targets


def test_targets_are_those_of_the_microbatch_and_shares_those_of_its_batch():
    window = feed(targets=LABELS)
    targets = [window.target(mb) for mb in range(4)]
    assert all(torch.equal(target.value, labels) for target, labels in zip(targets, LABELS, strict=True))
    assert [(target.samples, target.weight) for target in targets] == [(3, 3), (2, 2), (1, 1), (3, 3)]
    assert [target.share for target in targets] == [3 / 5, 2 / 5, 1 / 4, 3 / 4]


def test_targets_may_be_asked_for_in_any_order():
    window = feed(targets=LABELS)
    assert [window.target(mb).share for mb in (3, 0, 2, 1)] == [3 / 4, 3 / 5, 1 / 4, 2 / 5]


def test_targets_count_for_what_the_task_says():
    ignored = [torch.tensor(labels) for labels in ([7, -100, 4], [-100, -100], [9], [-100, 5, 6])]
    window = feed(targets=ignored, weight=Classification().weight)
    targets = [window.target(mb) for mb in range(4)]
    assert [(target.samples, target.weight) for target in targets] == [(3, 2), (2, 0), (1, 1), (3, 2)]
    assert [target.share for target in targets] == [1, 0, 1 / 3, 2 / 3]


def test_a_batch_in_which_nothing_counts_has_shares_of_its_nan():
    window = feed(targets=LABELS, weight=lambda targets: 0.0)
    assert [window.target(mb).share for mb in range(4)] == [0.5] * 4


def test_only_what_is_asked_for_is_read():
    """A batch at a time: its weights are needed, and those of the next are not."""
    read = []

    def targets() -> Iterator[Tensor]:
        for labels in LABELS:
            read.append(labels)
            yield labels

    window = WindowFeed(SIZES, None, targets(), samples, CPU)
    window.target(1)
    assert len(read) == 2


def test_targets_of_several_tensors_are_cast_like_inputs():
    pairs = [(torch.zeros(n, 2), torch.arange(n)) for n in (3, 2, 1, 3)]
    window = feed(targets=pairs, weight=lambda value: len(value[0]), dtype=torch.float64)
    boxes, labels = window.target(0).value
    assert (boxes.dtype, labels.dtype) == (torch.float64, torch.int64)
    assert window.target(1).samples == 2


def test_a_rank_without_the_last_stage_has_no_targets():
    with pytest.raises(AssertionError, match="no targets to give for microbatch 1"):
        feed().target(1)


# Inputs


def test_inputs_come_one_microbatch_after_another():
    window = feed(numbers())
    assert [given(window, mb) for mb in range(4)] == [0, 1, 2, 3]
    with pytest.raises(StopIteration):
        window.input(4)


def test_inputs_of_several_tensors_keep_their_order_and_whole_numbers_their_dtype():
    window = feed(iter([(torch.arange(3), torch.ones(3, 2))]), dtype=torch.float64)
    ids, mask = window.input(0)
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.float64)
    assert (ids.tolist(), mask.shape) == ([0, 1, 2], (3, 2))


def test_two_windows_of_an_epoch_share_one_iterator():
    inputs = numbers()
    first, second = (feed(inputs, sizes=[batch]) for batch in SIZES)
    assert [given(first, mb) for mb in range(2)] == [0, 1]
    assert [given(second, mb) for mb in range(2)] == [2, 3]


def test_the_next_inputs_are_made_ahead_once_and_never_those_of_the_next_window():
    inputs = numbers()
    first, second = (feed(inputs, sizes=[batch]) for batch in SIZES)
    assert given(first, 0) == 0
    first.prepare()
    first.prepare()
    assert given(first, 1) == 1
    first.prepare()
    assert [given(second, mb) for mb in range(2)] == [2, 3]
    feed().prepare()  # a rank that has none


def test_a_rank_without_the_first_stage_has_no_inputs():
    with pytest.raises(AssertionError, match="no inputs to give for microbatch 1"):
        feed().input(1)


def test_shares_of_a_batch_make_one():
    window = feed(targets=LABELS, weight=lambda labels: labels.sum())
    shares = [window.target(mb).share for mb in range(4)]
    assert math.isclose(sum(shares[:2]), 1)
    assert shares[0] == 12 / 14
