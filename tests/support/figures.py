"""An epoch's figures, made up."""

from __future__ import annotations

from pipetrain.runtime.record import StageRecord
from pipetrain.runtime.tally import Tally
from pipetrain.training.figures import EpochFigures


def figures(epoch: int, correct: int = 5, train_s: float = 2.0) -> EpochFigures:
    """40 training samples in `train_s` seconds; of 10 test samples `correct` are right."""
    return EpochFigures(
        epoch=epoch,
        trained=Tally(loss=80.0 / epoch, correct=10 * min(epoch, 4), samples=40),
        evaluated=Tally(loss=30.0, correct=correct, samples=10),
        lr=0.1 / epoch,
        train_s=train_s,
        eval_s=0.5,
        busy_s={0: 1.5, 1: 0.5},
        wait_s={0: 0.4, 1: 1.2},
        staleness={0: {0: 1, 1: 3}, 1: {0: 4}},
        records={
            0: StageRecord(
                2,
                2,
                {0: epoch, 1: 3 * epoch},
                busy_s=1.5 * epoch,
                wait_s=0.4 * epoch,
                bytes_sent=1000 * epoch,
                raw_bytes=2000 * epoch,
                codec_s=0.25 * epoch,
            ),
            1: StageRecord(
                1,
                1,
                {0: 4 * epoch},
                busy_s=0.5 * epoch,
                wait_s=1.2 * epoch,
                bytes_sent=500 * epoch,
                raw_bytes=500 * epoch,
            ),
        },
        elapsed_s=3.0 * epoch,
        ended=1_000_000.0 + 3 * epoch,
    )
