"""Models whose forward is hard to run again: what they depend on changes, or is overwritten."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.support.models import CLASSES, Recompute, Shrink, conv


class Struck(nn.Module):
    """Makes infinities in one microbatch of eight, at random."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(1 / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x / self.drop(torch.ones((), dtype=x.dtype)) if self.training else x


class Scaled(nn.Module):
    """Draws a factor from Python's, NumPy's, and torch's generator: the last one behind a condition."""

    def forward(self, x: Tensor) -> Tensor:
        factor = random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5)
        return x * factor * (torch.rand(()) + 0.5 if factor > 1 else 1.0)


class Counting(nn.Module):
    """Depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / self.calls


class Differentiating(nn.Module):
    """Adds the gradient of its own energy."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(y.pow(4).sum(), y)
        return x + grad


def _model(*middle: nn.Module) -> nn.Sequential:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
    return nn.Sequential(Shrink(), conv(4, True, 3), *middle, flat, nn.Linear(12, CLASSES))


def everything(struck: bool = False) -> nn.Sequential:
    """Nine layers in the middle, with one weight in two of them.

    `spectral_norm` has two buffers that each forward changes, and computes with. What overwrites the results
    of a convolution and of a product would make others from what it has left there.
    """
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    return _model(
        spectral_norm(nn.Conv2d(4, 4, 3, padding=1)),
        nn.ReLU(inplace=True),
        nn.Sequential(one, nn.Hardswish(inplace=True), nn.Linear(4, 4)),
        nn.Sequential(nn.Dropout(0.2), nn.Conv2d(4, 4, 3, padding=1), nn.ELU(inplace=True)),
        Recompute(conv(4, True), reentrant=False),
        Struck() if struck else nn.Identity(),
        Recompute(conv(4, False), reentrant=True),
        nn.Dropout(0.2, inplace=True),
        two,
    )


def norms(struck: bool = False, frozen: int = 0, **options: Any) -> nn.Sequential:
    """Two BatchNorms with `options`; the first meets all that strikes. `frozen`: so many first layers."""
    middle = nn.Sequential(nn.BatchNorm2d(4, **options), nn.Conv2d(4, 4, 3, padding=1))
    model = _model(Struck() if struck else nn.Identity(), middle, nn.BatchNorm2d(4, **options), nn.Tanh())
    model[:frozen].requires_grad_(False)
    return model


def scaled() -> nn.Sequential:
    return _model(Scaled(), nn.Conv2d(4, 4, 3, padding=1))


def counting() -> nn.Sequential:
    return _model(Counting())


def differentiating() -> nn.Sequential:
    return _model(Differentiating())


class Attending(nn.Module):
    """Traced: [n, 3, 32, 32] -> [n, 10] by attention over 16 tokens, with a skip and a shared weight."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.query, self.key = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(16)
        self.leave = nn.Linear(16 * 8, CLASSES)
        self.key.weight = self.query.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(nn.functional.avg_pool2d(x, 8).flatten(2).mT)
        y = nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), x)
        out: Tensor = self.leave((x + self.drop(torch.relu_(self.norm(y)))).flatten(1))
        return out
