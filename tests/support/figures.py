"""An epoch's figures, made up."""

from __future__ import annotations

from pipetrain.checkpoint.epoch_record import EpochRecord
from pipetrain.schedule.timeline import StageStats


def figures(epoch: int, correct: int = 5, train_s: float = 2.0) -> EpochRecord:
    """40 training samples in `train_s` seconds; of 10 test samples `correct` are right."""
    return EpochRecord(
        epoch=epoch,
        trained={"loss": 2.0 / epoch, "acc": min(epoch, 4) / 4},
        evaluated={"loss": 3.0, "acc": correct / 10},
        score=correct / 10,
        samples=40,
        losses={4 * epoch - 2: 2.5 / epoch, 4 * epoch: 1.5 / epoch},
        rates={4 * epoch - 2: 0.2 / epoch, 4 * epoch: 0.1 / epoch},
        lr=0.1 / epoch,
        train_s=train_s,
        eval_s=0.5,
        stages={
            0: StageStats(4, 1.5, 0.4, 2, 2, {0: 1, 1: 3}, bytes_sent=1000, raw_bytes=2000, codec_s=0.25),
            1: StageStats(4, 0.5, 1.2, 1, 1, {0: 4}, bytes_sent=500, raw_bytes=500),
        },
        elapsed_s=3.0 * epoch,
        ended=1_000_000.0 + 3 * epoch,
    )
