"""Tensors of a model that are neither parameters nor buffers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pipetrain import Pipeline

SCALES: list[Tensor] = []  # as a module of a program may keep them


def drawn() -> Tensor:
    return torch.rand(4, dtype=torch.float64) + 0.5


class Noisy(nn.Module):
    """Keeps tensors in attributes and collections, and uses one of the program."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.number = number
        self.noise = drawn()
        self.kept: dict[str, Any] = {"shifts": [drawn(), drawn()], "pair": (drawn(), 1)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.noise + self.kept["shifts"][1]
        return x * self.kept["pair"][0] * SCALES[self.number]


class Noises(nn.Module):
    """A model that is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Noisy(0), Noisy(1)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        by_mode = torch.tensor([2.0, 1, 1, 1]) if self.training else torch.tensor([3.0, 1, 1, 1])
        return x * by_mode.double()


def apart(traced: bool) -> tuple[float, float]:
    """Return how far the losses of a training and an evaluation are from those of this rank's own model."""
    torch.seed()  # as in a program that does not seed
    SCALES[:] = [drawn(), drawn()]
    model = Noises() if traced else nn.Sequential(Noisy(0), Noisy(1))
    batch = torch.ones(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    twin = deepcopy(model)
    with torch.no_grad():
        trained, evaluated = (mse_loss(twin.train(mode)(batch[0]), batch[1]).item() for mode in (True, False))
    with Pipeline(model, mse_loss, lambda p: torch.optim.SGD(p, 0.0), device="cpu") as pipe:
        return pipe.evaluate([batch])["loss"] - evaluated, pipe.step(*batch) - trained


@pytest.mark.parametrize("traced", [False, True])
def test_all_ranks_compute_with_the_tensors_of_rank_0(ranks, traced):
    first, other = ranks(apart, traced)
    assert first == pytest.approx((0, 0), abs=1e-12)
    assert abs(other[0]) > 1e-6  # it has drawn others
