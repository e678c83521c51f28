"""Each rank's record of an epoch, and the records of all ranks.

Each rank of the last stage counts samples and losses of its own microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from pipetrain.checkpoint.epoch_record import Stats
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.stage.memory_meter import PeakBytes
from pipetrain.schedule.timeline import StageStats, of_replicas
from pipetrain.tasks.running_sums import Tally, summed
from pipetrain.typed_json import read_as


@dataclass(frozen=True, slots=True)
class RankRecord:
    """One rank's record of an epoch, partial or complete.

    `trained`, `losses` (one per update), `evaluated`: counted by a rank of the last stage.
    """

    stages: Stats
    trained: Tally
    losses: list[float]
    evaluated: Tally = field(default_factory=Tally)
    train_s: float = 0.0
    eval_s: float = 0.0
    peak_bytes: PeakBytes | None = None  # of the measured window, if it was in this epoch


class RankRecords(NamedTuple):
    """The records of all ranks; `last`: of the last stage's ranks."""

    all: list[RankRecord]
    last: list[RankRecord]

    @classmethod
    def gather(cls, groups: ProcessGroups, what: str, record: RankRecord, last: Sequence[int]) -> RankRecords:
        """Return all ranks' records, on every rank. `last`: the last stage's ranks. Raises ChannelError."""
        gathered = enumerate(groups.gather(what, asdict(record)))
        ranks = [read_as(RankRecord, data, f"{what} of rank {rank}") for rank, data in gathered]
        return cls(ranks, [ranks[rank] for rank in last])

    @property
    def trained(self) -> Tally:
        return summed([rank.trained for rank in self.last])

    @property
    def evaluated(self) -> Tally:
        return summed([rank.evaluated for rank in self.last])

    @property
    def losses(self) -> list[float]:
        """The mean loss of each update, which all ranks of the last stage have."""
        return self.last[0].losses

    @property
    def stages(self) -> Stats:
        """The statistics of each stage over its replicas."""
        parts: dict[int, list[StageStats]] = defaultdict(list)
        for rank in self.all:
            for stage, stats in rank.stages.items():
                parts[stage].append(stats)
        return {stage: of_replicas(replicas) for stage, replicas in parts.items()}
