"""Batches that are dicts, with their targets among them by name."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from pipetrain import Pipeline
from tests.support.plain import evaluated, plainly


class Two(nn.Module):
    """Takes two inputs by name, and gives scores and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(3, 8), nn.Linear(8, 5)

    def forward(self, image: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(image)) + self.second(place)
        return self.last(torch.tanh(h)), h.sum(1)


def both(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    scores, number = outputs
    label, wanted = targets
    return functional.cross_entropy(scores, label) + functional.mse_loss(number, wanted)


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def samples(n: int) -> list[dict[str, Any]]:
    torch.manual_seed(1)
    return [
        {
            "image": torch.randn(6).double(),
            "label": i % 5,
            "place": torch.randn(3).double(),
            "size": 0.1 * torch.randn(1).double().squeeze(),
        }
        for i in range(n)
    ]


def batches(*names: str) -> list[Any]:
    """Two dicts of 8 samples, as a DataLoader gives them."""
    chosen = [{name: sample[name] for name in names} for sample in samples(16)]
    return list(DataLoader(chosen, batch_size=8))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def one_name() -> tuple[list[float], list[float], dict[str, float]]:
    """Train on what a loader gives, and on a batch that is another kind of mapping."""
    torch.manual_seed(0)
    pipe = Pipeline(plain().double(), functional.cross_entropy, sgd, microbatches=2, targets="label")
    loader = batches("image", "label")
    losses = list(pipe.train(loader if not pipe.rank else None))
    stepped = [pipe.step(UserDict(batch) if not pipe.rank else None) for batch in loader]
    return losses, stepped, pipe.evaluate(loader)


def test_one_target_by_name(ranks):
    torch.manual_seed(0)
    model, loader = plain().double(), batches("image", "label")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["image"]), batch["label"])

    wanted = plainly(model, sgd(model.parameters()), loss, loader * 2)
    left = evaluated(model, loss, loader)
    for losses, stepped, test in ranks(one_name):
        assert [*losses, *stepped] == pytest.approx(wanted, abs=1e-12)
        assert test["loss"] == pytest.approx(sum(left) / 2, abs=1e-12)


def several_names() -> list[float]:
    torch.manual_seed(0)
    model, loader = Two().double(), batches("place", "label", "image", "size")
    options = {"targets": ["label", "size"], "sample": loader[0]}
    with Pipeline(model, both, sgd, microbatches=4, **options) as pipe:
        return list(pipe.train(loader))


def test_several_targets_by_name_are_a_tuple_and_the_inputs_keywords(ranks):
    torch.manual_seed(0)
    model = Two().double()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return both(model(image=batch["image"], place=batch["place"]), (batch["label"], batch["size"]))

    wanted = plainly(model, sgd(model.parameters()), loss, batches("place", "label", "image", "size"))
    assert all(losses == pytest.approx(wanted, abs=1e-12) for losses in ranks(several_names))
