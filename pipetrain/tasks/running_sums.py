"""The sums of loss and metrics at the last stage, held on the device.

Reading a number from a GPU makes the host wait for all launched work, so sums stay on the device until an
epoch ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

MOST_ADDED = 32  # microbatches added in one operation
Number = Annotated[float, "or infinite, or NaN"]
_LOSS = ""  # its name among the sums


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over samples. `loss`: each mean loss times its weight; `sums`: of each metric, by name."""

    loss: Number = 0.0
    weight: float = 0.0
    samples: int = 0
    sums: dict[str, list[Number]] = field(default_factory=dict)

    @property
    def mean_loss(self) -> float:
        """The mean loss over what counts; NaN if nothing does."""
        return self.loss / self.weight if self.weight else math.nan


def summed(parts: Sequence[Tally]) -> Tally:
    """Return the tally of all samples from the parts of different ranks."""
    sums: dict[str, list[Number]] = {}
    for name in {name: None for part in parts for name in part.sums}:
        columns = zip(*(part.sums[name] for part in parts if name in part.sums), strict=True)
        sums[name] = [*map(sum, columns)]
    loss, weight = sum(part.loss for part in parts), sum(part.weight for part in parts)
    return Tally(loss, weight, sum(part.samples for part in parts), sums)


class Accumulator:
    """Accumulates a tally on the device.

    Several microbatches are added at once, as each one alone would cost a kernel per number.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weight, self._samples = 0.0, 0
        self._added: list[tuple[float, Mapping[str, Tensor]]] = []

    def add(self, loss: Tensor, weight: float, samples: int, sums: Mapping[str, Tensor]) -> None:
        """Count a microbatch: its mean loss, its weight, and the sums of its metrics."""
        mean = {_LOSS: loss.detach()} if weight else {}  # others have no mean loss
        self._added.append((weight, {**mean, **sums}))
        self._weight += weight
        self._samples += samples
        if len(self._added) >= MOST_ADDED:
            self.add_up()

    def add_up(self) -> None:
        """Add pending microbatches; at the end of each batch, so that a stop there changes no sum."""
        added, self._added = self._added, []
        for name in {name: None for _, sums in added for name in sums}:
            terms = [sums[name] for _, sums in added if name in sums]
            times = [weight for weight, sums in added if name in sums] if name == _LOSS else []
            self._sums[name] = _plus(self._sums.get(name), terms, times)

    def peek(self) -> Tally:
        """Return what has been counted, without resetting it."""
        self.add_up()
        sums: dict[str, Any] = {name: some.tolist() for name, some in self._sums.items()}
        return Tally(sums.pop(_LOSS, 0.0), self._weight, self._samples, sums)

    def take(self) -> Tally:
        """Return what has been counted, and reset it."""
        tally = self.peek()
        self._sums, self._weight, self._samples = {}, 0.0, 0
        return tally

    def restore(self, tally: Tally, device: str) -> None:
        sums = {_LOSS: tally.loss, **tally.sums}
        self._sums = {name: torch.tensor(s, dtype=torch.float64, device=device) for name, s in sums.items()}
        self._weight, self._samples = tally.weight, tally.samples


def _plus(before: Tensor | None, terms: Sequence[Tensor], times: Sequence[float]) -> Tensor:
    """Add terms [...], each `times` a number, to a sum in float64. One term alone is one kernel."""
    if before is None:
        before = torch.zeros_like(terms[0], dtype=torch.float64)
    if len(terms) == 1:
        return before.add(terms[0], alpha=times[0] if times else 1)
    stacked = torch.stack(list(terms))
    if times:
        stacked = stacked.double()
        if len({*times}) == 1:
            stacked *= times[0]
        else:
            torch._foreach_mul_(list(stacked), list(times))
    return before + stacked.sum(0, dtype=torch.float64)
