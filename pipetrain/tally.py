"""Loss and accuracy counts of the last stage, summed on the device.

Reading a number from a GPU makes the host wait for all launched work, so sums stay on the device until an
epoch ends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

KINDS = (torch.float64, torch.int64)


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over samples."""

    loss: Annotated[float, "or infinite, or NaN"] = 0.0
    correct: int = 0
    samples: int = 0

    @property
    def mean_loss(self) -> float:
        """The mean loss per sample; NaN without samples."""
        return self.loss / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        """The fraction of samples whose highest score is their label; NaN without samples."""
        return self.correct / self.samples if self.samples else math.nan


class Counter:
    """Accumulates a tally on the device."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # loss (float64) and correct predictions (int64)
        self._samples = 0

    def add(self, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        """Count a microbatch: its mean loss, its scores [n, classes], its labels [n]."""
        if not self._sums:
            self._sums = [torch.zeros((), dtype=kind, device=loss.device) for kind in KINDS]
        losses, correct = self._sums
        losses.add_(loss.detach(), alpha=len(labels))
        correct.add_((scores.detach().argmax(1) == labels).sum())
        self._samples += len(labels)

    def peek(self) -> Tally:
        loss, correct = (total.item() for total in self._sums) if self._sums else (0.0, 0)
        return Tally(loss, int(correct), self._samples)

    def take(self) -> Tally:
        tally = self.peek()
        self._sums, self._samples = [], 0
        return tally

    def restore(self, tally: Tally, device: str) -> None:
        values = zip((tally.loss, tally.correct), KINDS, strict=True)
        self._sums = [torch.tensor(value, dtype=kind, device=device) for value, kind in values]
        self._samples = tally.samples
