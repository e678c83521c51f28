"""What is known of a run as it goes: of each epoch, and of the one that is not over.

Apart from trainer and recorder: training needs nothing that draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from pipetrain.checkpoint.files import Manifest
from pipetrain.checkpoint.untrusted import DamagedCheckpoint, read_as
from pipetrain.runtime.record import StageRecord
from pipetrain.runtime.tally import Tally

Records = dict[int, StageRecord]
_LEAST = 1e-9  # of what is divided by: seconds, and shares of an epoch


@dataclass(frozen=True, slots=True)
class EpochFigures:
    """An epoch (counted from 1) as all ranks together know it. Times in seconds, by stage where a mapping.

    `elapsed_s` is the run's time until its end, pauses between a stop and a resume left out; `ended` is when
    that was, in seconds since 1970.
    """

    epoch: int
    trained: Tally
    evaluated: Tally
    lr: float  # of the last update
    train_s: float
    eval_s: float
    busy_s: dict[int, float]
    wait_s: dict[int, float]
    staleness: dict[int, dict[int, int]]  # of each stage: forwards, by the updates that they were late by
    records: Records
    elapsed_s: float
    ended: float
    share: float = 1.0  # of its batches, those that `busy_s`, `wait_s`, `staleness` and the records count

    @property
    def samples_per_s(self) -> float:
        """Training samples a second, evaluation not counted."""
        return self.trained.samples / self.train_s


def most_accurate(history: Sequence[EpochFigures]) -> EpochFigures:
    """Return the first of the most accurate epochs; one without an accuracy only where all are without."""
    accuracies = (figures.evaluated.accuracy for figures in history)
    ranks = [-1.0 if math.isnan(accuracy) else accuracy for accuracy in accuracies]
    return history[ranks.index(max(ranks))]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: its finished epochs, and what is counted of the one that is not over.

    `records` are of all the run, `before` of it until that epoch began.
    """

    history: list[EpochFigures] = field(default_factory=list)
    trained: Tally = field(default_factory=Tally)
    train_s: float = 0.0
    elapsed_s: float = 0.0
    records: Records = field(default_factory=dict)
    before: Records = field(default_factory=dict)
    since: int = 0  # the epoch (from 0) from which on the records count
    uncounted: int = 0  # batches of the epoch that is not over that they do not

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
    history, since, position = progress.history, progress.since, manifest.position
    stages = set(range(len(manifest.pipeline["placement"])))
    counted: list[tuple[Mapping[int, object], ...]] = [
        (f.records, f.busy_s, f.wait_s, f.staleness) for f in history[since:]
    ]
    fits = (
        len(history) == position.epoch
        and all(figures.epoch == number for number, figures in enumerate(history, 1))
        and all(figures.train_s > _LEAST and _LEAST < figures.share <= 1 for figures in history)
        # The first epoch that counts is done, or it is the one that is not over.
        and (since < position.epoch or (since == position.epoch and (position.batch > 0 or not since)))
        and progress.uncounted <= position.batch
        and all(known.keys() == stages for known in chain([progress.records], *counted))
        and all(
            late <= position.update for f in history for counts in f.staleness.values() for late in counts
        )
    )
    if not fits:
        raise DamagedCheckpoint("its progress does not fit its position and its stages")
    return progress
