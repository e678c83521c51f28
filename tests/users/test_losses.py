"""Losses as users write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain import Pipeline

PADDING = 0


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def counted(targets: Tensor) -> Tensor:
    return (targets != PADDING).sum()


def batches(full: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens [8, 7], of which none is padding in the first `full` batches."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        x, y = torch.randint(1, 11, (2, 8, 7), generator=generator)
        for row in range(8 if number >= full else 0):
            y[row, 1 + (row + number) % 7 :] = PADDING
        made.append((x, y))
    return made


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def trained(full: int, schedule: str, weighted: bool, double: bool) -> tuple[list[float], str]:
    """Return the losses, and the error that ended the training."""
    data, losses = batches(full, 8), []
    chosen = model().double() if double else model()
    options = {"weight": counted} if weighted else {}
    try:
        with Pipeline(chosen, loss, sgd, schedule, microbatches=4, **options) as pipe:
            for number in pipe.train(data, window=2):
                losses.append(number)
    except Exception as error:
        return losses, f"{type(error).__name__}: {error}"
    return losses, ""


def test_a_loss_that_leaves_padding_out_trains_with_a_weight(ranks):
    plain, wanted = model().double(), []
    optimizer = sgd(plain.parameters())
    for x, y in batches(3, 8):
        optimizer.zero_grad()
        whole = loss(plain(x), y)
        whole.backward()
        optimizer.step()
        wanted.append(whole.item())
    for losses, error in ranks(trained, 3, "1f1b", True, True):
        assert not error
        assert losses == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(("schedule", "full", "at_once"), [("1f1b", 1, 0), ("pipedream", 3, 2)])
def test_padding_that_a_later_batch_brings_stops_the_training(ranks, schedule, full, at_once):
    """In batch 2 or 4, on the rank of the last stage, which the other one does not wait for."""
    (_, lost), (losses, stopped) = ranks(trained, full, schedule, False, False)
    assert stopped.startswith("TrainingStopped: the loss of task loss over 8 samples is")
    assert "give weight=, a function of the targets that says what they count for" in stopped
    assert lost.startswith("ChannelError: rank 0 lost rank 1")
    assert len(losses) == at_once


def test_padding_in_the_first_batch_is_refused_on_both_ranks(ranks):
    for losses, error in ranks(trained, 0, "1f1b", False, False):
        assert not losses
        assert "give weight=, a function of the targets that says what they count for" in error
