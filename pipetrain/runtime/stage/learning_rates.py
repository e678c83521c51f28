"""The learning rates of a stage's optimizer, one per parameter group.

Between windows a group contains the rate of the next update, so a program changes it as in a loop of plain
PyTorch. `lr_schedule=` sets it instead: a function before each update, a torch scheduler after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pipetrain.config.rate import LearningRate
from pipetrain.errors import ConfigError, one_line


class Rates:
    """The rates of an optimizer's groups; `shown`: the parameter whose rate is recorded, if it is here."""

    def __init__(self, optimizer: Optimizer | None, how: LearningRate, shown: Tensor | None) -> None:
        self._groups = groups = optimizer.param_groups if optimizer else []
        self._began, self._fraction = self._now(), how.fraction
        try:
            self.scheduler = how.scheduler(optimizer) if optimizer and how.scheduler else None
        except Exception as error:  # a user's function may raise anything
            raise ConfigError(
                f"lr_schedule= fails for the optimizer of a stage, which has {len(groups)} of the parameter "
                f"groups: {one_line(error)}; let it do without the others"
            ) from error
        self._left = self._now()  # as last seen
        self._shown = next((n for n, of in enumerate(groups) if any(p is shown for p in of["params"])), None)
        self.used: list[Any] = []
        """The rate of each update since `take`, if it is recorded."""

    def _now(self) -> list[Any]:
        return [group.get("lr") for group in self._groups]

    def options(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return each group, and its options as they are now."""
        return [(group, dict(group)) for group in self._groups]

    def note(self) -> None:
        """Accept the current rates of the groups, as after a load: the program has not set them."""
        self._left = self._now()

    def prepare(self, update: int) -> None:
        """Set the rates of the next update, if there is a function.

        Raises ConfigError if the program has set rates that lr_schedule= sets.
        """
        if self._fraction is None and self.scheduler is None:
            return
        for number, (now, left) in enumerate(zip(self._now(), self._left, strict=True)):
            if now is not left and (isinstance(now, Tensor) or now != left):
                raise ConfigError(
                    f"lr_schedule= sets the rate of every update, and before update {update} the program has "
                    f"set that of parameter group {number} to {now}: leave one of them out"
                )
        if self._fraction is not None:
            fraction = self._fraction(update)
            for group, rate in zip(self._groups, self._began, strict=True):
                if rate is not None:
                    group["lr"] = rate * fraction
            self.note()

    @contextmanager
    def corrected(self, factor: float) -> Iterator[None]:
        """Multiply the rates of the update in this context by a factor; a program sees them without it."""
        before = self._now()
        for group, rate in zip(self._groups, before, strict=True):
            if factor != 1 and rate is not None:
                group["lr"] = rate * factor
        used = self._now()
        yield
        for group, rate, one in zip(self._groups, before, used, strict=True):
            if factor != 1 and rate is not None:  # or as the optimizer itself has changed it
                group["lr"] = rate if group["lr"] is one else group["lr"] / factor
        if self.scheduler is not None:
            self.scheduler.step()
        self.note()
        if self._shown is not None:
            rate = before[self._shown]
            self.used.append(rate.clone() if isinstance(rate, Tensor) else rate)

    def take(self) -> list[float]:
        """Return the rates of the updates since the last call."""
        used, self.used = self.used, []
        return [float(rate or 0.0) for rate in used]

    def fractions(self, update: int) -> list[float]:
        """Return each group's rate of an update as a fraction of its first; without a function, of now."""
        if self._fraction is not None:
            return [self._fraction(update)] * len(self._groups)
        return [_share(now, began) for now, began in zip(self._now(), self._began, strict=True)]


def _share(now: Any, began: Any) -> float:
    """Return the ratio of two rates; 1 for rates that would make a host wait."""
    known = all(rate is not None and not (isinstance(rate, Tensor) and rate.is_cuda) for rate in (now, began))
    return float(now) / float(began) if known and began else 1.0
