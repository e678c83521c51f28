"""A batch and its microbatches are compared before the first update, over the whole model and its loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipetrain import ConfigError, Pipeline

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
TOKENS, LABELS = torch.arange(48).reshape(8, 6) % 5, torch.arange(8) % 3
SGD = partial(torch.optim.SGD, lr=0.1)


class WithTerm(nn.Module):
    """Returns a term over its batch beside its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inner(x).relu()
        return self.head(h), h.std(0).mean()


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


class Counting:
    """A loss that counts its calls."""

    calls = 0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        return cross_entropy(outputs, targets)


def sequence(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


def trained(model: nn.Module, loss: Any, inputs: Tensor, microbatches: int = 4) -> float:
    with Pipeline(model, loss, SGD, microbatches=microbatches, device="cpu", threads=1) as pipe:
        return pipe.step(inputs, LABELS)


SAMPLES_TOGETHER = [
    (WithTerm, lambda outputs, y: cross_entropy(outputs[0], y) + 0.1 * outputs[1], INPUTS),
    (WithTerm, lambda outputs, y: outputs[1], INPUTS),
    (sequence(nn.Linear(4, 8), Centred(), nn.Linear(8, 3)), cross_entropy, INPUTS),
    (
        sequence(nn.Embedding(5, 4, scale_grad_by_freq=True), Pooled(), nn.Linear(4, 3)),
        cross_entropy,
        TOKENS,
    ),
]


@pytest.mark.parametrize(("make", "loss", "inputs"), SAMPLES_TOGETHER)
def test_what_looks_at_several_samples_at_once_is_refused_unless_there_is_one_microbatch(make, loss, inputs):
    with pytest.raises(ConfigError, match=r"8 samples .* differ by .* give weight=.*; or set microbatches=1"):
        trained(make(), loss, inputs)
    trained(make(), loss, inputs, microbatches=1)


def test_to_evaluate_it_is_right():
    """A batch of an evaluation is one microbatch."""
    model = nn.Sequential(nn.Linear(4, 8), Centred(), nn.Linear(8, 3))
    wanted = cross_entropy(model(INPUTS), LABELS).item()
    with Pipeline(model, cross_entropy, SGD, microbatches=4, device="cpu", threads=1) as pipe:
        assert pipe.evaluate([(INPUTS, LABELS)])["loss"] == pytest.approx(wanted)
        with pytest.raises(ConfigError, match="differ by"):
            pipe.step(INPUTS, LABELS)


def test_what_takes_each_sample_for_itself_is_let_through_with_batchnorm_and_dropout_held():
    attention = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    for layers in (
        [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)],
        [nn.Embedding(5, 4), attention, Pooled(), nn.Linear(4, 3)],
    ):
        trained(nn.Sequential(*layers), cross_entropy, INPUTS if len(layers[0].weight) == 8 else TOKENS)


def test_trials_call_a_copy_of_a_loss_that_counts_its_calls():
    loss = Counting()
    trained(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), loss, INPUTS)
    assert loss.calls == 4
