"""Suite `gpu`: ours over NCCL beside torch.distributed.pipelining, and one process beside a plain loop.

Two ranks share a GPU, or have one each where there are two. All train the same layers, cut, batch, precision
and memory format, and take turns; torch's contestants have an NCCL group of their own. Without a GPU,
`--quick` rehearses it over gloo on the CPU, with models so small that its times say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist

from benchmark import gpt, models
from benchmark.contestants import FULL, RIVALS, SCHEDULES, Contestant, Ours, Plain, TorchPipeline, race
from benchmark.report import Row, Series, timed_row
from benchmark.tasks import Job, Scale, Task, prepare
from benchmark.worlds import Place, Say, Work, WorldFailed, run_world, titled
from pipetrain.runtime.mesh import Mesh
from pipetrain.settings import Settings

RANKS = 2
BATCHES, WINDOW = 6, 12  # of a turn; of pipedream's window
WARMUP = 2  # rounds
TIMEOUT_S, DEADLINE_S = 60.0, 240.0  # of a wait between ranks, and of a whole race
PLAIN = "plain loop"
GRAPHS = ", CUDA graphs"
ONCE, GAIN, ALONE = 1.0, 1.2, 0.97  # of torch's same schedule; of its 1F1B, by pipedream; of the plain loop
WITH_GRAPHS = 2.0  # of torch's 1F1B, where that is a target


@dataclass(frozen=True, slots=True)
class Case:
    """What is raced by two ranks. `graphs`: the target with CUDA graphs, if there is one."""

    task: Task
    graphs: float | None = None


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is raced: by two ranks, and in one process. `batches`: of a turn; `window`: of pipedream's."""

    pairs: Mapping[str, Case]
    alone: Mapping[str, Task]
    batches: int = BATCHES
    window: int = WINDOW


def _vgg16(batch: int, pieces: int) -> Task:
    return Task(("model=vgg16", f"batch_size={batch}", f"microbatches={pieces}"))


_DEEP = ("model.depth=8", "model.width=512", "model.heads=8", "batch_size=16", "data.block=256")
WHOLE = Sizes(
    {
        "VGG16, batch 64 in 4": Case(_vgg16(64, 4), WITH_GRAPHS),
        "VGG16, batch 512 in 4": Case(_vgg16(512, 4)),
        "GPT, batch 16 in 4": Case(gpt.TEXT.extended(*_DEEP)),
    },
    {
        "VGG16, batch 64 in 1": _vgg16(64, 1),
        "VGG16, batch 64 in 4": _vgg16(64, 4),
        "VGG16, batch 512 in 8": _vgg16(512, 8),
    },
)
SMALL = Sizes(
    {
        "mlp, batch 64 in 4": Case(models.SMALL.extended("microbatches=4")),
        "GPT, batch 8 in 4": Case(gpt.SMALL),
    },
    {"mlp, batch 64 in 4": models.SMALL.extended("microbatches=4")},
    batches=1,
    window=8,
)


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure, and give the rows as they come. A race that fails does not keep the others from theirs."""
    cuda = torch.cuda.is_available()
    if not cuda and not scale.quick:
        raise WorldFailed("it needs a GPU that torch can use; --quick rehearses it over gloo on the CPU")
    place = Place("cuda", None, TIMEOUT_S, apart=True) if cuda else Place()
    prefix = "gpu" if cuda else "gpu, a rehearsal on the CPU"
    sizes = SMALL if scale.quick else WHOLE
    targets = cuda and not scale.quick
    failed: list[str] = []

    def raced(work: Work, ranks: int, title: str, task: Task) -> Series:
        """Return a race's series; of one that fails none, and note why."""
        given = task, sizes, scale.rounds
        try:
            found = run_world(work, ranks, titled(say, title), *given, place=place, deadline=DEADLINE_S)
        except WorldFailed as error:
            failed.append(f"{title}: {error}")
            return {}
        series: Series = found[0]
        return series

    for label, case in sizes.pairs.items():
        title = f"{prefix}, {label}"
        series = raced(measure, RANKS, title, case.task)
        yield from make_rows(title, series, case if targets else None)
    for label, task in sizes.alone.items():
        title = f"{prefix}, one process, {label}"
        yield from make_alone_rows(title, raced(measure_alone, 1, title, task), targets)
    if failed:
        raise WorldFailed("\n".join(failed))


def measure(mesh: Mesh, say: Say, task: Task, sizes: Sizes, rounds: int) -> Series:
    """Race everybody on two ranks. What is only known "once full" is left out: the host runs ahead."""
    torch.set_float32_matmul_precision("high")
    group = _group(mesh)
    series = race(mesh, contestants(mesh, task, sizes, group), rounds, say, WARMUP)
    return {name: seconds for name, seconds in series.items() if not name.endswith(FULL)}


def _group(mesh: Mesh) -> dist.ProcessGroup:
    """Return a group of all ranks that has been used once."""
    group = dist.new_group(list(range(mesh.world.size)), backend=mesh.backend)
    assert isinstance(group, dist.ProcessGroup)
    dist.all_reduce(torch.ones(1, device=mesh.device), group=group)
    return group


def contestants(mesh: Mesh, task: Task, sizes: Sizes, group: dist.ProcessGroup) -> list[Contestant]:
    """Build everybody at the cut that flops chooses. gpipe and 1f1b flush after each batch."""

    def job(schedule: str, *overrides: str) -> Job:
        window = sizes.window if schedule == "pipedream" else 1
        return prepare(task.extended(*overrides), schedule, mesh.world.size, window)

    made: list[Contestant] = [
        Ours(name, job(name), mesh, sizes.batches) for name in ("1f1b", "gpipe", "pipedream")
    ]
    if mesh.device.type == "cuda" and "cuda_graphs" in {one.name for one in fields(Settings)}:
        made += [
            Ours(name + GRAPHS, job(name, "cuda_graphs=true"), mesh, sizes.batches)
            for name in ("1f1b", "pipedream")
        ]
    made += [
        TorchPipeline(name, job("1f1b"), mesh, sizes.batches, group, arranged=True) for name in SCHEDULES
    ]
    return made


def measure_alone(mesh: Mesh, say: Say, task: Task, sizes: Sizes, rounds: int) -> Series:
    """Race ours in one process against a plain loop over the same microbatches."""
    torch.set_float32_matmul_precision("high")
    plain, mine = (prepare(task, "1f1b", 1) for _ in range(2))
    both: list[Contestant] = [
        Plain(PLAIN, plain, mesh, sizes.batches, pieces=plain.microbatches, arranged=True),
        Ours("1f1b", mine, mesh, sizes.batches),
    ]
    return race(mesh, both, rounds, say, WARMUP)


def make_rows(benchmark: str, series: Series, case: Case | None) -> list[Row]:
    """Hold ours against torch's same schedule and its 1F1B. `case`: None where there are no targets."""
    against = {f"x {rival}": rival for rival in RIVALS.values()}
    once = f"x {RIVALS['1f1b']}"
    least: dict[str, dict[str, float]] = {}
    if case is not None:
        least = {name: {f"x {rival}": ONCE} for name, rival in RIVALS.items()} | {"pipedream": {once: GAIN}}
        if case.graphs is not None:
            least |= {name + GRAPHS: {once: case.graphs} for name in ("1f1b", "pipedream")}
    return [timed_row(benchmark, name, series, against, least.get(name)) for name in series]


def make_alone_rows(benchmark: str, series: Series, targets: bool) -> list[Row]:
    """Hold ours against the plain loop."""
    column = f"x {PLAIN}"
    least = {"1f1b": {column: ALONE}} if targets else {}
    return [timed_row(benchmark, name, series, {column: PLAIN}, least.get(name)) for name in series]
