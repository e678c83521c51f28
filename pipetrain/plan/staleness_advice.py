"""What late gradients cost in accuracy, as a study measured it by optimizer, schedule and correction.

A plan knows how late gradients are, but not what that does to a training. `staleness.csv` does, for some
small models: a row says by how much runs ended worse than synchronous ones. What counts is the task that
loses most. What the file does not have was not studied.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from pipetrain.config.build import make_correction
from pipetrain.config.choices import shipped
from pipetrain.config.settings import Settings
from pipetrain.correction import Auto

STUDY = Path(__file__).with_name("staleness.csv")
TOLERATED = {"accuracy": 0.3, "loss": 0.01}  # of a gap, by its metric
UNITS = {"accuracy": ("points", 1), "loss": ("nats", 3)}  # and the digits that are shown
NONE, HYBRID = "none", "hybrid"


class Loss(NamedTuple):
    """What the worst task of several ends worse than synchronous, with its 95 % interval."""

    correction: str  # names joined by +, or none
    metric: str
    gap: float  # in points of accuracy, or in nats; below 0 it ends better
    half: float  # of the interval's width
    tasks: int
    stages: int  # of the study

    @property
    def share(self) -> float:
        """The gap in what is tolerated of its metric: up to 1 it may be recommended."""
        return self.gap / TOLERATED[self.metric]

    def __str__(self) -> str:
        unit, digits = UNITS[self.metric]
        verb = "loses" if self.gap > 0 else "gains"
        way = "" if self.correction == NONE else f" with correction={option(self.correction)}"
        return f"{verb} {abs(self.gap):.{digits}f} ± {self.half:.{digits}f} {unit}{way}"


@cache
def _rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def joined(names: str) -> str:
    """Return names joined by + in one order, whatever order they have."""
    return "+".join(sorted(names.split("+")))


def option(names: str) -> str:
    """Return names joined by + as correction= has them."""
    return f"[{names.replace('+', ',')}]" if "+" in names else names


def losses(optimizer: str, schedule: str, stages: int) -> dict[str, Loss]:
    """Return what the worst task loses, by correction, at the nearest number of stages at or above.

    A correction counts if there is a configuration of it, and if it was studied on all tasks of the optimizer
    and schedule. Empty: not studied.
    """
    rows = [row for row in _rows(STUDY) if (row["optimizer"], row["schedule"]) == (optimizer, schedule)]
    nearest = min((n for row in rows if (n := int(row["stages"])) >= stages), default=None)
    rows = [row for row in rows if int(row["stages"]) == nearest]
    tasks, by_correction = {row["task"] for row in rows}, dict[str, list[Loss]]()
    for row in rows:
        name, size = joined(row["correction"]), (float(row["gap"]), float(row["half"]))
        loss = Loss(name, row["metric"], *size, len(tasks), int(row["stages"]))
        by_correction.setdefault(name, []).append(loss)
    return {
        name: max(of, key=lambda loss: loss.share)
        for name, of in by_correction.items()
        if len(of) == len(tasks) and all(shipped("correction", one) is not None for one in name.split("+"))
    }


def best_of(studied: dict[str, Loss]) -> Loss | None:
    """Return what the best correction loses: none, where no other is better; None: not studied."""
    return min(studied.values(), key=lambda one: (one.share, one.correction != NONE), default=None)


def settled(settings: Settings, optimizer: str, stages: int) -> Settings:
    """Return settings in which correction=auto is the one that lost least. `optimizer`: names of classes."""
    auto = settings.correction
    if not isinstance(auto, Auto):
        return settings
    kinds = [kind.strip().lower() for kind in optimizer.rpartition(".")[2].split("+")]
    each = (best_correction(kind, settings.schedule, stages) for kind in kinds)
    best = next((names for names in each if names != NONE), NONE)
    nodes = {name: dict(shipped("correction", name) or {})[name] for name in best.split("+") if name != NONE}
    if HYBRID in nodes:
        nodes[HYBRID] = nodes[HYBRID] | {"updates": auto.updates}
    return replace(settings, correction=make_correction("correction", nodes))


def best_correction(optimizer: str, schedule: str, stages: int) -> str:
    """Return the names, joined by +, of the correction that loses least; none: if nothing is better."""
    best = best_of(losses(optimizer, schedule, stages))
    return best.correction if best else NONE
