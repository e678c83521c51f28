"""Suite `held`: what stages hold at the peak, measured beside what the plan predicted, in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from benchmark.contestants import BatchFeed
from benchmark.report import Row, Verdict
from benchmark.tasks import Job, Scale, Task, prepare
from benchmark.worlds import Say, fitted, run_world, titled
from pipetrain.network.values import on_each
from pipetrain.plan.memory import memory, optimizer_state, sized
from pipetrain.runtime.feed import Target
from pipetrain.runtime.held import Meter
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.order import order_of
from pipetrain.runtime.session import make_engine, make_stages
from pipetrain.schedule.memory import PARTS, peaks

WINDOWS = 2  # the second one is measured: it has the optimizer's state from its start
BATCHES = 6  # of a window of an asynchronous schedule
NEAR = 0.10  # of what was predicted

IMAGES = ("microbatches=4", "batch_size=16")
TEXT = ("data=text", "task=language_modelling", "optim=adamw", "microbatches=4", "batch_size=8")
MODELS = {
    "vgg16": Task(("model=vgg16", *IMAGES)),
    "resnet18": Task(("model=resnet18", *IMAGES)),
    "gpt": Task(("model=gpt", *TEXT, "model.depth=4", "model.width=128", "model.heads=4"), None),
    "unet": Task(("experiment=unet", "batch_size=16", "microbatches=4"), None),
}
SMALL = {"mlp": Task(("model=mlp", *IMAGES))}
SCHEDULES = ("1f1b", "gpipe", "pipedream", "pipedream_2bw", "interleaved_1f1b")
SPLIT = ("zb_h1", "zb_h2", "zbv", "v_half", "v_async", "zb_auto")


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a model, a schedule, and more overrides of the configuration."""

    model: str
    schedule: str
    ranks: int = 2
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.model, self.schedule, f"{self.ranks} ranks", *self.overrides))


@dataclass(frozen=True, slots=True)
class Found:
    """The peaks of one stage."""

    stage: int
    measured: Mapping[str, int]  # in total, and of each part
    predicted: Mapping[str, int]


def cases(quick: bool) -> list[Case]:
    """Return what is run."""
    if quick:
        return [Case("mlp", "pipedream")]
    made = [Case(model, schedule) for model in MODELS for schedule in SCHEDULES]
    made += [Case(model, "1f1b", 2, (f"microbatches={m}",)) for model in MODELS for m in (2, 8)]
    made += [Case(model, "1f1b", 4) for model in MODELS]
    modes = ("except_last", "always", "selective")
    for model in MODELS:
        made += [Case(model, "1f1b", 3, (f"recompute={mode}",)) for mode in modes]
        made += [Case(model, schedule, 3) for schedule in SPLIT]
        made += [Case(model, "zbv", 2, (f"recompute={mode}",)) for mode in modes]
    return made


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Run each case in processes of its own, and give the rows as they come."""
    for case in cases(scale.quick):
        for found in run_world(measure, case.ranks, titled(say, "held"), case):
            yield from (row(f"held, {case}", one) for one in found)


def job_of(case: Case) -> Job:
    """Return the job of a case, with the sizes of its stages."""
    task = ({**MODELS, **SMALL}[case.model]).extended(*case.overrides)
    job = prepare(task, case.schedule, case.ranks, BATCHES)
    return replace(job, plan=sized(job.plan, job.task, optimizer_state(job.optimizer)))


class Feed(BatchFeed):
    """As a run's, each microbatch has tensors of its own."""

    def input(self, mb: int) -> tuple[Tensor, ...]:
        """Return a copy of a microbatch's samples."""
        return tuple(t.clone() for t in super().input(mb))

    def target(self, mb: int) -> Target:
        """Return a copy of a microbatch's targets."""
        target = super().target(mb)
        return replace(target, value=on_each(target.value, Tensor.clone))


def measure(mesh: Mesh, say: Say, case: Case) -> list[Found]:
    """Measure the stages of one rank."""
    job = job_of(case)
    plan = job.plan
    mesh = fitted(mesh, plan)
    stages = make_stages(plan, job.model, job.task, job.optimizer, plan.settings.rate(1), mesh)
    engine = make_engine(plan, stages, mesh)
    for number in range(WINDOWS):
        say(f"{case}: window {number + 1}")
        if number + 1 == WINDOWS:
            engine.watcher = meter = Meter(stages, mesh.device)
        order = order_of(plan, max(plan.windows), mesh.world.rank)
        engine.train(order, Feed(job, mesh.device), job.microbatches)
    measured = meter.close()
    predicted = peaks(memory(plan, plan.timeline()))
    own = zip(sorted(measured.stages), peaks([measured.stages]), strict=True)
    return [Found(stage, held, predicted[stage]) for stage, held in own]


def row(benchmark: str, found: Found) -> Row:
    """Make the row of one stage."""
    ratio = found.measured["total"] / found.predicted["total"]
    off = {name: (found.measured[name], found.predicted[name]) for name in PARTS}
    parts = ", ".join(f"{name} {a / 2**20:.2f}/{b / 2**20:.2f}" for name, (a, b) in off.items() if a or b)
    verdict = Verdict(f"{1 - NEAR:.2f} to {1 + NEAR:.2f} ({parts})", abs(ratio - 1) <= NEAR)
    return Row(benchmark, f"stage {found.stage}, measured / predicted", [ratio], "", verdicts=[verdict])
