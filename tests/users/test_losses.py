"""Losses as users write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipetrain import Pipeline
from tests.support.plain import of_pairs, plainly

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


def plain(model: nn.Module, loss: Any, batches: Any) -> list[float]:
    return plainly(model, sgd(model.parameters()), loss, batches)


def ended(train: Callable[[], object]) -> str:
    """What a training ends with."""
    try:
        train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def trained(full: int, schedule: str, weighted: bool, double: bool) -> tuple[list[float], str]:
    """Return the losses, and the error that ended the training."""
    data, losses = batches(full, 8), []
    chosen = model().double() if double else model()
    options = {"weight": counted} if weighted else {}

    def train() -> None:
        with Pipeline(chosen, loss, sgd, schedule, microbatches=4, **options) as pipe:
            for number in pipe.train(data, window=2):
                losses.append(number)

    return losses, ended(train)


def test_a_loss_that_leaves_padding_out_trains_with_a_weight(ranks):
    wanted = plain(model().double(), of_pairs(loss), batches(3, 8))
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


# Losses that are no mean over samples


def between(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compares the samples of a batch with each other."""
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def samples(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [(torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator))] * count
    return [(x.double(), y.clone()) for x, y in made]


def contrasted(schedule: str) -> list[float]:
    with Pipeline(classifier(), between, sgd, schedule, microbatches=1) as pipe:
        return list(pipe.train(samples(5), window=1))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_with_one_microbatch_a_loss_may_compare_samples(ranks, schedule):
    wanted = plain(classifier(), of_pairs(between), samples(5))
    for losses in ranks(contrasted, schedule):
        assert losses == pytest.approx(wanted, abs=1e-12)


class Contrastive(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = classifier()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.layers(x)
        others = torch.arange(h.shape[0])
        return {"loss": functional.cross_entropy(h @ h.T, others + 0 * labels), "h": h}


def contrasted_by_itself(microbatches: int) -> tuple[list[float], str]:
    batches = [{"x": x, "labels": y} for x, y in samples(3)]
    losses: list[float] = []

    def train() -> None:
        with Pipeline(Contrastive(), "model", sgd, microbatches=microbatches) as pipe:
            losses.extend(pipe.train(batches))

    return losses, ended(train)


def test_with_one_microbatch_a_model_s_own_loss_may_too(ranks):
    wanted = plain(Contrastive(), lambda model, pair: model(*pair)["loss"], samples(3))
    for losses, error in ranks(contrasted_by_itself, 1):
        assert not error
        assert losses == pytest.approx(wanted, abs=1e-12)
    _, (_, refused) = ranks(contrasted_by_itself, 2)
    assert ": the loss of the model over 8 samples is" in refused


def of_some(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs[targets >= 0], targets[targets >= 0])


def stopped_by_padding() -> str:
    """Return what is said of a microbatch that is all padding, in a batch that is not tried."""
    data = samples(6)
    data[4][1][:2] = -1
    return ended(lambda: train(data, classifier(), of_some, microbatches=4))


def train(data: Any, model: nn.Module, loss: Any, **options: Any) -> list[float]:
    with Pipeline(model, loss, sgd, **options) as pipe:
        return list(pipe.train(data))


def test_a_loss_of_nothing_is_said_to_need_a_weight(ranks):
    _, said = ranks(stopped_by_padding)
    assert (
        "the loss of microbatch 0 is nan (first in the loss itself, as where no target counts) at stage 1, "
        "update 4: stopped before the update; give weight=, a function of the targets"
    ) in said
