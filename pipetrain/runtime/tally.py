"""What the last stage sees: loss and hits, counted without waiting for the device.

A number that is read from a GPU makes the host wait until all that was launched before it has run; read at
every microbatch, that alone keeps the host from launching ahead. So sums stay on the device until an epoch
ends, and a loss that is not finite stops the training as soon as it has arrived: on a CPU at once, on a GPU
some microbatches later, at the latest when the window ends.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from pipetrain.errors import TrainingStopped

KINDS = (torch.float64, torch.int64)
Blame = Callable[[list[float]], str]
"""(numbers) -> what they are, and which of them is not finite."""


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


def numbers_of(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers as a dense tensor of real ones."""
    values = tensor._values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def witness(tensors: Sequence[Tensor]) -> Tensor:
    """Return a number a tensor: finite exactly where all of its own are.

    They are dense, real, detached, and of one device.

    On a CPU their sum, for it takes a fiftieth of the time of the largest absolute number, which stands in
    for it where finite numbers have a sum that is not.
    """
    if not tensors[0].is_cuda:
        sums = torch.stack([t.sum() for t in tensors])
        if sums.isfinite().all() or sums.numel() == sum(t.numel() for t in tensors):
            return sums
    return torch.stack(torch._foreach_norm(list(tensors), math.inf))


def sums_are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether `witness` need not be asked, on a CPU: without the microseconds that it takes to ask."""
    return all(math.isfinite(t.sum().item()) for t in tensors)


class FiniteWatch:
    """Stops the training at numbers that are not finite. `stage` is for its sentence."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        # What says which they are, their update, they on the host, and the torch.cuda.Event of their arrival
        # there, or None.
        self._coming: deque[tuple[Blame, int, Tensor, Any]] = deque()

    def add(self, blame: Blame, update: int, numbers: Tensor) -> None:
        """Watch numbers that `update` is to be made of. Raises TrainingStopped."""
        numbers, arrived = numbers.detach(), None
        if numbers.is_cuda:
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = host.copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._coming.append((blame, update, numbers, arrived))
        self.check(update)

    def check(self, update: int, wait: bool = False) -> None:
        """Look at what has arrived by update `update`; with `wait`, at all. Raises TrainingStopped."""
        while self._coming:
            blame, made_for, numbers, arrived = self._coming[0]
            if arrived is not None and wait:
                arrived.synchronize()
            elif arrived is not None and not arrived.query():
                return
            self._coming.popleft()
            values = numbers.flatten().tolist()
            if not all(map(math.isfinite, values)):
                late = update - made_for
                when = f"{late} updates later" if late else "before the update"
                raise TrainingStopped(
                    f"{blame(values)} at stage {self._stage}, update {made_for}: stopped {when}; "
                    f"try a lower optim.lr, or a warmup"
                )
