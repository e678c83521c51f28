"""Suite `lengths`: batches that each have a length of their own, beside the same ones padded to the longest.

A batch's samples have one length, as where a sampler puts those of like lengths together; the batches of a
turn have from an eighth of the longest to all of it. Torch's pipelines take one shape: the padded batches.
The padding does not count, so that all have the same losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from benchmark.contestants import Builders, Contestant, Ours, rows_of_race, torch_pipeline
from benchmark.models import RANKS, SMALL, TEXT
from benchmark.report import Row
from benchmark.tasks import Scale, Task, prepare
from benchmark.worlds import Say
from pipetrain.runtime.comm.process_groups import ProcessGroups

TASK = TEXT.extended("model.depth=4", "model.width=128", "model.heads=4", "batch_size=16", "data.block=128")
SCHEDULES = ("1f1b", "zb_h1")
PARTS = 8  # of the longest, and batches of a turn
OWN, PADDED, TORCH = "own lengths", "padded", "torch, padded"
SHARE = (PARTS + 1) / (2 * PARTS)
"""Of the padded batches' tokens."""
LEAST = {f"{OWN}, {name}": {"x padded": round(0.85 / SHARE, 2), "x torch's": 1.0} for name in SCHEDULES}


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Race a GPT on batches of their own lengths beside padded ones."""
    task, longest = (SMALL["gpt"], 16) if scale.quick else (TASK, 128)
    lengths = [longest * part // PARTS for part in (3, 8, 1, 6, 4, 2, 7, 5)]
    make = partial(contestants, task.extended("microbatches=4"), lengths)
    against = {"x padded": f"{PADDED}, {{m}}", "x torch's": f"{TORCH}, {{m}}"}
    title = f"lengths, {SHARE:.0%} of the tokens of padded batches"
    yield from rows_of_race(title, RANKS, make, scale, say, against, LEAST)


def contestants(task: Task, lengths: Sequence[int], groups: ProcessGroups) -> Builders:
    """Return what builds everybody; a turn is a batch of each length."""

    def build(name: str, schedule: str, who: str) -> Contestant:
        job = prepare(replace(task, lengths=who == OWN), schedule, RANKS)
        each = [job.of_length(length) for length in lengths]
        if who == TORCH:
            return torch_pipeline(schedule, job, groups, len(each), name, each)
        return Ours(name, job, groups, len(each), others=each)

    every = ((f"{who}, {schedule}", schedule, who) for schedule in SCHEDULES for who in (OWN, PADDED, TORCH))
    return {name: partial(build, name, schedule, who) for name, schedule, who in every}
