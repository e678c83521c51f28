"""The equations of corrections, as published, for the reference: of SGD with momentum, and of Adam.

A prediction reads the optimizer's own state (momentum, or the two moments), where pipetrain measures what the
weights moved by. `late(name)` of several: joined by +.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipetrain.config.rate import Rate

Named = Mapping[str, Tensor]
BETA, TINY = 0.999, 1e-12


@dataclass
class Late:
    """Some corrections. `live`: the weights; `peaks`: the rate of each; `kind`: their names, joined by +."""

    kind: str
    live: Named
    optimizer: Optimizer
    rate: Rate
    mare_updates: int = 3
    peaks: dict[str, float] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)  # of the last update's rates
    _groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    _mean: dict[str, Tensor] = field(default_factory=dict)  # of squared directions
    _before: dict[str, Tensor] = field(default_factory=dict)
    _moved: dict[str, Tensor] = field(default_factory=dict)
    _updates: int = 0
    _made: bool = True  # the last update

    def __post_init__(self) -> None:
        names = {id(p): name for name, p in self.live.items()}
        self._moved = {name: torch.zeros_like(p) for name, p in self.live.items()}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                self._groups[names[id(p)]] = group
                self.peaks[names[id(p)]] = group["lr"]

    def momentum(self, name: str) -> float:
        group = self._groups[name]
        return float(group["momentum"] if "momentum" in group else group["betas"][0])

    def direction(self, name: str) -> Tensor:
        """The v of W - lr v, as the optimizer's state has it."""
        state, group = self.optimizer.state[self.live[name]], self._groups[name]
        if not state:
            return torch.zeros_like(self.live[name])
        if "exp_avg" in state:
            (one, two), step = group["betas"], int(state["step"])
            mean, square = state["exp_avg"] / (1 - one**step), state["exp_avg_sq"] / (1 - two**step)
            return mean / (square.sqrt() + group["eps"])  # type: ignore[no-any-return]
        return state["momentum_buffer"].clone()  # type: ignore[no-any-return]

    def after(self, update: int) -> Callable[[str, int], Tensor]:
        """After `update` updates: what a weight is predicted to be, so many updates later."""
        weights = {name: p.detach().clone() for name, p in self.live.items()}
        if update > self._updates and self._made:  # else a window has just begun
            self._moved = {name: weights[name] - self._before[name] for name in weights}
        moved, self._updates = self._moved, update
        along = {name: self.factors.get(name, 1.0) * self.direction(name) for name in self._groups}
        # Muon rounds to bfloat16, so that the last bit counts, and its state does not have its direction.
        bitwise = any("ns_steps" in group for group in self._groups.values())
        self._before = weights

        def predicted(name: str, ahead: int) -> Tensor:
            if not ahead or name not in along or not update:
                return weights[name]
            lr, g = self.peaks[name] * self.rate(update), self.momentum(name)
            if bitwise:
                assert self.kind == "momentum"
                reach = sum(g**n for n in range(1, ahead + 1)) * (self.rate(update) / self.rate(update - 1))
                return weights[name] + moved[name] * reach
            if "steps" in self.kind:
                return weights[name] - ahead * lr * along[name]
            if "momentum" in self.kind:
                return weights[name] - lr * (g - g ** (ahead + 1)) / (1 - g) * along[name]
            if "nesterov" in self.kind:  # where the rate is constant
                return weights[name] + g * moved[name]
            return weights[name]

        return predicted

    def factor(self, update: int, delay: int) -> float:
        if "mare" not in self.kind or not delay:
            return 1.0
        return 1 / delay ** (1 - min(update / self.mare_updates, 1))

    def weighed(self, name: str, gradient: Tensor, used: Tensor, updates: int) -> Tensor:
        """Divide a gradient by 1 + |W - W_used| / (lr_max sqrt(mean of squared directions))."""
        gap = (self.live[name].detach() - used).abs()
        if "gap" not in self.kind or name not in self._mean:
            return gradient
        typical = self.peaks[name] * (self._mean[name] / (1 - BETA**updates)).sqrt() + TINY
        return gradient / (1 + gap / typical)

    def stepped(self, made: bool) -> None:
        """Follow an update, which was made or left out."""
        self._made = made
        for name in self._groups:
            square = (self.factors.get(name, 1.0) * self.direction(name)) ** 2
            self._mean[name] = BETA * self._mean.get(name, 0 * square) + (1 - BETA) * square
