"""Where late gradients pay: simulated time to the same loss beside the best exact schedule at equal memory.

A cell is a number of stages and of microbatches a batch, a case what messages and actions take. The late
contestant is the study's: `pipedream_2bw` where a batch has as many microbatches as there are stages, else
`pipedream`, synchronous at first (hybrid, for the share that the study chose) and with a prediction. It holds
some weights more; an exact schedule may hold as much in activations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any

from comparison.table import Table
from published.experiments.staleness import SYNCHRONOUS, Row, rows_of
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Step, those
from published.trials import Way
from published.update_times import CASES, EXACT, LATE, Case, late_of, simulated

STUDY = Path(__file__).resolve().parents[3] / "docs/results/staleness/staleness.json"
OPTIMIZER, DEPTH = "muon", 8  # of the study, which knows no updates at greater depth
CURES = {"pipedream_2bw": "hybrid+spectrain", "pipedream": "hybrid+gap_aware+msnag"}
COPIES = {"pipedream_2bw": 1, "pipedream": 2}  # of the weights, that these keep: see pipetrain/correction.py
DRAWN = 400  # times that seeds are drawn again
STATE = 3  # a rank's weights, their gradients and one momentum, in its weights
HEAVY = 1.0, 16.0  # activations of a whole batch, in the weights
STAGES, PIECES = (2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64)
WAYS = HYBRID, PLAIN, TWO_RUNS = "hybrid", "plain", "two runs"  # the latter: first the best exact, then late
HEAD = "case", "activations", *(f"{way}, m >= stages" for way in WAYS), f"{HYBRID}, m < stages <= {DEPTH}"
Gain = Callable[["Cell"], float]
Need = Mapping[str, float]
"""Of a task: the updates `more` than synchronous ones, their interval `low` to `high`, and the `share`."""
SHOWN = [str(case) for case in (Case(), Case(0.3), Case(0.1, 0.3), Case(halves=2.0), Case(halves=0.5))]


def steps(quick: bool) -> dict[str, Step]:
    """Read what the study knows, then simulate all cells of each number of stages."""
    pieces, cases = (PIECES[:3], [*CASES][::9]) if quick else (PIECES, [*CASES])
    return {"updates": Step(updates, {"study": sha256(STUDY.read_bytes()).hexdigest()[:12]}, timed=False)} | {
        f"stages {stages}": Step(simulated, {"stages": stages, "pieces": pieces, "cases": cases}, timed=False)
        for stages in (STAGES[:2] if quick else STAGES)
    }


# Updates that late gradients need more: of the study


def updates(study: str) -> dict[str, dict[str, Need]]:
    """Return what late gradients need on each task, by schedule, and by schedule without a correction.

    At the study's own rates and shares. `study`: the digest of its file.
    """
    made = json.loads(STUDY.read_text())
    kept = rows_of({key: step["result"] for key, step in made.items()})
    rows = [row for row in kept if row.optimizer == OPTIMIZER]
    exact = {row.task: row for row in rows if row.way == SYNCHRONOUS}

    def needed(schedule: str, correction: str) -> dict[str, Need]:
        way = Way(schedule, DEPTH, 1, correction)
        return {row.task: need(row, exact[row.task]) for row in rows if row.way == way}

    cured = {name: needed(name, cure) for name, cure in CURES.items()}
    return cured | {f"{name}, {PLAIN}": needed(name, "none") for name in CURES}


def need(row: Row, exact: Row) -> Need:
    """Return the updates of a run over those of another, to the least loss of training that both reach.

    With the ends of the 95 % interval, of seeds that are drawn again, and the share that is synchronous.
    """
    chance, seeds = Random(0), range(len(row.result["losses"]))

    def ratio(chosen: Sequence[int]) -> float:
        own, other = (curve(of, chosen) for of in (row, exact))
        loss = max([*of.values()][-1] for of in (own, other))
        return until(own, loss) / until(other, loss)

    drawn = sorted(ratio(chance.choices(seeds, k=len(seeds))) for _ in range(DRAWN))
    of = {"more": ratio(seeds), "low": drawn[DRAWN // 40], "high": drawn[-1 - DRAWN // 40]}
    return {name: round(value, 3) for name, value in of.items()} | {"share": row.result["share"]}


def curve(row: Row, seeds: Sequence[int]) -> dict[float, float]:
    """Return the mean training loss of these seeds, by updates."""
    losses = [row.result["losses"][seed] for seed in seeds]
    return {n * row.result["every"]: fmean(at) for n, at in enumerate(zip(*losses, strict=True), 1)}


def until(curve: Mapping[float, float], loss: float) -> float:
    """Return after how many updates a curve, which reaches this loss, is first there; between points even."""
    before, was = 0.0, 0.0
    for now, value in curve.items():
        if value <= loss:
            return before + (now - before) * (was - loss) / (was - value) if before else now
        before, was = now, value
    raise ValueError(f"the loss {loss:g} is not reached")


@dataclass(frozen=True)
class Cell:
    """A number of stages and of microbatches in a case, where activations weigh `heavy` times the weights.

    `results`: by schedule, see `simulated`; `needed`: see `updates`.
    """

    stages: int
    pieces: int
    case: str
    heavy: float
    results: Mapping[str, Any]
    needed: Mapping[str, Mapping[str, Need]]

    @property
    def name(self) -> str:
        """The late schedule."""
        return late_of(self.stages, self.pieces)

    @property
    def studied(self) -> bool:
        """Whether the study has so many stages: 2BW is one update late at any depth."""
        return self.name == "pipedream_2bw" or self.stages <= DEPTH

    def held(self, name: str) -> float:
        """Return what the fullest rank holds, in its weights."""
        activations, weights = self.results[name]["held"]
        late = weights - 1 + COPIES[name] if name in LATE else 0
        return float(STATE + late + self.heavy * activations / self.pieces)

    def exact(self, drains: bool = False) -> tuple[str, list[float]]:
        """Return the fastest exact schedule that holds no more than the late one, and its times by seed.

        `drains`: after each update, as for clipping by the norm of the whole model.
        """
        fit = [name for name in EXACT if self.held(name) <= self.held(self.name)]
        times = {name: self.results[name]["times"][self.case][not drains] for name in fit}
        best = min(times, key=lambda name: median(times[name]))
        return best, times[best]

    def needs(self, way: str) -> list[Need]:
        """Return what it needs, by task."""
        return [*self.needed[f"{self.name}, {PLAIN}" if way == PLAIN else self.name].values()]

    def late(self, way: str, share: float) -> list[float]:
        """Return the times of a mean update by seed."""
        drained, steady = self.results[self.name]["times"][self.case]
        first = {HYBRID: drained, PLAIN: steady, TWO_RUNS: self.exact()[1]}[way]
        return [share * slow + (1 - share) * fast for slow, fast in zip(first, steady, strict=True)]

    def gains(self, way: str = HYBRID, drains: bool = False) -> list[float]:
        """Return by task how many times as fast as an exact update a late one is, in the middle of seeds."""
        exact = self.exact(drains)[1]
        late = [self.late(way, of["share"]) for of in self.needs(way)]
        return [median(one / own for one, own in zip(exact, of, strict=True)) for of in late]

    def gain(self, way: str = HYBRID, drains: bool = False) -> float:
        return median(self.gains(way, drains))

    def to_losses(self, way: str = HYBRID, end: str = "more") -> list[float]:
        """Return by task how many times as fast the same loss is reached; `end`: of the interval."""
        return [gain / of[end] for gain, of in zip(self.gains(way), self.needs(way), strict=True)]

    def to_loss(self, way: str = HYBRID) -> float:
        """Return that of the middle task: above 1 late gradients win."""
        return median(self.to_losses(way))

    @property
    def told(self) -> bool:
        """Whether late gradients win on each task, to its interval's end."""
        return min(self.to_losses(end="high")) > 1

    def __str__(self) -> str:
        """Return the gain in time to the same loss, and who wins."""
        winner = self.name if self.to_loss() > 1 else self.exact()[0]
        return f"{self.to_loss():.2f} {winner}{'' if self.studied else ' ?'}"


Cells = Sequence[Cell]


def show(results: Results) -> Iterator[Finding]:
    """Say where late gradients win by stages and microbatches, and hold the claims against it."""
    by_stages = {int(stages): of for stages, of in those(results, "stages ").items()}
    first = next(of for by_pieces in by_stages.values() for of in by_pieces.values())

    def cells(case: str, heavy: float) -> Cells:
        sizes = [(stages, pieces) for stages, by_pieces in by_stages.items() for pieces in by_pieces]
        return [Cell(s, int(m), case, heavy, by_stages[s][m], results["updates"]) for s, m in sizes]

    every = {key: cells(*key) for key in product(first["1f1b"]["times"], HEAVY)}
    light = {case: of for (case, heavy), of in every.items() if heavy == HEAVY[0]}
    yield from said(results["updates"])
    yield from told([cell for of in light.values() for cell in of])
    yield from checked(light)
    lines = {key: summary(of) for key, of in every.items()}
    unlike = [
        line
        for (case, heavy), line in lines.items()
        if heavy == HEAVY[0] or line[2:] != lines[case, HEAVY[0]][2:]
    ]
    yield Table("All cases; activations 16 where it matters", [*HEAD], unlike, (), HEAD[:2])
    shown = [of for case, of in light.items() if case in SHOWN]
    yield from map(grid, shown)
    yield from charts(shown)


def said(updates: Mapping[str, Mapping[str, Need]]) -> Iterator[str]:
    """Yield what the map stands on."""
    for name, of in updates.items():
        cure = "without a correction" if PLAIN in name else f"with {CURES[name].replace('+', ', ')}"
        share = (f", {need['share']:.0%} of them synchronous" * bool(need["share"]) for need in of.values())
        tasks = "; ".join(
            f"{task} {need['more']:.2f} ({need['low']:.2f} to {need['high']:.2f}{first})"
            for (task, need), first in zip(of.items(), share, strict=True)
        )
        yield (
            f"Updates of {name.partition(',')[0]} {cure} over synchronous ones, to the same loss "
            f"({OPTIMIZER}, {DEPTH} stages), with the 95 % interval of ten seeds: {tasks}."
        )


def told(cells: Cells) -> Iterator[str]:
    """Say how many of the wins do not depend on the task, nor on the seeds."""
    for name, of in (("m >= stages", in_pieces(cells)), (f"m < stages <= {DEPTH}", whole(cells))):
        won = sum(cell.to_loss() > 1 for cell in of)
        sure = sum(cell.told for cell in of)
        yield (
            f"Of {len(of)} cells with {name}, {HYBRID} wins {won} on the middle task of the study and {sure} "
            "on each task to its interval's end."
        )


def most(of: Cells, gain: Gain) -> str:
    """Return in how many cells late gradients win, and where they gain most."""
    best, won = max(of, key=gain), sum(gain(cell) > 1 for cell in of)
    return f"{won} of {len(of)}; {gain(best):.2f} at {best.stages} x {best.pieces}"


def in_pieces(of: Cells) -> Cells:
    """Return the cells with at least as many microbatches as stages."""
    return [cell for cell in of if cell.pieces >= cell.stages]


def whole(of: Cells) -> Cells:
    """Return the cells with fewer microbatches than stages, of which the study has as many."""
    return [cell for cell in of if cell.pieces < cell.stages and cell.studied]


def summary(of: Cells) -> list[str]:
    """Return a case's line of the overview."""
    many, few = in_pieces(of), whole(of)
    ways = [most(many, lambda cell, way=way: cell.to_loss(way)) for way in WAYS]  # type: ignore[misc]
    return [of[0].case, f"{of[0].heavy:g}", *ways, most(few, Cell.to_loss)]


def grid(of: Cells) -> Table:
    """Return a table of a case by stages and microbatches."""
    columns = sorted({cell.pieces for cell in of})
    rows: dict[int, list[str]] = {cell.stages: [f"{cell.stages} stages"] for cell in of}
    for cell in of:
        rows[cell.stages].append(str(cell))
    title = f"{of[0].case}, activations {of[0].heavy:g}"
    return Table(title, ["", *(f"m = {count}" for count in columns)], [*rows.values()], (), ("",))


def checked(by_case: Mapping[str, Cells]) -> Iterator[Check]:
    """Hold each claim for late gradients against all the cells that it is about."""

    def claim(what: str, of: Cells, gain: Gain) -> Iterator[Check]:
        if of:
            won = sum(gain(cell) > 1 for cell in of)
            yield Check(what, NOT, "> 1 in most cells", most(of, gain), won > len(of) / 2, How.PLANNED)

    def chosen(kind: Callable[[Case], bool]) -> Cells:
        return [cell for case, of in by_case.items() if kind(CASES[case]) for cell in of]

    still = chosen(lambda case: not case.jitter)
    groups = {
        "no jitter, I as long as W": chosen(lambda case: not case.jitter and case.halves == 1),
        "I twice as long as W": chosen(lambda case: case.halves == 2),
        "W twice as long as I": chosen(lambda case: case.halves == 0.5),
        "jitter": chosen(lambda case: case.jitter > 0),
    }
    for name, of in groups.items():
        yield from claim(f"{name}: {HYBRID} wins with m >= stages", in_pieces(of), Cell.to_loss)
        yield from claim(f"{name}: {HYBRID} wins with m < stages <= {DEPTH}", whole(of), Cell.to_loss)
    many = in_pieces(still)
    yield from claim(f"no jitter, m >= stages: {HYBRID} is faster an update", many, Cell.gain)
    drains = "where exact schedules drain after each update"
    yield from claim(f"no jitter, m >= stages: the same {drains}", many, lambda c: c.gain(drains=True))
    for way in (PLAIN, TWO_RUNS):
        yield from claim(f"no jitter, m >= stages: {way} wins", many, lambda c, way=way: c.to_loss(way))  # type: ignore[misc]


def charts(shown: Sequence[Cells]) -> Iterator[Chart]:
    """Draw the gain over microbatches a stage, of hybrid in each case."""
    for of in shown:
        lines = []
        for stages in sorted({cell.stages for cell in of} - {STAGES[0]}):
            own = [cell for cell in of if cell.stages == stages]
            points = {cell.pieces / stages: cell.to_loss() for cell in own}
            spread = [(min(cell.to_losses(end="high")), max(cell.to_losses(end="low"))) for cell in own]
            lines.append(Line(f"{stages} stages", How.PLANNED, points, spread))
        ends = [x for line in lines for x in line.points]
        lines.append(Line("as fast", How.BOUND, {min(ends): 1.0, max(ends): 1.0}))
        yield Chart(of[0].case, "microbatches a stage", "hybrid x exact, to the same loss", lines, "x")
