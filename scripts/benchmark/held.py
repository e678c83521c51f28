"""Suite `held`: the bytes that stages hold at the peak, measured beside what the plan predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmark.contestants import BatchFeed
from benchmark.report import Row, failed_row
from benchmark.tasks import Job, Scale, Task, prepare
from benchmark.worlds import Say, WorldFailed, fitted, run_world, titled
from pipetrain.config.rate import LearningRate
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.rank_actions import order_of
from pipetrain.runtime.session import make_engine
from pipetrain.runtime.stage.memory_meter import Meter
from pipetrain.runtime.stage.stage_factory import make_stages
from pipetrain.schedule.memory import peaks

WINDOWS = 2  # the second one is measured: it has the optimizer's state from its start
BATCHES = 6  # of a window of an asynchronous schedule
NEAR = 0.10  # of what was predicted

IMAGES = ("microbatches=4", "batch_size=16")
TEXT = ("data=text", "task=language_modelling", "optim=adamw", "microbatches=4", "batch_size=8")
GPT = Task(("model=gpt", *TEXT, "model.depth=4", "model.width=128", "model.heads=4"), None)
MODELS = {
    "vgg16": Task(("model=vgg16", *IMAGES)),
    "gpt": GPT,
    "gpt of lengths": replace(GPT, lengths=True),  # the first window is of a shorter one
    "unet": Task(("experiment=unet", *IMAGES), None),
    "alexnet": Task(("model=alexnet", *IMAGES)),
    "resnet50": Task(("model=resnet50", *IMAGES), (3, 16, 16)),
    "mlp": Task(("model=mlp", *IMAGES)),
}
TWO = ("1f1b", "pipedream", "pipedream_2bw", "interleaved_1f1b", "zbv")
THREE = ("zb_h1", "zb_h2", "v_async", "zb_auto")
RECOMPUTED = ("always", "selective")


@dataclass(frozen=True, slots=True)
class Case:
    """One run: a model, a schedule, and more overrides of the configuration."""

    model: str
    schedule: str
    ranks: int = 2
    overrides: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.model, self.schedule, f"{self.ranks} ranks", *self.overrides))


def cases() -> Iterator[Case]:
    """Give what is run."""
    for model in ("vgg16", "gpt", "unet"):
        yield from (Case(model, schedule) for schedule in TWO)
        yield from (Case(model, schedule, 3) for schedule in THREE)
        yield from (Case(model, "1f1b", 3, (f"recompute={mode}",)) for mode in RECOMPUTED)
    yield from (Case("gpt of lengths", schedule) for schedule in TWO)


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Run each case in processes of its own."""
    for case in [Case("mlp", "pipedream")] if scale.quick else cases():
        try:
            ranks = run_world(measure, case.ranks, titled(say, "held"), case)
        except WorldFailed as error:
            yield failed_row(f"held, {case}", "all stages", error)
            continue
        yield from (row(f"held, {case}", *stage) for stages in ranks for stage in stages)


def job_of(case: Case) -> Job:
    """Return the job of a case."""
    return prepare(MODELS[case.model].extended(*case.overrides), case.schedule, case.ranks, BATCHES)


def measure(groups: ProcessGroups, say: Say, case: Case) -> list[tuple[int, int, int]]:
    """Return what `stage_peaks` does of a case."""
    say(str(case))
    return stage_peaks(groups, job_of(case))


def stage_peaks(groups: ProcessGroups, job: Job) -> list[tuple[int, int, int]]:
    """Return each stage of one rank with its peak, measured and predicted."""
    plan = job.plan
    groups = fitted(groups, plan)
    stages = make_stages(
        plan, job.model, job.task, job.optimizer, LearningRate(plan.settings.rate(1)), groups
    )
    engine = make_engine(plan, stages, groups)
    for number in range(WINDOWS):
        meter = Meter(stages, groups.device) if number + 1 == WINDOWS else None
        order = order_of(plan, max(plan.windows), groups.world.rank)
        shorter = meter is None and plan.settings.lengths
        of = job.of_length(plan.settings.lengths[0] // 2) if shorter else job
        engine.train(order, BatchFeed(of, groups.device, clones=True), meter=meter)
    assert meter is not None
    predicted = peaks(plan.memory())
    return [(stage, nbytes, predicted[stage]["total"]) for stage, nbytes in meter.close().stages.items()]


def row(benchmark: str, stage: int, measured: int, predicted: int) -> Row:
    """Make the row of one stage."""
    share = measured / predicted
    met = {f"within {NEAR:.0%}": abs(share - 1) <= NEAR}
    return Row(benchmark, f"stage {stage}", [measured / 2**20], "MiB", {"of predicted": share}, met)
