"""Suite `overhead`: what the engine takes an action, over stages so small that nearly all is overhead.

Processor time of each rank's thread, less that of a plain loop over the same stages: a thread that waits
takes none, and other programs on the machine hardly change it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

from torch import nn

from benchmark.contestants import Contestant, Ours, alone
from benchmark.report import Row
from benchmark.tasks import Scale, Task, prepare
from benchmark.worlds import Say, run_world, titled
from pipetrain.runtime.mesh import Mesh

RANKS, BATCHES = 2, 50
SCHEDULES = ("layer_dist", "gpipe", "1f1b", "pipedream", "pipedream_2bw")
MOST_US = 150.0
TASK = Task(("model._target_=benchmark.overhead.tiny", "partition=even", "batch_size=16"), (8,), 8)


def tiny() -> nn.Sequential:
    """Return two layers that compute next to nothing."""
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure all schedules in the same processes."""
    ranks = run_world(measure, RANKS, titled(say, "overhead"), scale)
    for schedule in ranks[0]:
        for rank, microseconds in enumerate(found[schedule] for found in ranks):
            met = {f"< {MOST_US:g} us": median(microseconds) < MOST_US}
            yield Row("overhead, an action", f"{schedule}, rank {rank}", microseconds, "us", targets=met)


def measure(mesh: Mesh, say: Say, scale: Scale) -> dict[str, list[float]]:
    """Return, for one rank, the microseconds of an action in each round, by schedule."""
    batches = 10 if scale.quick else BATCHES
    found = {}
    for schedule in ("1f1b",) if scale.quick else SCHEDULES:
        say(schedule)
        task = TASK.extended(f"microbatches={1 if schedule == 'layer_dist' else 4}")
        engine = Ours(schedule, prepare(task, schedule, RANKS, batches), mesh, batches)
        plain = alone("plain", prepare(task, "1f1b", RANKS), mesh, batches)
        program = engine.plan.windows[engine.window].program[mesh.world.rank]
        actions = len(program) * engine.batches / engine.window
        seconds = [cpu_seconds(mesh, engine) - cpu_seconds(mesh, plain) for _ in range(scale.rounds + 1)]
        found[schedule] = [1e6 * s / actions for s in seconds[1:]]  # the first warms up
    return found


def cpu_seconds(mesh: Mesh, contestant: Contestant) -> float:
    """Return the processor time that this rank's thread takes for a turn."""
    mesh.gather("the start of a turn", None)
    start = time.thread_time()
    contestant.run()
    return time.thread_time() - start
