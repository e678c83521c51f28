"""What is known of a run as it goes: of each epoch, and of the one that is not over.

Apart from trainer and recorder: training needs nothing that draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from pipetrain.checkpoint.files import Manifest
from pipetrain.checkpoint.untrusted import DamagedCheckpoint, read_as
from pipetrain.schedule.timeline import StageStats
from pipetrain.tally import Tally

Stats = dict[int, StageStats]
Loss = Annotated[float, "or infinite, or NaN"]
_LEAST = 1e-9  # of what is divided by: seconds


@dataclass(frozen=True, slots=True)
class EpochFigures:
    """An epoch (counted from 1) as all ranks together know it. Times in seconds.

    `stages` says what each stage did in it: nothing where another pipeline trained it, and less than all its
    updates where another one began it. `elapsed_s` is the run's time until its end, pauses between a stop and
    a resume left out; `ended` is when that was, in seconds since 1970.
    """

    epoch: int
    trained: Tally
    evaluated: Tally
    losses: dict[int, Loss]  # the mean loss of some updates, by the number (from 1) of the last of them
    lr: float  # of the last update
    train_s: float
    eval_s: float
    stages: Stats
    elapsed_s: float
    ended: float

    @property
    def samples_per_s(self) -> float:
        """Training samples a second, evaluation not counted."""
        return self.trained.samples / self.train_s

    @property
    def updates(self) -> int:
        """How many updates `stages` tells of."""
        return self.stages[0].updates if self.stages else 0


def by_update(losses: Sequence[float], first: int, every: int) -> dict[int, float]:
    """Return the mean of each `every` losses by the number of its last update; `first` is that of all."""
    pieces = [losses[start : start + every] for start in range(0, len(losses), every)]
    return {first + every * n + len(piece) - 1: sum(piece) / len(piece) for n, piece in enumerate(pieces)}


def most_accurate(history: Sequence[EpochFigures]) -> EpochFigures:
    """Return the first of the most accurate epochs; one without an accuracy only where all are without."""
    accuracies = (figures.evaluated.accuracy for figures in history)
    ranks = [-1.0 if math.isnan(accuracy) else accuracy for accuracy in accuracies]
    return history[ranks.index(max(ranks))]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: its finished epochs, and what is counted of the one that is not over."""

    history: list[EpochFigures] = field(default_factory=list)
    trained: Tally = field(default_factory=Tally)
    train_s: float = 0.0
    elapsed_s: float = 0.0
    stages: Stats = field(default_factory=dict)
    losses: list[Loss] = field(default_factory=list)  # of each update

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Progress:
        """Read what `to_json` and JSON made of one. Raises DamagedCheckpoint."""
        progress: Progress = read_as(cls, data, "its progress")
        return progress


def read_progress(manifest: Manifest) -> Progress:
    """Read the progress of a checkpoint, and prove that a run can go on from it. Raises DamagedCheckpoint."""
    progress = Progress.from_json(manifest.progress)
    history, position = progress.history, manifest.position
    stages = set(range(len(manifest.pipeline["placement"])))
    counted = [progress.stages, *(figures.stages for figures in history if figures.stages)]
    fits = (
        len(history) == position.epoch
        and len(progress.losses) == position.batch
        and all(figures.epoch == number for number, figures in enumerate(history, 1))
        and all(figures.train_s > _LEAST for figures in history)
        and all(known.keys() == stages for known in counted)
        and all(
            stats.updates <= position.update and stats.max_staleness <= position.update
            for known in counted
            for stats in known.values()
        )
    )
    if not fits:
        raise DamagedCheckpoint("its progress does not fit its position and its stages")
    return progress
