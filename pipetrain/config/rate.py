"""The learning rate as a function of the update number.

It is a fraction of the peak rate, which each parameter group of the optimizer has as its `lr`. Every stage
computes it at its own STEP, so changing it needs no barrier, and resuming needs no state. Without a function
the program sets the rates in the groups, see runtime/stage/learning_rates.py.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pipetrain.errors import ConfigError, one_line

Rate = Callable[[int], float]
"""(update 0, 1, 2, ...) -> the learning rate, as a fraction of its peak."""


@dataclass(frozen=True, slots=True)
class LearningRate:
    """How learning rates change: by a function of the update, by a torch scheduler, or by the program.

    `shown`: the parameter whose rate is recorded. `scheduler`: makes a scheduler for an optimizer.
    """

    fraction: Rate | None = None
    shown: str = ""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None


def asked_rate(schedule: Any, shown: str, optimizer: Optimizer) -> LearningRate:
    """Return the rates for `lr_schedule=` of a program, tried on an optimizer. Raises ConfigError."""
    if schedule is None:
        return LearningRate(shown=shown)
    if isinstance(schedule, LRScheduler):
        name = type(schedule).__name__
        raise ConfigError(
            f"lr_schedule= is a {name} of one optimizer, and each stage has its own: give the function that "
            f"makes it, lr_schedule=lambda optimizer: {name}(optimizer, ...)"
        )
    if not callable(schedule):
        raise ConfigError(
            f"lr_schedule={schedule!r} must be a function of the update (0, 1, ...) that returns a fraction "
            f"of the optimizer's rate, or of an optimizer that returns a torch scheduler of it; for a "
            f"constant rate give the optimizer lr="
        )
    try:
        return LearningRate(learning_rate(schedule, 0.0, 1), shown)
    except ConfigError as error:
        if error.__cause__ is None:  # it returns a number that is no rate
            raise
        of_update = error
    try:
        scheduler = schedule(optimizer)
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(f"{of_update}; and of an optimizer: {one_line(error)}") from error
    if not isinstance(scheduler, LRScheduler):
        raise of_update
    _prove_stepped(scheduler)
    return LearningRate(None, shown, schedule)


def _prove_stepped(scheduler: LRScheduler) -> None:
    """Refuse a scheduler that needs more than one step per update. Raises ConfigError."""
    name = type(scheduler).__name__
    try:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError("it needs a loss")
        with warnings.catch_warnings(action="ignore"):  # its optimizer has not stepped
            scheduler.step()
    except Exception as error:  # a user's class
        raise ConfigError(
            f"lr_schedule= gives a {name}, which cannot be stepped once an update: {one_line(error)}; make "
            f"it in the function of optimizer=, and step it between passes yourself"
        ) from error


# Shapes: of (progress, warmup), both fractions of all updates, to the fraction of the peak rate.


def constant(progress: float, warmup: float) -> float:
    """Return the peak rate, after a linear warm-up from 0."""
    return min(1.0, progress / warmup) if warmup else 1.0


def cosine(progress: float, warmup: float) -> float:
    """Fall from the peak to 0 along half a cosine, after a linear warm-up (SGDR, Loshchilov 2017)."""
    if progress < warmup:
        return progress / warmup
    return (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2


def one_cycle(progress: float, warmup: float) -> float:
    """Rise from 1/25 of the peak to it and fall to nearly 0, both along half a cosine.

    Smith & Topin, "Super-Convergence" (2018), with the divisors of torch.optim.lr_scheduler.OneCycleLR;
    `warmup` is its `pct_start`. Momentum is constant.
    """
    start, end = 1 / 25, 1e-4 / 25
    if progress < warmup:
        return start + (1 - start) * (1 - math.cos(math.pi * progress / warmup)) / 2
    return end + (1 - end) * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup))) / 2


SHAPES: dict[str, Callable[[float, float], float]] = {
    "constant": constant,
    "cosine": cosine,
    "one_cycle": one_cycle,
}


def learning_rate(schedule: str | Rate, warmup: float, updates: int) -> Rate:
    """Return the fraction at update 0 ... `updates` - 1: a shape by its name, or a function of the update.

    Raises ConfigError for a function that does not return a finite number of at least 0 for each update. A
    function includes its own warm-up.
    """
    if not isinstance(schedule, str):
        return _tried(schedule, updates)
    shape = SHAPES[schedule]
    # Progress is measured at the middle of an update, so neither the first nor the last rate is 0.
    return lambda update: shape((update + 0.5) / updates, warmup)


def _tried(function: Rate, updates: int) -> Rate:
    for update in range(updates):
        try:
            factor = float(function(update))
        except Exception as error:  # a user's function may raise anything
            cause = f"{type(error).__name__}: {one_line(error)}"
            raise ConfigError(f"lr_schedule fails for update {update}: {cause}") from error
        if not 0 <= factor < math.inf:
            raise ConfigError(
                f"lr_schedule gives {factor} for update {update}; it must give a finite number of at least "
                f"0, the learning rate as a fraction of optim.lr"
            )
    return lambda update: float(function(update))
