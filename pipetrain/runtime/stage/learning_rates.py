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

    def __init__(
        self, optimizer: Optimizer | None, learning_rate: LearningRate, shown: Tensor | None
    ) -> None:
        self._groups = groups = optimizer.param_groups if optimizer else []
        self._initial, self._fraction = self._current(), learning_rate.fraction
        try:
            make = learning_rate.scheduler
            self.scheduler = make(optimizer) if optimizer and make else None
        except Exception as error:  # a user's function may raise anything
            raise ConfigError(
                f"lr_schedule= fails for the optimizer of a stage, which has {len(groups)} of the parameter "
                f"groups: {one_line(error)}; let it do without the others"
            ) from error
        self._last_seen = self._current()
        holds = [any(p is shown for p in group["params"]) for group in groups]
        self._shown = holds.index(True) if True in holds else None
        self.used: list[Any] = []
        """The rate of each update since `take`, if it is recorded."""

    def _current(self) -> list[Any]:
        return [group.get("lr") for group in self._groups]

    def options(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return each group, and its options as they are now."""
        return [(group, dict(group)) for group in self._groups]

    def accept_current(self) -> None:
        """Accept the current rates of the groups, as after a load: the program has not set them."""
        self._last_seen = self._current()

    def prepare(self, update: int) -> None:
        """Set the rates of the next update, if there is a function.

        Raises ConfigError if the program has set rates that lr_schedule= sets.
        """
        if self._fraction is None and self.scheduler is None:
            return
        for number, (current, last_seen) in enumerate(zip(self._current(), self._last_seen, strict=True)):
            if current is not last_seen and (isinstance(current, Tensor) or current != last_seen):
                raise ConfigError(
                    f"lr_schedule= sets the rate of every update, and before update {update} the program has "
                    f"set that of parameter group {number} to {current}: leave one of them out"
                )
        if self._fraction is not None:
            fraction = self._fraction(update)
            for group, rate in zip(self._groups, self._initial, strict=True):
                if rate is not None:
                    group["lr"] = rate * fraction
            self.accept_current()

    @contextmanager
    def corrected(self, factor: float) -> Iterator[None]:
        """Multiply the rates of the update in this context by a factor; a program sees them without it."""
        before = self._current()
        for group, rate in zip(self._groups, before, strict=True):
            if factor != 1 and rate is not None:
                group["lr"] = rate * factor
        used = self._current()
        yield
        for group, rate, used_rate in zip(self._groups, before, used, strict=True):
            if factor != 1 and rate is not None:  # or as the optimizer itself has changed it
                group["lr"] = rate if group["lr"] is used_rate else group["lr"] / factor
        if self.scheduler is not None:
            self.scheduler.step()
        self.accept_current()
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
        return list(map(_ratio, self._current(), self._initial))


def _ratio(rate: Any, initial: Any) -> float:
    """Return the ratio of two rates; 1 for rates that would make a host wait."""
    unread = (r is None or (isinstance(r, Tensor) and r.is_cuda) for r in (rate, initial))
    return 1.0 if any(unread) or not initial else float(rate) / float(initial)
