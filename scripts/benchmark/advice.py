"""Suite `advice`: schedules by one profile, in the order that the plan predicts, beside what they take.

What `python -m pipetrain.plan advise=true` says of a model with measured times, and whether it comes true: of
each schedule the time of an update, and of the one that is predicted to be fastest, whether it is. The
profile is measured once for all, in the processes that race then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import median

from benchmark.contestants import Builders, Contestant, Ours, rows_of_race
from benchmark.models import TASKS, TEXT
from benchmark.replicas import PREDICTED, predicted
from benchmark.report import Row
from benchmark.tasks import Scale, Task, prepare
from benchmark.worlds import Say
from pipetrain.plan.costs import Profile
from pipetrain.plan.schedule_choice import ERROR
from pipetrain.runtime.comm.process_groups import ProcessGroups

RANKS, BATCHES = 2, 6  # batches of a turn, and of a window that is a whole pass
SCHEDULES = (
    *("1f1b", "gpipe", "interleaved_1f1b", "zb_h1", "v_half", "zbv"),
    *("pipedream", "pipedream_2bw", "v_async"),
)
CASES = {
    "VGG16": TASKS["vgg16"],
    "GPT": TASKS["gpt"],
    "MLP": Task(("model=mlp", "model.width=1024", "batch_size=256")),
}
SMALL = {"GPT": TEXT.extended("model.depth=4", "model.width=16", "model.heads=2", "batch_size=8")}
LATE = SCHEDULES[6:]
BESIDE = "1f1b"
SLOWER = 1.05  # than the fastest that the recommended one may be


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Race the schedules of each case."""
    for name, task in (SMALL if scale.quick else CASES).items():
        words = "microbatches=4", "partition=profile"
        make = partial(by_one_profile, task.extended(*words), 2 if scale.quick else BATCHES)
        of = {f"x {BESIDE}": BESIDE}
        yield from judged([*rows_of_race(f"advice, {name}", RANKS, make, scale, say, of, {})])


def by_one_profile(task: Task, batches: int, groups: ProcessGroups) -> Builders:
    """Return what builds each schedule, with what its plan says by a profile that the first one measures."""
    measured: list[Profile] = []

    def build(name: str) -> Contestant:
        job = prepare(task, name, RANKS, batches, measured[0] if measured else groups)
        measured[:] = [job.plan.table.times]
        racing = Ours(name, job, groups, batches)
        alone = measured[0].alone
        racing.bound = job.plan.timeline().makespan_shared(alone) / racing.window
        return racing

    return {name: partial(build, name) for name in SCHEDULES}


def rated(name: str, seconds: float) -> float:
    """Return the time by which `advise` chooses: a late schedule has to be faster by more than its error."""
    return seconds * (1 + ERROR * (name in LATE))


def judged(rows: list[Row]) -> Iterator[Row]:
    """Give the rows with their predictions, and whether the one that is predicted to be fastest is."""
    rows = [predicted(row) for row in rows]
    took = {row.contestant: median(row.values) for row in rows if row.values}
    ahead = {row.contestant: row.ratios[PREDICTED] * took[row.contestant] for row in rows if row.values}
    for row in rows:
        ratios, targets = dict(row.ratios), dict(row.targets)
        if row.values and BESIDE in ahead:
            ratios[f"predicted x {BESIDE}"] = ahead[BESIDE] / ahead[row.contestant]
        if row.values and row.contestant == min(ahead, key=lambda name: rated(name, ahead[name])):
            late = took[row.contestant] / min(took.values())
            targets[f"recommended: < {SLOWER} x the fastest"] = late < SLOWER
        yield replace(row, ratios=ratios, targets=targets)
