"""The sums of loss and metrics at the last stage, kept on the device.

Reading a number from a GPU makes the host wait for all launched work, so sums stay on the device until an
epoch ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

Number = Annotated[float, "or infinite, or NaN"]


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over samples. `loss`: each mean loss times its weight; `sums`: those of each metric, by name."""

    loss: Number = 0.0
    weight: float = 0.0
    samples: int = 0
    sums: dict[str, list[Number]] = field(default_factory=dict)

    @property
    def mean_loss(self) -> float:
        """The mean loss over what counts; NaN if nothing does."""
        return self.loss / self.weight if self.weight else math.nan


class Counter:
    """Accumulates a tally on the device."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._weight = 0.0
        self._samples = 0

    def add(self, loss: Tensor, weight: float, samples: int, sums: Mapping[str, Tensor]) -> None:
        """Count a microbatch: its mean loss, what it counts for, and the sums of its metrics."""
        if weight:  # otherwise the mean loss is undefined
            if self._loss is None:
                self._loss = torch.zeros((), dtype=torch.float64, device=loss.device)
            self._loss.add_(loss.detach(), alpha=weight)
        for name, some in sums.items():
            before = self._sums.get(name)
            self._sums[name] = some.detach().double() if before is None else before + some.detach()
        self._weight += weight
        self._samples += samples

    def peek(self) -> Tally:
        """Return what has been counted, without resetting it."""
        loss = 0.0 if self._loss is None else self._loss.item()
        sums = {name: some.tolist() for name, some in self._sums.items()}
        return Tally(loss, self._weight, self._samples, sums)

    def take(self) -> Tally:
        """Return what has been counted, and start anew."""
        tally = self.peek()
        self._loss, self._sums, self._weight, self._samples = None, {}, 0.0, 0
        return tally

    def restore(self, tally: Tally, device: str) -> None:
        self._loss = torch.tensor(tally.loss, dtype=torch.float64, device=device)
        self._sums = {
            name: torch.tensor(some, dtype=torch.float64, device=device) for name, some in tally.sums.items()
        }
        self._weight, self._samples = tally.weight, tally.samples
