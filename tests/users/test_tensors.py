"""Tensors of a model that are neither parameters nor buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from tests.users.programs import apart

SCALES: list[Tensor] = []  # as a module of a program may keep them


def drawn() -> Tensor:
    return torch.rand(4, dtype=torch.float64) + 0.5


class Noisy(nn.Module):
    """Keeps tensors in attributes and collections, and uses one of the program."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.number, self.noise = number, drawn()
        self.kept: dict[str, Any] = {"shifts": [drawn(), drawn()], "pair": (drawn(), 1)}

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.noise + self.kept["shifts"][1]
        return x * self.kept["pair"][0] * SCALES[self.number]


class Traced(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        by_mode = torch.tensor([2.0, 1, 1, 1]) if self.training else torch.tensor([3.0, 1, 1, 1])
        return super().forward(x) * by_mode.double()


def trained(kind: type[nn.Sequential]) -> float:
    torch.seed()  # as in a program that does not seed
    SCALES[:] = [drawn(), drawn()]
    data = torch.ones(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    return apart(kind(Noisy(0), Noisy(1)), mse_loss, [data])


@pytest.mark.parametrize("kind", [nn.Sequential, Traced])
def test_all_ranks_compute_with_the_tensors_of_rank_0(ranks, kind):
    first, other = ranks(trained, kind)
    assert first < 1e-11
    assert other > 1e-6  # it has drawn others
