"""Suite `replicas`: stages with replicas beside their bound, torch's DDP, and what paper predicts.

First on the machine of `paced`: the products of a stage take as long as it has replicas, so that all ranks
are busy. The bound is what `simulate` says with free messages and sums. Then a stage that is three times as
slow as the other, alone and with three replicas. All are of one world, where ranks that a pipeline does not
have wait, so that they take turns.

Then VGG16 on two processes. Replicas of the whole model do what DistributedDataParallel does: half of the
batch on each. `of predicted`: what the plan says by a profile that is measured there, of what it took. Last
VGG16 by 1f1b and pipedream with several replicas on 2, 3 and 4 processes, beside what the plans say alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from benchmark.contestants import Builders, Contestant, Ours, Ways, plain, rows_of_race
from benchmark.models import TASKS, WHOLE
from benchmark.paced import PRODUCTS, Paced, task_of
from benchmark.report import DIGITS, Row
from benchmark.schedules import with_costs
from benchmark.tasks import Scale, Task, prepare
from benchmark.worlds import Say, fitted
from pipetrain.plan.plan import Plan
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.actions import Op
from pipetrain.schedule.timeline import Costs

RANKS, SCHEDULES = 4, ("1f1b", "pipedream")
BALANCED = ([1, 1], [2, 1], [2, 2], [3, 1])
SLOW = ([1, 1], [1, 3])  # replicas where the times are as 1 to 3
WINDOW, BATCHES = 2, 4  # batches of a window of pipedream; of a turn of VGG16
PLACED = {2: ([1, 1], [2]), 3: ([2, 1], [1, 2], [3]), 4: ([2, 2],)}  # by processes
LEAST, GAIN, NEAR = 0.95, 2.5, 0.10
DDP, DDP_SHARE = "torch DDP", 0.97
PREDICTED = "of predicted"


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Race replicas of sleeping stages, then those of VGG16."""
    sizes = (6, 0.004) if scale.quick else (24, 0.02)
    alone, helped = map(str, SLOW)
    for schedule in SCHEDULES:
        title, make = f"replicas, {schedule}", partial(sleeping, schedule, *sizes)
        least = {str(of): {"of bound": LEAST} for of in BALANCED}
        yield from rows_of_race(title, RANKS, partial(make, BALANCED, None), scale, say, {}, least)
        title, gain = f"{title}, times 1 : 3", {helped: {f"x {alone}": GAIN}}
        make = partial(make, SLOW, (1, 3))
        yield from rows_of_race(title, RANKS, make, scale, say, {f"x {alone}": alone}, gain)
    task = Task(("model=mlp", "batch_size=16")) if scale.quick else TASKS["vgg16"].extended("batch_size=32")
    ddp = {"replicas=2": {f"x {DDP}": DDP_SHARE}}
    make = partial(on_two, task, 1 if scale.quick else BATCHES)
    for row in rows_of_race("replicas, VGG16", 2, make, scale, say, {f"x {DDP}": DDP}, ddp):
        yield predicted(row)
    for ranks, several in PLACED.items():
        words = [(schedule, f"replicas={of}".replace(" ", "")) for schedule in SCHEDULES for of in several]
        ways = {", ".join(way): (*way, "microbatches=6") for way in words}
        make = partial(planned, task.extended("batch_size=48"), 1 if scale.quick else BATCHES, ways)
        yield from map(
            predicted, rows_of_race(f"replicas, VGG16, {ranks} ranks", ranks, make, scale, say, {}, {})
        )


def sleeping(
    schedule: str,
    microbatches: int,
    product_s: float,
    ways: Sequence[list[int]],
    times: Sequence[int] | None,
    groups: ProcessGroups,
) -> Builders:
    """Return what builds everybody: replicas of two stages whose products take these times, or as many."""

    def build(replicas: list[int]) -> Contestant:
        words = f"window={1 if schedule == '1f1b' else WINDOW}", f"replicas={replicas}".replace(" ", "")
        job = prepare(task_of(2, microbatches).extended(*words), schedule, sum(replicas), WINDOW)
        each = [product_s * taken for taken in times or replicas]
        products = {Op.F: 1, Op.B: PRODUCTS - 1}
        costs = Costs({(stage, op): n * each[stage] for stage in range(2) for op, n in products.items()})
        plan = with_costs(job.plan, costs)
        bound = plan.timeline().makespan / max(plan.windows)
        stage = next((n for n, ranks in enumerate(plan.placement) if groups.world.rank in ranks), None)
        if stage is None:
            return Idle(str(replicas), plan, bound, groups)
        return Paced(Ours(str(replicas), job, groups), each[stage], bound)

    return {str(of): partial(build, of) for of in ways}


class Idle:
    """A rank that a pipeline does not have: it joins the process groups, and no more."""

    def __init__(self, name: str, plan: Plan, bound: float, groups: ProcessGroups) -> None:
        fitted(groups, plan)
        self.name, self.batches, self.bound = name, max(plan.windows), bound
        self.losses: list[float] = []

    def run(self) -> None:
        """Do nothing."""


def on_two(task: Task, batches: int, groups: ProcessGroups) -> Builders:
    """Return what builds replicas of the whole model and a pipeline, beside DDP, each with one thread."""

    def theirs() -> Contestant:
        return plain(DDP, prepare(task.extended(WHOLE), "1f1b", 2), groups, batches, parallel=True)

    ways = {"replicas=2": ("1f1b", "replicas=2", "microbatches=2"), "1f1b": ("1f1b", "microbatches=4")}
    return {DDP: theirs, **planned(task, batches, ways, groups)}


def planned(task: Task, batches: int, ways: Ways, groups: ProcessGroups) -> Builders:
    """Return what builds contestants of ours, each by a profile; its bound is what the plan says."""

    def build(name: str, schedule: str, *words: str) -> Contestant:
        window = 1 if schedule == "1f1b" else batches
        job = prepare(task.extended("partition=profile", *words), schedule, groups.world.size, window, groups)
        racing = Ours(name, job, groups, batches)
        racing.bound = job.plan.timeline().makespan / racing.window
        return racing

    return {name: partial(build, name, *way) for name, way in ways.items()}


def predicted(row: Row) -> Row:
    """Return a row whose bound is what a plan predicts, which holds in both directions."""
    ratios = {PREDICTED if name == "of bound" else name: value for name, value in row.ratios.items()}
    if (share := ratios.get(PREDICTED)) is None:
        return row
    near = {f"{PREDICTED} within {NEAR:.0%}": round(abs(share - 1), DIGITS) <= NEAR}
    return replace(row, ratios=ratios, targets={**row.targets, **near})
