"""Zero bubble: bubble and memory of six schedules, by simulation and on stages that sleep."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
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

LAW = {  # parts of 1f1b's bubble, and of its memory
    "1f1b": (1, 1),
    "zb_h1": (1 / 3, 1),
    "zb_h2": (0, 2),
    "zbv": (0, 1),
    "v_half": (1 / 2, 1 / 2),
    "v_min": (2 / 3, 1 / 3),
}
FIRST, RANKS = "1f1b", (4, 8, 16, 32)
TIMES, BATCHES = 3, 16  # microbatches of a batch, in ranks; batches of a window on paper
GAINS = {"zbv": 1.23, "zb_h2": 1.31}  # the most that was published, over 1f1b
POINTS, SLACK, NEAR = 2.0, 0.25, 0.05  # of a bubble in %; of memory, of which rounding takes more; of a gain


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
    law = {p: 100 * (p - 1) / (TIMES * p + p - 1) for p in papers}
    bubbles, memories, gains = list[Series](), list[Series](), list[Line]()
    for name, (share, memory) in LAW.items():
        published = {p: share * of for p, of in law.items()}, dict.fromkeys(papers, memory)
        bubble = {p: of[name][0] for p, of in papers.items()}
        parts = {p: of[name][1] / p for p, of in papers.items()}
        bubbles.append(Series(name, "bubble", "ranks", bubble, How.PLANNED, "%", published[0]))
        memories.append(Series(name, "memory", "ranks", parts, How.PLANNED, "x 1f1b", published[1]))
        off, last = max(abs(bubble[p] - published[0][p]) for p in papers), parts[max(parts)]
        says = f"{share:.2g} of 1f1b's" if share else "about 0"
        yield Check.of(f"{name}: bubble", says, (0, POINTS), off, How.PLANNED, unit=" points off")
        limits = memory * (1 - SLACK), memory * (1 + SLACK)
        yield Check.of(f"{name}: memory", f"{memory:.2g} x 1f1b's", limits, last, How.PLANNED)
        if name == FIRST:
            continue
        faster = {p: (100 - bubble[p]) / (100 - of[FIRST][0]) for p, of in papers.items()}
        if most := GAINS.get(name):
            best, limits = max(faster.values()), (most * (1 - SLACK / 2), most * (1 + SLACK / 2))
            yield Check.of(f"{name}: gain", f"up to {most:.2f} x 1f1b", limits, best, How.PLANNED)
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
