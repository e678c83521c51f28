"""Batches that are dicts, with their targets among them by name."""

from __future__ import annotations

from collections import UserDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from pipetrain import Pipeline
from tests.support.parity import evaluated, plainly
from tests.users.programs import mlp, sgd, trained


class Two(nn.Module):
    """Takes two inputs by name, and gives scores and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(3, 8), nn.Linear(8, 5)

    def forward(self, image: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(image)) + self.second(place)
        return self.last(torch.tanh(h)), h.sum(1)


def both(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(outputs[0], targets[0]) + mse_loss(outputs[1], targets[1])


def batches(*names: str) -> list[Any]:
    """Two dicts of 8 samples, as a DataLoader gives them."""
    torch.manual_seed(1)
    sizes = {"image": (16, 6), "place": (16, 3), "size": (16,)}
    columns = {name: torch.randn(shape).double() for name, shape in sizes.items()}
    columns["label"] = torch.arange(16) % 5
    return list(DataLoader([{name: columns[name][i] for name in names} for i in range(16)], batch_size=8))


def one_name() -> tuple[list[float], float]:
    """Train on what a loader gives, and on a batch that is another kind of mapping."""
    pipe = Pipeline(mlp(), cross_entropy, sgd, microbatches=2, targets="label")
    loader = batches("image", "label")
    losses = list(pipe.train(loader if not pipe.rank else None))
    losses += [pipe.step(UserDict(batch) if not pipe.rank else None) for batch in loader]
    return losses, pipe.evaluate(loader)["loss"]


def test_one_target_by_name(ranks):
    model, loader = mlp(), batches("image", "label")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch["image"]), batch["label"])

    wanted = plainly(model, sgd(model.parameters()), loss, loader * 2)
    mean = sum(evaluated(model, loss, loader)) / 2
    assert ranks(one_name) == [(pytest.approx(wanted, abs=1e-12), pytest.approx(mean, abs=1e-12))] * 2


def test_several_targets_by_name_are_a_tuple_and_the_inputs_keywords(ranks):
    torch.manual_seed(0)
    model, loader = Two().double(), batches("place", "label", "image", "size")
    several = partial(trained, microbatches=4, targets=["label", "size"], sample=loader[0])
    told = ranks(several, model, both, loader)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return both(model(image=batch["image"], place=batch["place"]), (batch["label"], batch["size"]))

    wanted = plainly(model, sgd(model.parameters()), loss, loader)
    assert told == [(pytest.approx(wanted, abs=1e-12), "")] * 2
