"""What the last stage counts: loss and hits, summed on the device.

A number that is read from a GPU makes the host wait until all that was launched before it has run; read at
every microbatch, that alone keeps the host from launching ahead. So sums stay on the device until an epoch
ends.
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
        """The loss over a sample; NaN where none was counted, as where each one's was not finite."""
        return self.loss / self.samples if self.samples else math.nan

    @property
    def accuracy(self) -> float:
        """The share of samples whose highest score is their label; likewise."""
        return self.correct / self.samples if self.samples else math.nan


class Counter:
    """Adds up a tally on the device."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # loss, float64, and hits, int64
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
        """Return what was counted so far."""
        loss, correct = (total.item() for total in self._sums) if self._sums else (0.0, 0)
        return Tally(loss, int(correct), self._samples)

    def take(self) -> Tally:
        """Return what was counted, and count from 0 again."""
        tally = self.peek()
        self._sums, self._samples = [], 0
        return tally

    def restore(self, tally: Tally, device: str) -> None:
        """Go on counting from there."""
        values = zip((tally.loss, tally.correct), KINDS, strict=True)
        self._sums = [torch.tensor(value, dtype=kind, device=device) for value, kind in values]
        self._samples = tally.samples
