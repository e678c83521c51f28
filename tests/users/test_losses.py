"""Losses as users write them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import CrossEntropyLoss
from torch.nn.functional import cross_entropy

from pipetrain import Pipeline
from tests.support.parity import of_pairs, plainly
from tests.users.programs import batch, ended, mlp, sgd, trained

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


def plain(model: nn.Module, loss: Any, batches: Any) -> tuple[Any, str]:
    losses = plainly(model, sgd(model.parameters()), loss, batches)
    return pytest.approx(losses, abs=1e-12), ""


on_texts = partial(trained, microbatches=4, window=2)


def test_a_loss_that_leaves_padding_out_trains_with_a_weight(ranks):
    told = ranks(partial(on_texts, weight=counted), model(), loss, texts(3))
    assert told == [plain(model(), of_pairs(loss), texts(3))] * 2


def test_padding_in_the_first_batch_is_refused_on_both_ranks(ranks):
    for losses, error in ranks(on_texts, model(), loss, texts(0)):
        assert not losses
        assert GIVE in error


@pytest.mark.parametrize("size", [3, 8, 20])
def test_an_evaluation_is_the_loss_of_all_samples_as_one_batch(size):
    """With class weights, of which batches have more and less."""
    loss, (x, y) = CrossEntropyLoss(torch.tensor([0.1, 0.5, 1, 2, 4], dtype=torch.float64)), batch(20)
    model = mlp()
    wanted = loss(model(x), y).item()
    with Pipeline(model, loss, sgd, microbatches=2, device="cpu", sample=(x, y)) as pipe:
        assert pipe.evaluate([*zip(x.split(size), y.split(size), strict=True)])["loss"] == pytest.approx(
            wanted
        )


# Losses that are no mean over samples


def between(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compares the samples of a batch with each other."""
    return cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class Contrastive(nn.Module):
    """Computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.layers(x)
        others = torch.arange(h.shape[0])
        return {"loss": cross_entropy(h @ h.T, others + 0 * labels), "h": h}


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_with_one_microbatch_a_loss_may_compare_samples(ranks, schedule):
    wanted = plain(mlp(), of_pairs(between), [batch()] * 5)
    alone = partial(trained, microbatches=1, window=1)
    assert ranks(alone, mlp(), between, [batch()] * 5, schedule) == [wanted] * 2


def test_with_one_microbatch_a_model_s_own_loss_may_too(ranks):
    wanted = plain(Contrastive(), lambda model, pair: model(*pair)["loss"], [batch()] * 3)
    given = Contrastive(), "model", [dict(zip(("x", "labels"), batch(), strict=True))] * 3
    assert ranks(partial(trained, microbatches=1), *given) == [wanted] * 2
    _, (_, refused) = ranks(partial(trained, microbatches=2), *given)
    assert "8 samples of the first batch the loss differs by" in refused


def of_some(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs[targets >= 0], targets[targets >= 0])


def test_a_loss_of_nothing_is_said_to_need_a_weight(ranks):
    """A microbatch that is all padding, in a batch that is not tried."""
    data = [batch() for _ in range(6)]
    data[4][1][:2] = -1
    _, (_, said) = ranks(partial(trained, microbatches=4), mlp(), of_some, data)
    assert (
        "the loss of microbatch 0 is nan (first in the loss itself, as where no target counts) at stage 1, "
        "update 4: stopped before the update; give weight=, a function of the targets"
    ) in said


# Losses that depend on more than the outputs


class Penalised(nn.Module):
    """Returns a penalty of its weights beside its scores."""

    def __init__(self, layers: nn.Module, returned: bool) -> None:
        super().__init__()
        self.layers, self.returned = layers, returned

    def forward(self, x: Tensor) -> Any:
        scores = self.layers(x)
        return (scores, penalty(self.layers, "")) if self.returned else scores


def penalty(model: nn.Module, of: str) -> Tensor:
    return 0.1 * torch.stack([p.abs().sum() for name, p in model.named_parameters() if of in name]).sum()


def penalised(kind: str, of: str = "", **options: Any) -> tuple[list[float], dict[str, float], str]:
    """Train with a penalty of weights in the loss, of a chain or traced, or in what the model returns."""
    model = mlp() if kind == "chain" else Penalised(mlp(), kind == "returned")

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        if kind == "returned":
            return cross_entropy(outputs[0], targets) + outputs[1]
        return cross_entropy(outputs, targets) + penalty(model, of)

    losses, values = [], {}

    def program() -> None:
        with Pipeline(model, loss, sgd, device="cpu", **{"microbatches": 2, **options}) as pipe:
            losses.extend(pipe.train([batch(seed=seed) for seed in range(4)]))
            values.update(pipe.evaluate([batch(seed=9)]))

    return losses, values, ended(program)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "gpipe", "recompute": "always", "ema": 0.5, "clip_grad_norm": 0.5},
        {"schedule": "zb_h1", "on_nan": "skip"},
        {"schedule": "pipedream_2bw", "window": 4, "correction": "gap_aware"},
    ],
)
def test_a_penalty_of_weights_in_the_loss_is_trained_as_one_that_the_model_returns(options):
    """With the weights of each microbatch's forward, whatever their version."""
    wanted = penalised("returned", **options)
    assert wanted[2] == ""
    assert penalised("chain", **options) == wanted
    assert penalised("traced", **options) == wanted


def test_a_penalty_of_the_last_stage_s_weights_is_trained_on_two_ranks_and_of_replicas(ranks):
    for options in ({"of": "4."}, {"replicas": 2}):
        wanted = penalised("chain", **{**options, "replicas": 1})
        for losses, values, error in ranks(partial(penalised, "chain", **options)):
            assert error == ""
            assert losses == pytest.approx(wanted[0], abs=1e-12)
            assert values == pytest.approx(wanted[1], abs=1e-12)
    for *_, error in ranks(partial(penalised, "chain")):
        assert (
            "the loss has a term of the weight 0.weight, and the last stage, which computes it, does not"
            in error
        )
