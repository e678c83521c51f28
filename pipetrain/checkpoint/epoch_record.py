"""The numbers of a run in a checkpoint: of its finished epochs, and of the current one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pipetrain.schedule.timeline import StageStats
from pipetrain.tasks.running_sums import Tally

Stats = dict[int, StageStats]


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """Every number of an epoch (counted from 1), gathered from all ranks. Times in seconds.

    `trained`, `evaluated`: the mean loss and the metrics, by name; {} without evaluation. `stages`: each
    stage's statistics; empty if another pipeline trained the epoch, and of fewer updates if another one began
    it. `elapsed_s`: the run's time until its end, without pauses between a stop and a resume; `ended`: in
    seconds since 1970.
    """

    epoch: int
    trained: dict[str, float]
    evaluated: dict[str, float]
    score: float  # to compare epochs; higher is better
    samples: int  # trained
    losses: dict[int, float]  # mean losses of groups of updates, by the last one's number (from 1)
    rates: dict[int, float]  # the learning rates of these last updates
    lr: float  # of the last update
    train_s: float
    eval_s: float
    stages: Stats
    elapsed_s: float
    ended: float

    @property
    def samples_per_s(self) -> float:
        """Training samples per second, without evaluation."""
        return self.samples / self.train_s

    @property
    def updates(self) -> int:
        """The number of updates that `stages` covers."""
        return self.stages[0].updates if self.stages else 0

    @property
    def update_values(self) -> dict[int, dict[str, float]]:
        """The values of each group of updates, by the last one's number and their names in loggers."""
        return {n: {"loss/update": loss, "lr/update": self.rates[n]} for n, loss in self.losses.items()}

    def update_rows(self) -> list[dict[str, float]]:
        """Return the rows of updates.csv: one a group of updates."""
        return [{"update": n, "train_loss": loss, "lr": self.rates[n]} for n, loss in self.losses.items()]

    def named(self, names: Sequence[str]) -> EpochRecord:
        """Return the record with values of these names; NaN for missing metrics."""
        trained, evaluated = (
            {name: values.get(name, math.nan) for name in names if values}
            for values in (self.trained, self.evaluated)
        )
        return replace(self, trained=trained, evaluated=evaluated)

    def as_row(self) -> dict[str, float]:
        """Return the row of metrics.csv."""
        row = self.as_told()
        row["epoch_s"] = row.pop("seconds")
        return row | {"eval_s": self.eval_s, "elapsed_s": self.elapsed_s}

    def as_told(self) -> dict[str, float]:
        """Return the row for a program."""
        return {
            "epoch": self.epoch,
            **{f"train_{name}": value for name, value in self.trained.items()},
            **{f"val_{name}": value for name, value in self.evaluated.items()},
            "lr": self.lr,
            "samples_per_s": self.samples_per_s,
            "seconds": self.train_s,
        }


def by_update(losses: Sequence[float], first: int, every: int) -> dict[int, float]:
    """Return the means of `every` losses each, by the last one's update; `first`: the first loss's update."""
    pieces = [losses[start : start + every] for start in range(0, len(losses), every)]
    return {first + every * n + len(piece) - 1: sum(piece) / len(piece) for n, piece in enumerate(pieces)}


def best_epoch(history: Sequence[EpochRecord]) -> EpochRecord | None:
    """Return the first epoch of the highest score; None if no epoch has one."""
    scored = [record for record in history if not math.isnan(record.score)]
    return max(scored, key=lambda record: record.score, default=None)


def best_update(history: Sequence[EpochRecord]) -> int | None:
    """Return the number of updates at the end of the best epoch; None if no epoch has a score."""
    best = best_epoch(history)
    return max(best.losses, default=None) if best else None


@dataclass(frozen=True, slots=True)
class Progress:
    """The finished epochs of a run, and the statistics of the current one."""

    history: list[EpochRecord] = field(default_factory=list)
    trained: Tally = field(default_factory=Tally)
    train_s: float = 0.0
    elapsed_s: float = 0.0
    stages: Stats = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # per update
    unseen_epochs: int = 0  # part of the format, always 0, as the next
    unseen_batches: int = 0
