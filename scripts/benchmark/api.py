"""Suite `api`: what pipetrain.Pipeline adds to the engine, over stages so small that nearly all is overhead.

A Pipeline takes turns with an engine of the same plan, which is given the same batch from memory. What is
between them is the API: reading the batch on rank 0, telling the ranks of it, sending the targets to the last
one, and telling every rank the loss. A rank then starts a batch when the last stage has ended the one before.

The processor time of each rank's thread is measured too, which other programs on the machine hardly change.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from benchmark.contestants import Contestant, Ours, race, rotated
from benchmark.overhead import TASK, cpu_seconds
from benchmark.report import Row, Series, Verdict
from benchmark.tasks import Scale, prepare
from benchmark.worlds import Say, run_world, titled
from pipetrain import Pipeline
from pipetrain.runtime.mesh import Mesh

RANKS, MICROBATCHES, BATCHES = 2, 4, 50
SCHEDULES = ("1f1b", "pipedream")
ENGINE, STEP, TRAIN, LOADER = "engine alone", "step", "train, a list", "train, a DataLoader"
MOST_MS = 1.0


class Way:
    """One way to train a number of batches."""

    def __init__(self, name: str, batches: int, train: Callable[[], list[float]]) -> None:
        self.name, self.batches, self.microbatches = name, batches, MICROBATCHES
        self.losses: list[float] = []
        self._train = train

    def run(self) -> None:
        """Train them."""
        self.losses = self._train()


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure each schedule in processes of its own, and give the rows as they come."""
    batches = 3 if scale.quick else BATCHES
    for schedule in SCHEDULES:
        title = f"api, {schedule}"
        by_rank = run_world(measure, RANKS, titled(say, title), schedule, batches, scale)
        yield from make_rows(title, by_rank[0][0])
        for rank, (_, processor) in enumerate(by_rank):
            yield from make_rows(f"{title}, processor of rank {rank}", processor)


def measure(mesh: Mesh, say: Say, schedule: str, batches: int, scale: Scale) -> tuple[Series, Series]:
    """Race the ways to train, on one rank; returns the seconds a batch, and the processor's of its thread."""
    made = ways(mesh, schedule, batches)
    series = race(mesh, made, scale.rounds, say)
    processor: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(scale.rounds):
        for one in rotated(made, number):
            processor[one.name].append(cpu_seconds(mesh, one) / one.batches)
    return {one.name: series[one.name] for one in made}, dict(processor)


def ways(mesh: Mesh, schedule: str, batches: int) -> list[Contestant]:
    """Make the engine, a Pipeline and its ways to train. An asynchronous schedule has one window, no step."""
    task = TASK.extended(f"microbatches={MICROBATCHES}")
    mine, job = (prepare(task, schedule, RANKS, batches) for _ in range(2))
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    os.environ |= dict(zip(names, map(str, (mesh.world.rank, RANKS) * 2), strict=True))
    pipe = Pipeline(
        job.model,
        job.task,
        lambda parameters: job.optimizer([("", parameter) for parameter in parameters]),
        schedule,
        microbatches=MICROBATCHES,
        partition="even",
        threads=1,
        device="cpu",
    )
    batch = job.samples, job.targets
    loader: DataLoader[Any] = DataLoader(ConcatDataset([TensorDataset(*batch)] * batches), len(job.samples))
    made: list[Contestant] = [
        Ours(ENGINE, mine, mesh, batches),
        Way(TRAIN, batches, lambda: list(pipe.train([batch] * batches))),
        Way(LOADER, batches, lambda: list(pipe.train(loader))),
    ]
    if max(job.plan.windows) == 1:
        made.append(Way(STEP, batches, lambda: [pipe.step(*batch) for _ in range(batches)]))
    return made


def make_rows(benchmark: str, series: Series) -> list[Row]:
    """Hold the milliseconds that each way adds to a batch of the engine against the target."""
    rows = [Row(benchmark, ENGINE, [1000 * s for s in series[ENGINE]], "ms")]
    for name in (name for name in series if name != ENGINE):
        added = [1000 * (s - alone) for s, alone in zip(series[name], series[ENGINE], strict=True)]
        verdict = Verdict(f"< {MOST_MS:g} ms a batch", median(added) < MOST_MS)
        rows.append(Row(benchmark, f"{name}: added to it", added, "ms", verdicts=[verdict]))
    return rows
