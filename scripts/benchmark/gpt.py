"""Suite `gpt`: a small GPT on two processes, beside torch.distributed.pipelining with the same cut.

All train on the same blocks of the text that ships, for the same next tokens, in the same microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmark.contestants import FULL, RIVALS, SCHEDULES, Alone, Contestant, Ours, Plain, TorchPipeline, race
from benchmark.report import Row, Series, timed_row
from benchmark.tasks import Job, Scale, Task, prepare
from benchmark.worlds import Say, run_world, titled
from pipetrain.runtime.mesh import Mesh

RANKS = 2
BATCHES, WINDOW = 2, 12  # of a turn; of pipedream's window
TEXT = Task(("model=gpt", "data=text", "task=language_modelling", "optim=adamw", "microbatches=4"), None)
GPT = TEXT.extended("model.depth=6", "model.width=256", "model.heads=4", "batch_size=16")
SMALL = TEXT.extended("model.depth=2", "model.width=16", "model.heads=2", "batch_size=8", "data.block=16")
OURS = ("gpipe", "1f1b", "pipedream")
IDEAL, ONE_THREAD = "ideal without messages", "one process, 1 thread"


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure, and give the rows."""
    yield from make_rows(run_world(measure, RANKS, titled(say, "gpt"), scale)[0])


def measure(mesh: Mesh, say: Say, scale: Scale) -> Series:
    """Race everybody, on one rank."""
    task, batches, window = (SMALL, 1, 8) if scale.quick else (GPT, BATCHES, WINDOW)
    return race(mesh, contestants(mesh, task, batches, window), scale.rounds, say)


def contestants(mesh: Mesh, task: Task, batches: int, window: int) -> list[Contestant]:
    """Build everybody at the cut that flops chooses. gpipe and 1f1b flush after each batch."""

    def job() -> Job:
        return prepare(task, "1f1b", RANKS)

    made: list[Contestant] = [Alone(IDEAL, job(), mesh, batches)]
    made += [Ours(name, prepare(task, name, RANKS, window), mesh, batches) for name in OURS]
    made += [TorchPipeline(name, job(), mesh, batches) for name in SCHEDULES]
    made.append(Plain("torch DDP", job(), mesh, batches, parallel=True))
    made.append(Plain(ONE_THREAD, job(), mesh, batches))
    return made


def make_rows(series: Series) -> list[Row]:
    """Hold everybody against the ideal, torch's pipelines and one thread."""
    against = {
        "of bound": IDEAL,
        **{f"x {rival}": rival for rival in RIVALS.values()},
        "x 1 thread": ONE_THREAD,
    }
    least = {name: {f"x {rival}": 1.0} for name, rival in RIVALS.items()}
    least |= {name: {f"x {RIVALS['1f1b']}": 1.15} for name in ("pipedream", f"pipedream{FULL}")}
    return [timed_row("gpt", name, series, against, least.get(name)) for name in series]
