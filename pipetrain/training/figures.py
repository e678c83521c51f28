"""What the trainer tells the recorder once an epoch; apart from both: training needs nothing that draws."""

from __future__ import annotations

from dataclasses import dataclass

from pipetrain.runtime.engine import StageRecord
from pipetrain.runtime.tally import Tally


@dataclass(frozen=True, slots=True)
class EpochFigures:
    """An epoch (counted from 1) as all ranks together know it. Times in seconds, by stage where a mapping."""

    epoch: int
    trained: Tally
    evaluated: Tally
    lr: float  # of the last update
    train_s: float
    eval_s: float
    busy_s: dict[int, float]
    wait_s: dict[int, float]
    records: dict[int, StageRecord]

    @property
    def samples_per_s(self) -> float:
        """Training samples a second, evaluation not counted."""
        return self.trained.samples / self.train_s
