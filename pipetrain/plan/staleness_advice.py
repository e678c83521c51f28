"""What late gradients cost in accuracy, as a study measured it by optimizer, schedule and correction.

A plan contains how late gradients are, but not how that affects training. `staleness.csv` does, for some
small models: a row has how much worse runs ended than synchronous ones. The task that loses most counts. What
is not in the file was not studied.
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
TOLERATED = {"accuracy": 0.3, "loss": 0.01}  # gap, by metric
UNITS = {"accuracy": ("points", 1), "loss": ("nats", 3)}  # with the digits shown
NONE, HYBRID = "none", "hybrid"


class Loss(NamedTuple):
    """How much worse the worst task ends than synchronous training, with its 95 % interval."""

    correction: str  # names joined by +, or none
    metric: str
    gap: float  # in points of accuracy, or in nats; below 0 it ends better
    half: float  # of the interval's width
    tasks: int
    stages: int  # of the study

    @property
    def share(self) -> float:
        """The end of the gap's interval as a multiple of what is tolerated: up to 1 it may be recommended."""
        return (self.gap + self.half) / TOLERATED[self.metric]

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
    """Return names joined by +, in sorted order."""
    return "+".join(sorted(names.split("+")))


def option(names: str) -> str:
    """Return names joined by + as correction= has them."""
    return f"[{names.replace('+', ',')}]" if "+" in names else names


def losses(optimizer: str, schedule: str, stages: int) -> dict[str, Loss]:
    """Return the loss of the worst task, by correction, at the nearest studied number of stages at or above.

    A correction counts if it has a configuration, and was studied on all tasks of the optimizer and schedule.
    Empty: not studied.
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
        name: max(by_task, key=lambda loss: loss.share)
        for name, by_task in by_correction.items()
        if len(by_task) == len(tasks)
        and all(shipped("correction", part) is not None for part in name.split("+"))
    }


def best_of(studied: dict[str, Loss]) -> Loss | None:
    """Return the loss of the best correction, or of none if no other is better; None: not studied."""
    return min(studied.values(), key=lambda loss: (loss.share, loss.correction != NONE), default=None)


def settled(settings: Settings, optimizer: str, stages: int) -> Settings:
    """Return settings with correction=auto replaced by the best one. `optimizer`: names of classes."""
    auto = settings.correction
    if not isinstance(auto, Auto):
        return settings
    kinds = [kind.strip().lower() for kind in optimizer.rpartition(".")[2].split("+")]
    corrections = (best_correction(kind, settings.schedule, stages) for kind in kinds)
    best = next((names for names in corrections if names != NONE), NONE)
    nodes = {name: dict(shipped("correction", name) or {})[name] for name in best.split("+") if name != NONE}
    if HYBRID in nodes:
        nodes[HYBRID] = nodes[HYBRID] | {"updates": auto.updates}
    return replace(settings, correction=make_correction("correction", nodes))


def best_correction(optimizer: str, schedule: str, stages: int) -> str:
    """Return the names, joined by +, of the correction that loses least; none if nothing is better."""
    best = best_of(losses(optimizer, schedule, stages))
    return best.correction if best else NONE
