"""What each rank knows of an epoch, and what they know together.

The ranks of the last stage count samples and losses, each those of its own microbatches.
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
    """What one rank knows of an epoch, so far or as a whole.

    `trained`, `losses` (one an update), `evaluated`: what a rank of the last stage has counted. `ran`: the
    actions of each window, as text.
    """

    stages: Stats
    trained: Tally
    losses: list[float]
    evaluated: Tally = field(default_factory=Tally)
    train_s: float = 0.0
    eval_s: float = 0.0
    ran: list[list[str]] = field(default_factory=list)
    peak_bytes: PeakBytes | None = None  # of the window whose memory was measured, if it was of this epoch


class RankRecords(NamedTuple):
    """The records of all ranks; `last`: of those of the last stage."""

    all: list[RankRecord]
    last: list[RankRecord]

    @classmethod
    def gather(cls, groups: ProcessGroups, what: str, mine: RankRecord, last: Sequence[int]) -> RankRecords:
        """Return the records of all, on every rank. `last`: the last stage's ranks. Raises ChannelError."""
        gathered = enumerate(groups.gather(what, asdict(mine)))
        ranks = [read_as(RankRecord, one, f"{what} of rank {rank}") for rank, one in gathered]
        return cls(ranks, [ranks[rank] for rank in last])

    @property
    def trained(self) -> Tally:
        return summed([rank.trained for rank in self.last])

    @property
    def evaluated(self) -> Tally:
        return summed([rank.evaluated for rank in self.last])

    @property
    def losses(self) -> list[float]:
        """The mean loss of each update, which all ranks of the last stage know."""
        return self.last[0].losses

    @property
    def stages(self) -> Stats:
        """The statistics of each stage over its replicas."""
        parts: dict[int, list[StageStats]] = defaultdict(list)
        for rank in self.all:
            for stage, stats in rank.stages.items():
                parts[stage].append(stats)
        return {stage: of_replicas(of) for stage, of in parts.items()}
