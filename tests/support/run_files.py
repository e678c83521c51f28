"""What a run writes, made up: numbers of an epoch, traced windows, a changed manifest; and a full disk."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipetrain.checkpoint import files
from pipetrain.checkpoint.epoch_record import EpochRecord
from pipetrain.schedule.actions import Program, Ties, ranks_of
from pipetrain.schedule.simulate import BufferSize, simulate
from pipetrain.schedule.timeline import Costs, Row, Span, StageStats, Timeline, TracedWindow


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest, and let it have the right checksum."""
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    data.pop("sha256")
    change(data)
    path.write_text(json.dumps({**data, "sha256": files._digest(data)}))


def put(*keys: str, to: Any) -> Callable[[dict[str, Any]], None]:
    *outer, last = keys

    def change(data: dict[str, Any]) -> None:
        for key in outer:
            data = data[key]
        data[last] = to

    return change


@contextmanager
def full_disk(pid: int = 0, room: int = 0) -> Iterator[None]:
    """Let a process (0: this one) write no file that is larger than `room` bytes.

    A write raises EFBIG, because Python ignores the signal; pipes take what they are given.
    """
    before = resource.prlimit(pid or os.getpid(), resource.RLIMIT_FSIZE)
    resource.prlimit(pid or os.getpid(), resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid or os.getpid(), resource.RLIMIT_FSIZE, before)


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


def as_measured(
    program: Program,
    costs: Costs,
    microbatches: int = 1,
    *,
    windows: int = 1,
    microbatch: int = 4,
    ties: Ties = (),
    buffer_size: BufferSize = 2,
) -> list[TracedWindow]:
    """Windows of one epoch in which a lowered program ran by `costs`, one after the other."""
    run = simulate(program, microbatches, cost=costs, ties=ties, buffer_size=buffer_size)
    samples = [microbatch] * (1 + max(action.mb for actions in program for action in actions))
    made = []
    for window in range(windows):
        began, end = window * run.makespan, (window + 1) * run.makespan
        rows = []
        for row in run.rows:
            spans = [span._replace(start=began + span.start, end=began + span.end) for span in row.spans]
            drain = Span(None, spans[-1].end, end, end - spans[-1].end)
            rows.append(Row(began, end, [*spans, drain]))
        made.append(TracedWindow(0, samples, Timeline(rows, microbatches)))
    return made


def about(program: Program, microbatches: int, microbatch: int = 4) -> dict[str, Any]:
    """What a trace of these windows says of its run."""
    rank_of = [rank for rank, *_ in ranks_of(program)]
    return {
        "model": "mlp",
        "parameters": 1000,
        "schedule": "1f1b",
        "ranks": len(program),
        "placement": rank_of,
        "partition": list(range(1, len(rank_of))),
        "batch_size": microbatches * microbatch,
        "microbatches": microbatches,
        "dtype": "float32",
        "precision": "fp32",
        "memory_format": "channels_last",
    }
