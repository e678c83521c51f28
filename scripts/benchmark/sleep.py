"""Suite: stages that only sleep, so that the time besides the schedule's own is all that can differ.

Each stage sleeps in its forward and its backward and passes on a message of 1 MiB; the bound is what
`simulate` says for those times and free messages. Cores do not matter: sleeping takes none.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.figures import Row, Scale, Series, timed_row
from benchmark.ours import Ours
from benchmark.rounds import FULL, Contestant, race
from benchmark.tasks import Task, prepare
from benchmark.theirs import RIVALS, SCHEDULES, Alone, TorchPipeline
from benchmark.worlds import Say, run_world, titled
from pipetrain.runtime.mesh import Mesh
from pipetrain.schedule.actions import Op
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Costs

FEATURES = 2**18  # float32: a sample is a message of 1 MiB
CLASSES = 10
ALONE = "each stage alone, m = 1"  # what F, B, a loss and a step take beside the naps
WAKING_S = 3e-4  # of looking at the clock instead of sleeping


@dataclass(frozen=True, slots=True)
class Nap:
    """Seconds that a rank sleeps for a microbatch, over all its stages; and what is tried."""

    forward_s: float
    backward_s: float
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    pieces: int  # microbatches that an asynchronous window has, at least
    spread: float = 0.0  # share by which times vary at random, evenly, around those


FULL_SIZE = Nap(0.03, 0.06, (2, 4), (4, 16), 32)
SMALL = Nap(0.005, 0.01, (2,), (4,), 24)


def _sleep_until(end: float) -> None:
    """Return at `end` and not some tenths of a millisecond later, as a sleep does."""
    time.sleep(max(0.0, end - time.perf_counter() - WAKING_S))
    while time.perf_counter() < end:
        pass


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, features: int, naps: tuple[float, float]) -> Tensor:
        start = time.perf_counter()
        ctx.entered, ctx.nap = x.shape, naps[1]
        y = x[:, :features].clone()
        _sleep_until(start + naps[0])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        start = time.perf_counter()
        given = grad if grad.shape == ctx.entered else grad.new_zeros(ctx.entered)
        _sleep_until(start + ctx.nap)
        return given, grad.new_ones(1), None, None


def naps(stage: int, forward_s: float, backward_s: float, spread: float) -> Iterator[tuple[float, float]]:
    """Give the seconds of a stage's forwards and backwards, evenly spread by a share around their mean.

    The same for everybody, in the same order.
    """
    chance = random.Random(stage)
    while True:
        yield tuple(s * chance.uniform(1 - spread, 1 + spread) for s in (forward_s, backward_s))  # type: ignore[misc]


class Sleeper(nn.Module):
    """Hands on the first `features` of [n, FEATURES] after a nap, with one weight to step."""

    def __init__(self, features: int, naps: Iterator[tuple[float, float]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._features = features
        self._naps = naps

    def forward(self, x: Tensor) -> Tensor:
        """Sleep; the backward will."""
        y: Tensor = _Asleep.apply(x, self.weight, self._features, next(self._naps))  # type: ignore[no-untyped-call]
        return y


def sleepers(stages: int, forward_s: float, backward_s: float, spread: float = 0.0) -> nn.Sequential:
    """Return a model of so many stages; the seconds are each stage's. The last gives scores [n, CLASSES]."""
    features = [FEATURES] * (stages - 1) + [CLASSES]
    return nn.Sequential(
        *(Sleeper(count, naps(stage, forward_s, backward_s, spread)) for stage, count in enumerate(features))
    )


def task(nap: Nap, ranks: int, microbatches: int, slices: int = 1) -> Task:
    """Return the sleepers as something to train: a microbatch is one sample."""
    model = {
        "stages": ranks * slices,
        "forward_s": nap.forward_s / slices,
        "backward_s": nap.backward_s / slices,
        "spread": nap.spread,
    }
    return Task(
        (
            "model._target_=benchmark.sleep.sleepers",
            *(f"+model.{key}={value}" for key, value in model.items()),
            "partition=even",
            f"batch_size={microbatches}",
            f"microbatches={microbatches}",
        ),
        (FEATURES,),
        CLASSES,
    )


def bound(contestant: Ours, nap: Nap) -> float:
    """Return the seconds a batch that a turn takes on paper, with messages that take no time."""
    plan = contestant.plan
    slices = plan.stages // plan.settings.ranks
    seconds = {Op.F: nap.forward_s / slices, Op.B: nap.backward_s / slices}
    costs = Costs({(stage, op): s for stage in range(plan.stages) for op, s in seconds.items()})
    window = plan.window.program
    run = simulate(window, plan.settings.microbatches, buffer_size=plan.settings.buffer_size, cost=costs)
    return run.makespan / max(plan.windows)


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure, and give the rows as they come."""
    nap = SMALL if scale.quick else FULL_SIZE
    for ranks in nap.ranks:
        title = f"sleep, {ranks} stages"
        series, bounds = run_world(measure, ranks, titled(say, title), nap, scale.rounds)[0]
        yield from make_rows(title, series, bounds)


def measure(mesh: Mesh, say: Say, nap: Nap, rounds: int) -> tuple[Series, dict[str, float]]:
    """Race everybody, on one rank; returns the series, and what each should be on paper."""
    ranks = mesh.world.size
    ours = [_ours("layer_dist", 1, mesh, nap), _ours("pipedream", 1, mesh, nap)]
    theirs: list[Contestant] = []
    bounds: dict[str, float] = {}
    for m in nap.microbatches:
        ours += [_ours(schedule, m, mesh, nap) for schedule in ("gpipe", "1f1b", "interleaved_1f1b")]
        ours.append(_ours("pipedream_2bw", m, mesh, nap))
        for name in SCHEDULES:
            job = prepare(task(nap, ranks, m), "1f1b", ranks)
            theirs.append(TorchPipeline(name, job, mesh, _batches(m)))
            theirs[-1].name += f", m = {m}"
    theirs.append(Alone(ALONE, prepare(task(nap, ranks, 1), "1f1b", ranks), mesh, _batches(1)))
    bounds[ALONE] = nap.forward_s + nap.backward_s
    for one in ours:
        bounds[one.name] = bound(one, nap)
        bounds[one.name + FULL] = one.microbatches * (nap.forward_s + nap.backward_s)
        if (rival := _rival(one.name)) is not None:
            bounds[rival] = bounds[one.name]
    return race(mesh, [*ours, *theirs], rounds, say), bounds


def _ours(schedule: str, m: int, mesh: Mesh, nap: Nap) -> Ours:
    ranks = mesh.world.size
    slices = 2 if schedule == "interleaved_1f1b" else 1
    window = max(nap.pieces // m, 2 * ranks + 2)
    job = prepare(task(nap, ranks, m, slices), schedule, ranks, window)
    return Ours(f"{schedule}, m = {m}", job, mesh, _batches(m))


def _batches(m: int) -> int:
    """Return so many that a turn is no mere moment."""
    return max(1, 8 // m)


def _rival(name: str) -> str | None:
    schedule, _, m = name.partition(",")
    return f"{RIVALS[schedule]},{m}" if schedule in RIVALS else None


def make_rows(benchmark: str, series: Series, bounds: dict[str, float]) -> list[Row]:
    """Hold everybody against the bound, and ours against theirs."""
    rows: list[Row] = []
    for name, seconds in series.items():
        against, least = {"of bound": "bound"}, {}
        rival = _rival(name)
        if rival is not None:
            column = f"x {rival.partition(',')[0]}"
            against[column] = rival
            least = {"of bound": 0.98, column: 1.0}
        elif name.startswith("pipedream,") and name.endswith(FULL):
            least = {"of bound": 0.98}
        rows.append(
            timed_row(benchmark, name, {**series, "bound": [bounds[name]] * len(seconds)}, against, least)
        )
    return rows
