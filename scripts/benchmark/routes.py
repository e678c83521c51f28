"""Suite: what a U-Net's skips carry by routes, and handed on by hand through every stage.

The same model, cut and batch, twice: with its skips as they are, each of which travels straight from the
stage that makes it to the one that uses it; and with layers that take and return tuples, so that every cut
between the two carries it once more, as it must where a stage sends to the next one alone. The bytes are
counted twice too: on paper, from the plan, and by the channel, of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from benchmark.contestants import Ours, race
from benchmark.report import Row, Series, Verdict, ratio
from benchmark.tasks import Job, Scale, Task, prepare
from benchmark.worlds import Say, run_world, titled
from pipetrain.models import unet
from pipetrain.network.chain import Pop, Stash
from pipetrain.network.values import named_layers
from pipetrain.runtime.mesh import Mesh

STAGES = (4, 8)  # a process each
SCHEDULE = "1f1b"  # what is sent is the same by every schedule
SHAPES = Task(("model=unet", "data=shapes", "task=segmentation", "batch_size=8", "microbatches=4"), None)
UNET = SHAPES.extended("data.size=64")
SMALL = SHAPES.extended("data.size=16", "model.levels=3", "model.width=2")
ROUTES, BY_HAND = "by routes", "by hand through every stage"


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured, by contestant: seconds a batch, MiB of a batch sent and on paper, the last loss."""

    series: Series
    sent: Mapping[str, float]
    paper: Mapping[str, float]
    losses: Mapping[str, float]


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure each number of stages, and give its rows."""
    for stages in STAGES[:1] if scale.quick else STAGES:
        title = f"routes, {stages} stages"
        yield from make_rows(title, run_world(measure, stages, titled(say, title), scale)[0])


def measure(mesh: Mesh, say: Say, scale: Scale) -> Found:
    """Race both, on one rank; the cut is that which `flops` chooses for the model as it is."""
    task, stages = SMALL if scale.quick else UNET, mesh.world.size
    jobs = {ROUTES: prepare(task, SCHEDULE, stages)}
    cuts = str(jobs[ROUTES].plan.cuts).replace(" ", "")
    handed = task.extended("model._target_=benchmark.routes.by_hand", f"partition={cuts}")
    jobs[BY_HAND] = prepare(handed, SCHEDULE, stages)
    contestants = [Ours(name, job, mesh) for name, job in jobs.items()]
    series = race(mesh, contestants, scale.rounds, say)
    mine = {one.name: (_sent(one), one.losses) for one in contestants}
    ranks: list[dict[str, tuple[int, list[float]]]] = mesh.gather("what was sent", mine)
    batches = scale.rounds + 1  # with the warm-up
    return Found(
        series,
        sent={name: sum(rank[name][0] for rank in ranks) / batches / 2**20 for name in jobs},
        paper={name: on_paper(job) / 2**20 for name, job in jobs.items()},
        losses={name: ranks[-1][name][1][-1] for name in jobs},
    )


def _sent(one: Ours) -> int:
    return sum(record.bytes_sent for record in one.stats.values())


def on_paper(job: Job) -> int:
    """Return the bytes of a batch that enter the stages behind the first, and of their gradients."""
    plan = job.plan
    return job.microbatches * sum(sum(plan.wire_bytes(stage, job.size)) for stage in range(1, plan.stages))


def make_rows(benchmark: str, found: Found) -> list[Row]:
    """Hold the bytes by routes against those by hand, both against the plan, and the two losses together."""
    rows = []
    for name, seconds in found.series.items():
        ratios = {"MiB a batch": found.sent[name], "MiB on paper": found.paper[name]}
        verdicts = [Verdict("MiB as on paper", found.sent[name] == found.paper[name])]
        if name == ROUTES:
            same = math.isclose(found.losses[ROUTES], found.losses[BY_HAND], rel_tol=1e-4)
            verdicts.append(Verdict("fewer MiB than by hand", found.sent[ROUTES] < found.sent[BY_HAND]))
            verdicts.append(Verdict("the loss by hand", same))
            ratios = {"x by hand": ratio(found.series[BY_HAND], seconds)} | ratios
        rows.append(Row(benchmark, name, [1000 * s for s in seconds], "ms", ratios, verdicts))
    return rows


class HandedOn(nn.Module):
    """A layer of a chain in which the open skips are handed on behind its own value, the latest one last.

    `opens`: its input is a skip, to be handed on from here; `closes`: it uses the latest skip.
    """

    def __init__(self, layer: nn.Module, opens: bool, closes: bool) -> None:
        super().__init__()
        self.layer = layer
        self._opens, self._closes = opens, closes

    def forward(self, value: Tensor | Sequence[Tensor]) -> Tensor | tuple[Tensor, ...]:
        first, *skips = (value,) if isinstance(value, Tensor) else value
        out: Tensor = self.layer((first, skips.pop())) if self._closes else self.layer(first)
        skips += [first] if self._opens else []
        return (out, *skips) if skips else out


def by_hand(**sizes: int) -> nn.Sequential:
    """Return a U-Net of the same layers and weights, whose skips go through every layer between their ends.

    A Stash and a Pop do nothing in it: the layer behind each begins or ends the skip, so that no cut carries
    a tensor twice.
    """
    model, handed = unet(**sizes), nn.Sequential()
    before: nn.Module | None = None
    for name, layer in named_layers(model):
        kept = nn.Identity() if isinstance(layer, Stash | Pop) else layer
        handed.add_module(name, HandedOn(kept, isinstance(before, Stash), isinstance(before, Pop)))
        before = layer
    return handed
