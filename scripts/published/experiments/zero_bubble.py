"""Zero bubble: bubble and memory of six schedules, by simulation and on stages that sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from typing import Any

from hydra.utils import instantiate

from benchmark.contestants import Builders, Contestant, Ours
from benchmark.paced import Paced
from benchmark.schedules import WAYS, WINDOW, Way, bound, prepared
from pipetrain.commands.cli import composed
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.schedule.actions import most_open, ranks_of
from pipetrain.schedule.lower import lower
from pipetrain.schedule.simulate import simulate
from published.measures import Race, raced
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step, those

LAW: dict[str, tuple[float, Callable[[int], int]]] = {
    "1f1b": (1, lambda p: p),
    "zb_h1": (1 / 3, lambda p: p),
    "zb_h2": (0, lambda p: 2 * p - 1),
    "zbv": (0, lambda p: p),
    "v_half": (1 / 2, lambda p: (p + 2) // 2),
    "v_min": (2 / 3, lambda p: (p + 4) // 3),
}
"""As published: which part of the time in 1f1b's bubble, and the memory of p ranks in microbatches."""
FIRST, RANKS = "1f1b", (4, 8, 16, 32)
TIMES, BATCHES = 3, 16  # microbatches of a batch, in ranks; batches of a window on paper
GAINS = {"zbv": 1.23, "zb_h2": 1.31}  # the most that was measured there, over 1f1b
POINTS, NEAR = 1.0, 0.05  # of a bubble in %, for what a window of BATCHES has at its ends; of a gain


def steps(quick: bool) -> dict[str, Step]:
    """Simulate all sizes, and race on processes."""
    sizes, races = ((2,), [(2, 4, 0.001, 1)]) if quick else (RANKS, [(4, 12, 0.04, 3)])
    names = ("ranks", "microbatches", "product_s", "rounds")
    return {
        **{f"paper {p}": Step(planned, {"ranks": p, "microbatches": TIMES * p}, timed=False) for p in sizes},
        **{f"run {race[0]}": Step(slept, dict(zip(names, race, strict=True))) for race in races},
    }


def planned(ranks: int, microbatches: int) -> dict[str, tuple[float, float]]:
    """Return each schedule's bubble in %, and its fullest rank's memory, in microbatches of a rank's part.

    F, I and W take the same time.
    """
    results = {}
    for name in LAW:
        schedule = instantiate(composed("config", [f"schedule={name}"]).schedule)
        program = schedule(ranks, BATCHES, microbatches)
        slices = len(ranks_of(program)) // ranks
        run = simulate(lower(program), microbatches)
        results[name] = 100 * run.bubble, max(most_open([row.actions]) for row in run.rows) / slices
    return results


def rate(ranks: int, share: float) -> float:
    """Return the bubble in % whose time is a share of that of 1f1b, p - 1 of F, I and W in TIMES p."""
    bubble = share * (ranks - 1)
    return 100 * bubble / (TIMES * ranks + bubble)


def slept(ranks: int, microbatches: int, product_s: float, rounds: int) -> Any:
    """Race the schedules on stages whose products sleep."""
    return raced(partial(contestants, microbatches, product_s), ranks, rounds)


def contestants(microbatches: int, product_s: float, groups: ProcessGroups) -> Builders:
    """Return what builds each schedule, on one rank."""
    slices = {way.schedule: way.slices for way in WAYS.values()}

    def build(name: str) -> Contestant:
        way = Way(name, WINDOW, slices[name])
        job, one_s = prepared(way, groups.world.size, microbatches, product_s)
        return Paced(Ours(name, job, groups), one_s, bound(job.plan, one_s))

    return {name: partial(build, name) for name in LAW}


def show(results: Results) -> Iterator[Finding]:
    """Hold bubbles, memory and gains against what was published."""
    papers = {int(p): of for p, of in those(results, "paper ").items()}
    races = {int(p): Race(of) for p, of in those(results, "run ").items()}
    law = {p: rate(p, 1) for p in papers}
    bubbles, memories, gains = list[Series](), list[Series](), list[Line]()
    for name, (share, memory) in LAW.items():
        published = {p: rate(p, share) for p in papers}, {p: memory(p) / p for p in papers}
        bubble = {p: of[name][0] for p, of in papers.items()}
        parts = {p: of[name][1] / p for p, of in papers.items()}
        bubbles.append(Series(name, "bubble", "ranks", bubble, How.PLANNED, "%", published[0]))
        memories.append(Series(name, "memory", "ranks", parts, How.PLANNED, "x 1f1b", published[1]))
        more = max(bubble[p] - published[0][p] for p in papers)
        says = f"{share:.2g} of 1f1b's time" if share else "0"
        yield Check.of(f"{name}: bubble", says, (-100, POINTS), more, How.PLANNED, unit=" points more")
        here, there = ([round(p * of[p]) for p in papers] for of in (parts, published[1]))
        said, says = (" ".join(map(str, of)) for of in (there, here))
        yield Check(f"{name}: memory, microbatches", said, "the same", says, here == there, How.PLANNED)
        if name == FIRST:
            continue
        faster = {p: (100 - bubble[p]) / (100 - of[FIRST][0]) for p, of in papers.items()}
        if most := GAINS.get(name):
            what, says = f"{name}: gain, free of all else", f"up to {most:.2f} x 1f1b, measured"
            yield Check.of(what, says, (most, inf), max(faster.values()), How.PLANNED)
        ran = {p: race.ratio(name, FIRST) for p, race in races.items()}
        bounds = {p: ran[p] / race.of_bound(name) * race.of_bound(FIRST) for p, race in races.items()}
        ratios = {p: race.ratios(name, FIRST) for p, race in races.items()}
        yield Series.measured(name, "speed", "ranks", ratios, unit="x 1f1b", bound=bounds)
        for p, bound_s in bounds.items():
            limits = bound_s * (1 - NEAR), bound_s * (1 + NEAR)
            yield Check.of(f"{name}, {p} ranks: run as planned", NOT, limits, ran[p], How.RUN)
        gains += [Line(name, How.PLANNED, faster), Line(name, How.RUN, ran)]
    yield from (*bubbles, *memories)
    lines = [*(of.line() for of in bubbles), Line("(p-1)/(m+p-1)", How.BOUND, law)]
    yield Chart("Bubble, m = 3 p, windows of 16 batches", "ranks p", "% of the time", lines, "x")
    yield Chart("Memory of the fullest rank", "ranks p", "x 1f1b", [of.line() for of in memories], "x")
    yield Chart("Speed; runs in windows of 4 batches", "ranks p", "x 1f1b", gains, "x")
