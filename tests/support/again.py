"""Models whose forward is hard to run again: what they depend on changes, or is overwritten."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from tests.support.models import CLASSES, Shrink, conv


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


def _model(*middle: nn.Module, inplace: bool = False) -> nn.Sequential:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(64, 12))
    return nn.Sequential(
        Shrink(), conv(4, True, 3), *middle, nn.ReLU(inplace=inplace), flat, nn.Linear(12, CLASSES)
    )


def spectral() -> nn.Sequential:
    """Two buffers that each forward changes, and computes with."""
    return _model(spectral_norm(nn.Conv2d(4, 4, 3, padding=1)))


def overwritten() -> nn.Sequential:
    """The results of a convolution and of a product are overwritten by what no second call would leave."""
    convolution = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ELU(inplace=True))
    product = nn.Sequential(nn.Linear(4, 4), nn.Hardswish(inplace=True), nn.Linear(4, 4))
    return _model(convolution, product, inplace=True)


def scaled() -> nn.Sequential:
    return _model(Scaled(), nn.Conv2d(4, 4, 3, padding=1))


def counting() -> nn.Sequential:
    return _model(Counting())


class Attention(nn.Module):
    """[n, 3, 32, 32] -> [n, 16, 8]: a transformer's layer over 16 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.first(nn.functional.avg_pool2d(x, 8).flatten(2).mT))
        return out


class Attending(nn.Module):
    """Traced: skips over two attentions, the last of which shares its weight with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = Attention()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(16)
        self.leave = nn.Linear(16 * 8, CLASSES)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        y = self.drop(torch.relu_(self.norm(self.one(x))))
        out: Tensor = self.leave((x + self.two(y)).flatten(1))
        return out


def attending() -> nn.Module:
    return Attending()
