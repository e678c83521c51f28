"""Optimizers of several runs at once: weights [runs, ...], a rate for each run; torch's formulas.

They return new weights and leave the old ones, which late forwards may still read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # of torch.optim.Muon
STEPS, EPS = 5, 1e-7


class Optimizer(Protocol):
    """What an emulation needs of one."""

    def momentum(self, name: str) -> float:
        """Return the momentum of a parameter."""

    def stepped(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rates: Mapping[str, float]
    ) -> dict[str, Tensor]:
        """Return the weights after an update. `rates`: of the peak, of each parameter."""


@dataclass
class _Stacked:
    lr: Tensor  # [runs], the peak rates
    weight_decay: float
    state: dict[tuple[str, str], Tensor] = field(default_factory=dict, init=False)
    updates: int = field(default=0, init=False)

    def stepped(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rates: Mapping[str, float]
    ) -> dict[str, Tensor]:
        self.updates += 1
        new = {}
        for name, weight in weights.items():
            lr = (self.lr * rates[name]).to(weight.dtype).view(-1, *[1] * (weight.dim() - 1))
            new[name] = self.moved(name, weight, gradients[name], lr)
        return new

    def kept(self, what: str, name: str, like: Tensor) -> Tensor:
        """Return a tensor of the state, at first 0."""
        return self.state.setdefault((what, name), torch.zeros_like(like))

    def moved(self, name: str, weight: Tensor, gradient: Tensor, lr: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass
class SGD(_Stacked):
    """`mass`: the momentum."""

    mass: float = 0.9

    def momentum(self, name: str) -> float:
        return self.mass

    def moved(self, name: str, weight: Tensor, gradient: Tensor, lr: Tensor) -> Tensor:
        buffer = self.kept("momentum", name, weight)
        buffer.mul_(self.mass).add_(gradient + self.weight_decay * weight)
        return weight - lr * buffer


@dataclass
class AdamW(_Stacked):
    """As torch.optim.AdamW."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def momentum(self, name: str) -> float:
        return self.betas[0]

    def moved(self, name: str, weight: Tensor, gradient: Tensor, lr: Tensor) -> Tensor:
        mean, squares = self.kept("mean", name, weight), self.kept("squares", name, weight)
        mean.lerp_(gradient, 1 - self.betas[0])
        squares.mul_(self.betas[1]).addcmul_(gradient, gradient, value=1 - self.betas[1])
        first, second = (1 - beta**self.updates for beta in self.betas)
        root = squares.sqrt().div_(sqrt(second)).add_(self.eps)
        return weight * (1 - lr * self.weight_decay) - lr / first * mean / root


@dataclass
class Muon(_Stacked):
    """As conf/optim/muon.yaml: parameters `others` by AdamW, whose rate is `other_lr`."""

    others: Collection[str] = ()
    other_lr: Tensor = field(default_factory=lambda: torch.tensor([1e-3]))
    mass: float = 0.95

    def __post_init__(self) -> None:
        self._adamw = AdamW(self.other_lr, self.weight_decay)

    def momentum(self, name: str) -> float:
        return self._adamw.momentum(name) if name in self.others else self.mass

    def stepped(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rates: Mapping[str, float]
    ) -> dict[str, Tensor]:
        hidden = {name: weight for name, weight in weights.items() if name not in self.others}
        others = {name: weight for name, weight in weights.items() if name in self.others}
        new = super().stepped(hidden, gradients, rates) | self._adamw.stepped(others, gradients, rates)
        return {name: new[name] for name in weights}

    def moved(self, name: str, weight: Tensor, gradient: Tensor, lr: Tensor) -> Tensor:
        buffer = self.kept("momentum", name, weight).lerp_(gradient, 1 - self.mass)
        update = orthogonal(gradient.lerp(buffer, self.mass).flatten(2))
        rows, columns = update.shape[1:]
        step = update.view_as(weight).to(weight.dtype) * sqrt(max(1, rows / columns))
        return weight * (1 - lr * self.weight_decay) - lr * step


def orthogonal(matrices: Tensor) -> Tensor:
    """Return the orthogonal part of matrices [runs, rows, columns], as torch's Muon finds it: in bfloat16."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.mT


@dataclass
class Feedback:
    """Steps that go on as they change, U + (U - U before): the error feedback of arXiv 2606.30634."""

    of: Optimizer
    before: dict[str, Tensor] = field(default_factory=dict, init=False)

    def momentum(self, name: str) -> float:
        """Return that of the optimizer."""
        return self.of.momentum(name)

    def stepped(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rates: Mapping[str, float]
    ) -> dict[str, Tensor]:
        new = self.of.stepped(weights, gradients, rates)
        steps = {name: new[name] - weight for name, weight in weights.items()}
        further = {name: new[name] + step - self.before.get(name, step) for name, step in steps.items()}
        self.before = steps
        return further
