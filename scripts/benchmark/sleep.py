"""Suites `sleep` and `jitter`: stages that only sleep, so only what a schedule adds to that can differ.

Each stage sleeps in its forward and its backward and passes on a message of 1 MiB. Cores do not matter:
sleeping takes none. In `sleep` the bound is what `simulate` says for those times and free messages.

In `jitter` the times vary at random, to see what an order decided while running gains. A static order makes a
stage wait whenever another one is late; fbp goes on with what is ready, as far as `in_flight` and
`buffer_size` let it. All sleep the same times, microbatch by microbatch, so the bound is the stage that
sleeps longest, and what is left of the ratio is the order.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from benchmark.contestants import FULL, RIVALS, SCHEDULES, Alone, Contestant, Ours, TorchPipeline, race
from benchmark.paced import sleep_until
from benchmark.report import Row, Series, timed_row
from benchmark.tasks import Scale, Task, prepare
from benchmark.worlds import Say, run_world, titled
from pipetrain.runtime.mesh import Mesh
from pipetrain.schedule.actions import Op
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Costs

FEATURES = 2**18  # float32: a sample is a message of 1 MiB
CLASSES = 10
ALONE = "each stage alone, m = 1"  # what F, B, a loss and a step take beside the naps


@dataclass(frozen=True, slots=True)
class Nap:
    """Seconds that a rank sleeps for a microbatch, over all its stages; and what is tried."""

    forward_s: float
    backward_s: float
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    pieces: int  # microbatches that an asynchronous window has, at least
    spread: float = 0.0  # share by which times vary at random, evenly, around those

    @property
    def seconds(self) -> float:
        """Return what a microbatch takes on one rank."""
        return self.forward_s + self.backward_s


SLEEP, SLEEP_SMALL = Nap(0.03, 0.06, (2, 4), (4, 16), 32), Nap(0.005, 0.01, (2,), (4,), 24)
JITTER, JITTER_SMALL = Nap(0.01, 0.02, (2, 4), (1,), 96, 0.5), Nap(0.004, 0.008, (2,), (1,), 24, 0.5)
STATIC = "pipedream, buffer_size 2"
JITTERED: dict[str, tuple[str, ...]] = {  # contestants: a schedule and overrides
    STATIC: ("pipedream", "buffer_size=2"),
    "pipedream, buffer_size 8": ("pipedream", "buffer_size=8"),
    "fbp, in_flight 4, buffer_size 2": ("fbp", "schedule.in_flight=4", "buffer_size=2"),
    "fbp, in_flight 8, buffer_size 4": ("fbp", "schedule.in_flight=8", "buffer_size=4"),
    "fbp, in_flight 16, buffer_size 8": ("fbp", "schedule.in_flight=16", "buffer_size=8"),
}


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, features: int, naps: tuple[float, float]) -> Tensor:
        start = time.perf_counter()
        ctx.entered, ctx.nap = x.shape, naps[1]
        y = x[:, :features].clone()
        sleep_until(start + naps[0])
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        start = time.perf_counter()
        given = grad if grad.shape == ctx.entered else grad.new_zeros(ctx.entered)
        sleep_until(start + ctx.nap)
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
    overrides = (
        "model._target_=benchmark.sleep.sleepers",
        f"+model.stages={ranks * slices}",
        f"+model.forward_s={nap.forward_s / slices}",
        f"+model.backward_s={nap.backward_s / slices}",
        f"+model.spread={nap.spread}",
        "partition=even",
        f"batch_size={microbatches}",
        f"microbatches={microbatches}",
    )
    return Task(overrides, (FEATURES,), CLASSES)


def bound(contestant: Ours, nap: Nap) -> float:
    """Return the seconds a batch that a turn takes on paper, with messages that take no time."""
    plan = contestant.plan
    slices = plan.stages // plan.settings.ranks
    seconds = {Op.F: nap.forward_s / slices, Op.B: nap.backward_s / slices}
    costs = Costs({(stage, op): s for stage in range(plan.stages) for op, s in seconds.items()})
    run = simulate(
        plan.window.program, plan.settings.microbatches, buffer_size=plan.settings.buffer_size, cost=costs
    )
    return run.makespan / max(plan.windows)


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure `sleep`, and give the rows as they come."""
    nap = SLEEP_SMALL if scale.quick else SLEEP
    for ranks in nap.ranks:
        title = f"sleep, {ranks} stages"
        yield from make_rows(title, *run_world(measure, ranks, titled(say, title), nap, scale.rounds)[0])


def measure(mesh: Mesh, say: Say, nap: Nap, rounds: int) -> tuple[Series, dict[str, float]]:
    """Race everybody, on one rank; returns the series, and what each should be on paper."""
    ranks = mesh.world.size
    ours = [_ours("layer_dist", 1, mesh, nap), _ours("pipedream", 1, mesh, nap)]
    theirs: list[Contestant] = []
    for m in nap.microbatches:
        ours += [_ours(name, m, mesh, nap) for name in ("gpipe", "1f1b", "interleaved_1f1b", "pipedream_2bw")]
        for name in SCHEDULES:
            theirs.append(TorchPipeline(name, prepare(task(nap, ranks, m), "1f1b", ranks), mesh, _batches(m)))
            theirs[-1].name += f", m = {m}"
    theirs.append(Alone(ALONE, prepare(task(nap, ranks, 1), "1f1b", ranks), mesh, _batches(1)))
    bounds = {ALONE: nap.seconds}
    for one in ours:
        bounds[one.name] = bound(one, nap)
        bounds[one.name + FULL] = one.microbatches * nap.seconds
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
        bounded = {**series, "bound": [bounds[name]] * len(seconds)}
        rows.append(timed_row(benchmark, name, bounded, against, least))
    return rows


def jitter_suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure `jitter`, and give the rows as they come."""
    nap = JITTER_SMALL if scale.quick else JITTER
    for ranks in nap.ranks:
        title = f"jitter, {ranks} stages"
        world = run_world(measure_jitter, ranks, titled(say, title), nap, scale.rounds)
        yield from make_jitter_rows(title, *world[0])


def measure_jitter(
    mesh: Mesh, say: Say, nap: Nap, rounds: int
) -> tuple[Series, list[float], dict[str, float]]:
    """Race everybody, on one rank; returns the series, the bounds of the rounds, and mean staleness."""
    ranks = mesh.world.size
    contestants = []
    for name, (schedule, *overrides) in JITTERED.items():
        work = task(nap, ranks, 1).extended(*overrides)
        contestants.append(Ours(name, prepare(work, schedule, ranks, nap.pieces), mesh))
    series = race(mesh, contestants, rounds, say)
    mine = {one.name: record.mean_staleness for one in contestants for record in one.stats.values()}
    by_rank: list[dict[str, float]] = mesh.gather("how late gradients were", mine)
    return series, jitter_bounds(ranks, nap, rounds), by_rank[0]


def jitter_bounds(ranks: int, nap: Nap, rounds: int) -> list[float]:
    """Return the seconds a batch of the stage that sleeps longest, in each round; the first turn warms up."""
    bounds = []
    for turn in range(1, rounds + 1):
        slept = []
        for stage in range(ranks):
            times = naps(stage, nap.forward_s, nap.backward_s, nap.spread)
            slept.append(sum(map(sum, islice(times, turn * nap.pieces, (turn + 1) * nap.pieces))))
        bounds.append(max(slept) / nap.pieces)
    return bounds


def make_jitter_rows(
    benchmark: str, series: Series, bounds: list[float], staleness: dict[str, float]
) -> list[Row]:
    """Hold everybody against the static order and the bound."""
    rows = []
    for name in JITTERED:
        title = f"{name}: {staleness[name]:.2f} updates late on stage 0"
        against = {"x pipedream": STATIC, "of bound": "bound"}
        least = {"x pipedream": 1.05} if name.startswith("fbp, in_flight 8") else {}
        everything = {**series, "bound": bounds, title: series[name]}
        rows.append(timed_row(benchmark, title, everything, against, least))
    return rows
