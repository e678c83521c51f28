"""What a rank holds on the GPU, by its allocator, against the plan's prediction.

The plan predicts what stages hold between two actions. While an action runs it needs more: the gradients
between its layers, and the workspaces of a convolution. How much is measured action by action. So the peak of
a window is at least what was predicted, and at most that and what the neediest action needs.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmark.contestants import BatchFeed
from benchmark.held import NEAR, WINDOWS, Case, job_of
from benchmark.worlds import fitted
from pipetrain.config.rate import LearningRate
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.rank_actions import order_of
from pipetrain.runtime.session import make_engine
from pipetrain.runtime.stage.memory_meter import Meter
from pipetrain.runtime.stage.stage_factory import make_stages
from pipetrain.schedule.actions import Action
from pipetrain.schedule.memory import totals
from tests.gpu.rows import MIB, Row, Setting, judged
from tests.support.process_ranks import gathered

BATCH = "batch_size=128"  # in 4 microbatches
RECOMPUTED = ("recompute=always",)
TWO: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpipe", "1f1b", "pipedream", "pipedream_2bw", "zb_h1", "zb_h2", "zbv"), ()),
    "1f1b, recompute=always": RECOMPUTED,
    "1f1b, recompute=selective": ("recompute=selective",),
    "zbv, recompute=always": RECOMPUTED,
}
FOUR: dict[str, tuple[str, ...]] = dict.fromkeys(("1f1b", "pipedream", "zb_h1", "zbv"), ())


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's peaks. `counted`, `simulated`: microbatches and versions by stage; the others in bytes.

    `needed`: the most that an action needed while it ran.
    """

    counted: list[tuple[int, int]]
    simulated: list[tuple[int, int]]
    measured: int
    predicted: int
    needed: int


def memory(setting: Setting) -> Iterator[Row]:
    """Schedules with whole and split backwards, and recomputation, on 2 and 4 ranks."""
    model = "mlp" if setting.quick else "vgg16"
    for ranks, ways in ((2, {"zbv": ()}),) if setting.quick else ((2, TWO), (4, FOUR)):
        each = {name: (BATCH, "cuda_graphs=false", *more) for name, more in ways.items()}
        cases = [Case(model, name.split(",")[0], ranks, words) for name, words in each.items()]
        for name, (_, found, why) in zip(ways, setting.each(measure, ranks, cases), strict=True):
            if why:
                yield judged(f"{ranks} ranks, {name}", why, "its windows", False)
            else:
                yield from make_rows(f"{ranks} ranks, {name}", found, setting.cuda)


def make_rows(what: str, ranks: Sequence[Held], cuda: bool) -> Iterator[Row]:
    """Hold what each rank counted and measured against the plan's."""
    counted, simulated = ([getattr(rank, name) for rank in ranks] for name in ("counted", "simulated"))
    shown = (", ".join(f"{a}+{b}" for rank in pairs for a, b in rank) for pairs in (counted, simulated))
    yield judged(f"{what}: microbatches and versions", *shown, counted == simulated)
    if cuda:
        least = [(1 - NEAR) * rank.predicted for rank in ranks]
        most = [(1 + NEAR) * (rank.predicted + rank.needed) for rank in ranks]
        yield judged(
            f"{what}: MiB",
            ", ".join(f"{rank.measured / MIB:.0f}" for rank in ranks),
            ", ".join(
                f"{a / MIB:.0f} to {b / MIB:.0f} ({rank.predicted / MIB:.0f} + {rank.needed / MIB:.0f})"
                for a, b, rank in zip(least, most, ranks, strict=True)
            ),
            all(a <= rank.measured <= b for a, b, rank in zip(least, most, ranks, strict=True)),
        )


class ByAction(Meter):
    """Measures, on a GPU, the peak of a window, and the most that an action needs while it runs."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.peak = self.needed = self._before = 0

    def during(self, action: Action) -> AbstractContextManager[object]:
        self._before = allocated()
        return super().during(action)

    def after(self, messages: Iterable[tuple[Sequence[int], Tensor]]) -> dict[int, int]:
        peak = torch.cuda.max_memory_allocated()
        self.peak = max(self.peak, peak)
        self.needed = max(self.needed, peak - max(self._before, torch.cuda.memory_allocated()))
        return super().after(messages)


def allocated() -> int:
    """Forget every peak; return the bytes that are allocated."""
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def measure(groups: ProcessGroups, case: Case) -> list[Held]:
    """Run a few windows of a case on one rank, the last one measured; return what all ranks held.

    All is done twice: the first time libraries take workspaces, which they keep.
    """
    for _ in range(2 if groups.device.type == "cuda" else 1):
        held = _measure(groups, case)
        gc.collect()
    return gathered(held)


def _measure(groups: ProcessGroups, case: Case) -> Held:
    cuda, job = groups.device.type == "cuda", job_of(case)
    plan, groups = job.plan, fitted(groups, job.plan)
    feed = BatchFeed(job, groups.device, clones=True)
    before = allocated() if cuda else 0
    stages = make_stages(
        plan, job.model, job.task, job.optimizer, LearningRate(plan.settings.rate(1)), groups
    )
    engine = make_engine(plan, stages, groups)
    for number in range(WINDOWS):
        meter = ByAction(stages, groups.device) if cuda and number + 1 == WINDOWS else None
        order = order_of(plan, max(plan.windows), groups.world.rank)
        engine.train(order, feed, meter=meter)
    records = sorted(engine.stats.items())
    return Held(
        [(record.activations, record.versions) for _, record in records],
        [tuple(plan.peaks(stage))[:2] for stage, _ in records],
        meter.peak - before if isinstance(meter, ByAction) else 0,
        max(totals(plan.memory()[groups.world.rank])),
        meter.needed if isinstance(meter, ByAction) else 0,
    )
