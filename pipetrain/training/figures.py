"""What is known of a run as it goes: of each epoch, and of the one that is not over.

Apart from trainer and recorder: training needs nothing that draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipetrain.runtime.record import StageRecord
from pipetrain.runtime.tally import Tally

Records = dict[int, StageRecord]


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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EpochFigures:
        """Read what `asdict` and JSON made of one."""
        tallies = {key: Tally(**data[key]) for key in ("trained", "evaluated")}
        times = {key: {int(stage): s for stage, s in data[key].items()} for key in ("busy_s", "wait_s")}
        late = {int(stage): _counts(counts) for stage, counts in data["staleness"].items()}
        return cls(**{**data, **tallies, **times, "staleness": late, "records": _records(data["records"])})


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
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """Read what `to_json` and JSON made of one."""
        return cls(
            history=[EpochFigures.from_json(figures) for figures in data["history"]],
            trained=Tally(**data["trained"]),
            train_s=data["train_s"],
            elapsed_s=data["elapsed_s"],
            records=_records(data["records"]),
            before=_records(data["before"]),
            since=data["since"],
            uncounted=data["uncounted"],
        )


def _records(data: Mapping[str, Any]) -> Records:
    return {
        int(stage): StageRecord(**{**record, "staleness": _counts(record["staleness"])})
        for stage, record in data.items()
    }


def _counts(data: Mapping[str, int]) -> dict[int, int]:
    return {int(key): count for key, count in data.items()}
