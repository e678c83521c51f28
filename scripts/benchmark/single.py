"""Suite: one process, where a pipeline is of no use: what the engine takes from a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator

from benchmark.figures import Row, Scale, Series, timed_row
from benchmark.models import CONTIGUOUS, MODELS, SMALL
from benchmark.ours import Ours
from benchmark.rounds import race
from benchmark.tasks import Task, prepare
from benchmark.theirs import Plain
from benchmark.worlds import Say, run_world, titled
from pipetrain.runtime.mesh import Mesh

BATCHES = 4  # a turn
PLAIN, OURS, ALIKE = "plain loop", "1f1b", "1f1b, contiguous"


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure, and give the rows as they come."""
    for model, task in MODELS.items():
        task = SMALL if scale.quick else task
        series = run_world(measure, 1, titled(say, f"one process, {model}"), task, scale.rounds)[0]
        against = {"of bound": PLAIN}
        yield timed_row(f"one process, {model}", PLAIN, series, against)
        for name in (OURS, ALIKE):
            yield timed_row(f"one process, {model}", name, series, against, {"of bound": 0.98})


def measure(mesh: Mesh, say: Say, task: Task, rounds: int) -> Series:
    """Race them."""
    whole = task.extended("microbatches=1")
    plain = Plain(PLAIN, prepare(whole, "1f1b", 1), mesh, BATCHES)
    tasks = {OURS: whole, ALIKE: whole.extended(CONTIGUOUS)}
    ours = [Ours(name, prepare(task, "1f1b", 1), mesh, BATCHES) for name, task in tasks.items()]
    return race(mesh, [plain, *ours], rounds, say)
