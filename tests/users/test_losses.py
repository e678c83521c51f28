"""Losses as users write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipetrain import Pipeline
from tests.support.plain import of_pairs, plainly
from tests.users.programs import batch, ended, mlp, sgd

PADDING = 0
GIVE = "give weight=, a function of the targets that says what they count for"


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def counted(targets: Tensor) -> Tensor:
    return (targets != PADDING).sum()


def texts(full: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens [8, 7], of which none is padding in the first `full` batches."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(8):
        x, y = torch.randint(1, 11, (2, 8, 7), generator=generator)
        for row in range(8 if number >= full else 0):
            y[row, 1 + (row + number) % 7 :] = PADDING
        made.append((x, y))
    return made


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 11)).double()


def plain(model: nn.Module, loss: Any, batches: Any) -> Any:
    return pytest.approx(plainly(model, sgd(model.parameters()), loss, batches), abs=1e-12)


def trained(
    model: nn.Module, loss: Any, batches: Any, *schedule: str, window: int = 2, **options: Any
) -> tuple[list[float], str]:
    """Return the losses, and the error that ended the training."""
    losses: list[float] = []

    def train() -> None:
        with Pipeline(model, loss, sgd, *schedule, **options) as pipe:
            for number in pipe.train(batches, window):
                losses.append(number)

    return losses, ended(train)


def on_texts(full: int, schedule: str, weighted: bool) -> tuple[list[float], str]:
    options = {"weight": counted} if weighted else {}
    return trained(model(), loss, texts(full), schedule, microbatches=4, **options)


def test_a_loss_that_leaves_padding_out_trains_with_a_weight(ranks):
    assert ranks(on_texts, 3, "1f1b", True) == [(plain(model(), of_pairs(loss), texts(3)), "")] * 2


@pytest.mark.parametrize(("schedule", "full", "at_once"), [("1f1b", 1, 0), ("pipedream", 3, 2)])
def test_padding_that_a_later_batch_brings_stops_the_training(ranks, schedule, full, at_once):
    """In batch 2 or 4, on the rank of the last stage, which the other one does not wait for."""
    (_, lost), (losses, stopped) = ranks(on_texts, full, schedule, False)
    assert stopped.startswith("TrainingStopped: the loss of task loss over 8 samples is")
    assert GIVE in stopped
    assert lost.startswith("ChannelError: rank 0 lost rank 1")
    assert len(losses) == at_once


def test_padding_in_the_first_batch_is_refused_on_both_ranks(ranks):
    for losses, error in ranks(on_texts, 0, "1f1b", False):
        assert not losses
        assert GIVE in error


# Losses that are no mean over samples


def between(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compares the samples of a batch with each other."""
    return cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def contrasted(schedule: str) -> tuple[list[float], str]:
    return trained(mlp(), between, [batch()] * 5, schedule, window=1, microbatches=1)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_with_one_microbatch_a_loss_may_compare_samples(ranks, schedule):
    assert ranks(contrasted, schedule) == [(plain(mlp(), of_pairs(between), [batch()] * 5), "")] * 2


class Contrastive(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.layers(x)
        others = torch.arange(h.shape[0])
        return {"loss": cross_entropy(h @ h.T, others + 0 * labels), "h": h}


def contrasted_by_itself(microbatches: int) -> tuple[list[float], str]:
    x, y = batch()
    return trained(Contrastive(), "model", [{"x": x, "labels": y}] * 3, microbatches=microbatches)


def test_with_one_microbatch_a_model_s_own_loss_may_too(ranks):
    wanted = plain(Contrastive(), lambda model, pair: model(*pair)["loss"], [batch()] * 3)
    assert ranks(contrasted_by_itself, 1) == [(wanted, "")] * 2
    _, (_, refused) = ranks(contrasted_by_itself, 2)
    assert ": the loss of the model over 8 samples is" in refused


def of_some(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs[targets >= 0], targets[targets >= 0])


def stopped_by_padding() -> str:
    """Return what is said of a microbatch that is all padding, in a batch that is not tried."""
    data = [batch() for _ in range(6)]
    data[4][1][:2] = -1
    return trained(mlp(), of_some, data, microbatches=4)[1]


def test_a_loss_of_nothing_is_said_to_need_a_weight(ranks):
    _, said = ranks(stopped_by_padding)
    assert (
        "the loss of microbatch 0 is nan (first in the loss itself, as where no target counts) at stage 1, "
        "update 4: stopped before the update; give weight=, a function of the targets"
    ) in said
