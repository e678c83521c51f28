"""Suite: stages that sleep for times that vary at random, to see what an order decided while running gains.

A static order makes a stage wait whenever another one is late; fbp goes on with what is ready, as far as
`in_flight` and `buffer_size` let it. All sleep the same times, microbatch by microbatch, so the bound is the
stage that sleeps longest, and what is left of the ratio is the order. Messages are of 1 MiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from benchmark.figures import Row, Scale, Series, timed_row
from benchmark.ours import Ours
from benchmark.rounds import race
from benchmark.sleep import Nap, naps, task
from benchmark.tasks import prepare
from benchmark.worlds import Say, run_world, titled
from pipetrain.runtime.mesh import Mesh

FULL_SIZE = Nap(0.01, 0.02, (2, 4), (1,), 96, spread=0.5)
SMALL = Nap(0.004, 0.008, (2,), (1,), 24, spread=0.5)
STATIC = "pipedream, buffer_size 2"
CONTESTANTS = {
    STATIC: ("pipedream", "buffer_size=2"),
    "pipedream, buffer_size 8": ("pipedream", "buffer_size=8"),
    "fbp, in_flight 4, buffer_size 2": ("fbp", "schedule.in_flight=4", "buffer_size=2"),
    "fbp, in_flight 8, buffer_size 4": ("fbp", "schedule.in_flight=8", "buffer_size=4"),
    "fbp, in_flight 16, buffer_size 8": ("fbp", "schedule.in_flight=16", "buffer_size=8"),
}


def suite(scale: Scale, say: Say) -> Iterator[Row]:
    """Measure, and give the rows as they come."""
    nap = SMALL if scale.quick else FULL_SIZE
    for ranks in nap.ranks:
        title = f"jitter, {ranks} stages"
        yield from make_rows(title, *run_world(measure, ranks, titled(say, title), nap, scale.rounds)[0])


def measure(mesh: Mesh, say: Say, nap: Nap, rounds: int) -> tuple[Series, list[float], dict[str, float]]:
    """Race everybody, on one rank; returns the series, the bounds of the rounds, and mean staleness."""
    contestants = [_contestant(name, mesh, nap) for name in CONTESTANTS]
    series = race(mesh, contestants, rounds, say)
    staleness: list[dict[str, float]] = mesh.gather("how late gradients were", _lateness(contestants))  # type: ignore[assignment]
    return series, _bounds(mesh.world.size, nap, rounds), staleness[0]


def _contestant(name: str, mesh: Mesh, nap: Nap) -> Ours:
    schedule, *overrides = CONTESTANTS[name]
    work = task(nap, mesh.world.size, 1).extended(*overrides)
    return Ours(name, prepare(work, schedule, mesh.world.size, nap.pieces), mesh)


def _lateness(contestants: list[Ours]) -> dict[str, float]:
    """Say by how many updates a gradient is late on this rank, on average."""
    found = {}
    for one in contestants:
        (record,) = one.records.values()
        found[one.name] = record.mean_staleness
    return found


def _bounds(ranks: int, nap: Nap, rounds: int) -> list[float]:
    """Return the seconds a batch of the stage that sleeps longest, in each round; the first turn warms up."""
    asleep = [
        [
            sum(pair)
            for pair in islice(naps(s, nap.forward_s, nap.backward_s, nap.spread), nap.pieces * (rounds + 1))
        ]
        for s in range(ranks)
    ]
    turns = range(nap.pieces, nap.pieces * (rounds + 1), nap.pieces)
    return [max(sum(of[turn : turn + nap.pieces]) for of in asleep) / nap.pieces for turn in turns]


def make_rows(benchmark: str, series: Series, bounds: list[float], staleness: dict[str, float]) -> list[Row]:
    """Hold everybody against the static order and the bound."""
    everything = {**series, "bound": bounds}
    rows = []
    for name in CONTESTANTS:
        title = f"{name}: {staleness[name]:.2f} updates late on stage 0"
        against = {"x pipedream": STATIC, "of bound": "bound"}
        least = {"x pipedream": 1.05} if name.startswith("fbp, in_flight 8") else {}
        rows.append(timed_row(benchmark, title, {**everything, title: series[name]}, against, least))
    return rows
