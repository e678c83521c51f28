"""Corrections of a gradient's delay: the updates between the weights it was computed with and its own update.

A schedule without flushes computes gradients with old weights; its program contains how old. A correction may
define which weights a forward reads, the rate of an update, how its gradient is changed before, and how long
a window may be. A gradient with no delay is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from pipetrain.errors import ConfigError
from pipetrain.rules import BOOL, COUNT, SHARE

SMALLEST = 1e-12  # added to a typical step, which may be 0


@dataclass(frozen=True)
class Correction:
    """No correction, and the base class of all. Flags for the first three: `predicts`, `rates`, `weighs`."""

    name: ClassVar[str] = "none"
    predicts: ClassVar[bool] = False
    rates: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    def reach(self, ahead: int, momentum: float) -> float:
        """Return how many times the last step the weights are moved before a forward reads them.

        `ahead`: the updates until that of the gradient; `momentum`: of the optimizer. The last step is scaled
        to the rate of the coming update.
        """
        return 0.0

    def rate(self, update: int, delay: int) -> float:
        """Return a factor for the learning rate of an update (0, 1, ...) with this delay."""
        return 1.0

    def weigh(self, gradients: Sequence[Tensor], gaps: Sequence[Tensor], steps: Sequence[Tensor]) -> None:
        """Change gradients in place, by the gaps between the weights they were computed with and the newest.

        `steps`: the typical size of a step of each weight at the peak rate.
        """

    def window(self, update: int, updates: int | None) -> int | None:
        """Return the most batches of a window that begins with this update; None: any number.

        `updates`: of the whole run. In a window of one batch no gradient is late.
        """
        return None

    def __str__(self) -> str:
        return self.name

    @property
    def flushed(self) -> float:
        """The share of the updates before which the pipeline drains."""
        return 0.0

    @property
    def copies(self) -> int:
        """How many tensors it holds per weight: the last step, and the typical size of a step."""
        return 2 if self.weighs else int(self.predicts)


@dataclass(frozen=True)
class StepsAhead(Correction):
    """Forwards read the weights predicted by repeating the last step until their own update.

    W - ahead lr v: SpecTrain, for SGD with momentum v (Chen et al. 2018, "Efficient and Robust Parallel DNN
    Training through Model Parallelism"), XPipe for Adam's direction (Guan et al. 2019) and PipeOptim for that
    of any optimizer (Guan et al. 2023).
    """

    name: ClassVar[str] = "spectrain"
    predicts: ClassVar[bool] = True

    def reach(self, ahead: int, momentum: float) -> float:
        return float(ahead)


@dataclass(frozen=True)
class MomentumAhead(Correction):
    """Forwards read the weights as momentum alone will move them: g + g^2 + ... + g^ahead of the last step.

    W - lr (g - g^(ahead + 1)) / (1 - g) v: msnag of FTPipe (Eliad et al. 2021, "Fine-tuning giant neural
    networks on commodity hardware with automatic pipeline model parallelism").
    """

    name: ClassVar[str] = "msnag"
    predicts: ClassVar[bool] = True

    def reach(self, ahead: int, momentum: float) -> float:
        return sum(momentum**n for n in range(1, ahead + 1))


@dataclass(frozen=True)
class NesterovAhead(Correction):
    """Forwards look ahead by momentum times the last step, whatever their delay.

    W + g (W - W of the update before): Ajanthan et al. 2025, "Nesterov Method for Asynchronous Pipeline
    Parallel Optimization"; with optim=nadam its method.
    """

    name: ClassVar[str] = "nesterov"
    predicts: ClassVar[bool] = True

    def reach(self, ahead: int, momentum: float) -> float:
        return momentum if ahead else 0.0


@dataclass(frozen=True)
class PipeMare(Correction):
    """The rate is divided by delay^(1 - update / updates) during the first `updates`.

    Yang et al. 2021, "PipeMare: Asynchronous Pipeline Parallel DNN Training", technique T1.
    """

    name: ClassVar[str] = "pipemare"
    rates: ClassVar[bool] = True
    updates: int = 500

    def __post_init__(self) -> None:
        COUNT.read("updates", self.updates)

    def rate(self, update: int, delay: int) -> float:
        late: float = max(delay, 1) ** -(1 - min(update / self.updates, 1))
        return late


@dataclass(frozen=True)
class GapAware(Correction):
    """Each number of a gradient is divided by 1 + gap / typical step.

    Barkai et al. 2020, "Gap-Aware Mitigation of Gradient Staleness", number by number; the typical step is
    the root of the mean of squares, as in FTPipe.
    """

    name: ClassVar[str] = "gap_aware"
    weighs: ClassVar[bool] = True

    def weigh(self, gradients: Sequence[Tensor], gaps: Sequence[Tensor], steps: Sequence[Tensor]) -> None:
        penalties = torch._foreach_div(torch._foreach_abs([*gaps]), torch._foreach_add([*steps], SMALLEST))
        torch._foreach_div_([*gradients], torch._foreach_add(penalties, 1.0))


@dataclass(frozen=True)
class Hybrid(Correction):
    """A share of the updates are synchronous: the pipeline drains after each batch.

    They are the `first` or the last updates of the run, which has `updates` in all.
    """

    name: ClassVar[str] = "hybrid"
    share: float = 0.4
    first: bool = True
    updates: int | None = None

    def __post_init__(self) -> None:
        SHARE.read("share", self.share)
        BOOL.read("first", self.first)
        COUNT.read("updates", self.updates, null=True)

    @property
    def flushed(self) -> float:
        return self.share

    def window(self, update: int, updates: int | None) -> int | None:
        total = self.updates or updates
        if total is None:
            raise ConfigError(
                "correction=hybrid, which auto may choose, makes a share of all updates synchronous: give "
                "Hybrid(updates=) or Auto(updates=), how many the training has, or train by fit"
            )
        if self.first:
            return 1 if update < round(self.share * total) else None
        return max(1, total - round(self.share * total) - update)


@dataclass(frozen=True)
class Auto(Correction):
    """The best correction in a study, by optimizer, schedule and stages, see plan/staleness_advice.py.

    `updates`: of the training, for Hybrid, which it may choose.
    """

    name: ClassVar[str] = "auto"
    updates: int | None = None

    def __post_init__(self) -> None:
        COUNT.read("updates", self.updates, null=True)


@dataclass(frozen=True)
class Joined(Correction):
    """Several corrections of different kinds."""

    parts: tuple[Correction, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))

    @property
    def predicts(self) -> bool:  # type: ignore[override]
        return any(part.predicts for part in self.parts)

    @property
    def rates(self) -> bool:  # type: ignore[override]
        return any(part.rates for part in self.parts)

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        return any(part.weighs for part in self.parts)

    def reach(self, ahead: int, momentum: float) -> float:
        return sum(part.reach(ahead, momentum) for part in self.parts)

    def rate(self, update: int, delay: int) -> float:
        return float(prod(part.rate(update, delay) for part in self.parts))

    @property
    def flushed(self) -> float:
        return sum(part.flushed for part in self.parts)

    def window(self, update: int, updates: int | None) -> int | None:
        return min(filter(None, (part.window(update, updates) for part in self.parts)), default=None)

    def weigh(self, gradients: Sequence[Tensor], gaps: Sequence[Tensor], steps: Sequence[Tensor]) -> None:
        for part in self.parts:
            part.weigh(gradients, gaps, steps)


def together(parts: Sequence[Correction]) -> Correction:
    """Return corrections as one. Raises ConfigError for two that predict the same weights."""
    if len(parts) > 1 and any(isinstance(part, Auto) for part in parts):
        raise ConfigError("correction=auto chooses all there is to correct: leave the others out, or auto")
    predicting = [part for part in parts if part.predicts]
    if len(predicting) > 1:
        raise ConfigError(
            f"correction: {predicting[0]} and {predicting[1]} both say which weights a forward reads: leave "
            f"one of them out"
        )
    return parts[0] if len(parts) == 1 else Joined(tuple(parts)) if parts else Correction()
