"""Races of ours beside torchgpipe itself, and what its records have in common.

All of them take turns in one world of processes, at the same cut, microbatches and threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf
from statistics import median
from typing import Any, NamedTuple

from benchmark.contestants import Ours, plain, race
from benchmark.replicas import Idle
from benchmark.report import progress
from benchmark.tasks import Task, prepare
from benchmark.worlds import Say, WorldFailed, run_world, titled
from pipetrain.runtime.comm.process_groups import ProcessGroups
from published.measures import Race, ends, partition
from published.record import NOT, Chart, Check, Finding, How, Line, Series

PLAIN, THEIRS = "a plain loop", "torchgpipe"
AGAIN, SPARED, SPEED = "recompute=always", "recompute=except_first_microbatch", "x its speed"
CLOSE = 0.1  # of a published speed-up: the same cuts, by another processor's times
TIE = 0.05  # two runs of the same contestant differ by some percent, see docs/results/README.md

Entrants = Mapping[str, Sequence[Any]]
"""By name: PLAIN, THEIRS or a schedule of ours, the layers of each of its stages, and more overrides."""


class Row(NamedTuple):
    """A row of a record: microbatches, the layers of each partition, and samples/s.

    `spared`: the microbatch whose backward comes first is not recomputed (torchgpipe's except_last).
    """

    microbatches: int
    balance: Sequence[int]
    samples_s: float
    spared: bool = True

    @property
    def recompute(self) -> str:
        """Its override."""
        return SPARED if self.spared else AGAIN

    @property
    def bound(self) -> float:
        """The most speed-up."""
        return bound(len(self.balance), self.microbatches, self.spared)


def pairs(
    rows: Mapping[int, Row], ranks: Sequence[int], layers: int, *words: str
) -> dict[str, Sequence[Any]]:
    """Return `pipeline-K` and `torchgpipe-K` for each of these numbers of ranks, at the record's cuts."""
    who = {"pipeline": "gpipe", "torchgpipe": THEIRS}
    return {
        f"{name}-{n}": (schedule, scaled(rows[n].balance, layers), *words)
        for n in ranks
        for name, schedule in who.items()
    }


def speedup(of: str, name: str, rows: Mapping[int, Row], naive: float, gains: Mapping[int, float]) -> Series:
    """Return planned speed-ups by partitions beside the published ones, and their bounds.

    `naive`: the published samples/s of one process.
    """
    published = {n: round(row.samples_s / naive, 3) for n, row in rows.items()}
    bounds = {n: rows[n].bound for n in gains}
    return Series(of, name, "K", gains, How.PLANNED, "x naive-1", published, bounds)


def samples_per_s(
    of: str, rows: Mapping[int, Row], naive: float, here: Mapping[str, float], how: How
) -> Series:
    """Return samples/s of `naive-1` and `pipeline-K` beside those that were published, of another machine."""
    published = {"naive-1": naive, **{f"pipeline-{n}": row.samples_s for n, row in rows.items()}}
    return Series(of, "speed", "", here, how, "samples/s", published)


def as_published(what: str, speedups: Series) -> Iterator[Check]:
    """Hold planned speed-ups against their bounds, and against those published at the same cuts."""
    for n, here in speedups.here.items():
        theirs = speedups.published[n]
        limits, name = (theirs * (1 - CLOSE), theirs * (1 + CLOSE)), f"{what}, pipeline-{n}"
        yield Check.of(f"{name}: within 10 % of theirs", f"{theirs}", limits, here, How.PLANNED)
        yield under(name, here, speedups.bound[n], How.PLANNED)


def bound_line(rows: Mapping[int, Row]) -> Line:
    """Return the line of the bounds of a record's rows."""
    return Line("bound", How.BOUND, {n: row.bound for n, row in rows.items()})


def race_torchgpipe(
    overrides: Sequence[str],
    entrants: Entrants,
    rounds: int,
    example: Sequence[int] | None = None,
    classes: int = 10,
) -> dict[str, Any]:
    """Race schedules of ours, plain loops and torchgpipe; return what `raced` does, and what else is known.

    `forwards` (seconds in each round, none where they stand among backwards), `peaks` (bytes of each stage),
    and `losses` of a last turn. Where torchgpipe fails, the others race without it. `example`: see Task.
    """
    task = Task(tuple(overrides), None if example is None else tuple(example), classes)
    ranks = max(len(balance) for _, balance, *_ in entrants.values())
    try:
        of_ranks = run_world(_race, ranks, titled(progress, "race"), task, entrants, rounds)
    except WorldFailed as error:
        others = {name: way for name, way in entrants.items() if way[0] != THEIRS}
        if len(others) == len(entrants):
            raise
        failed = {name: {"failure": error.reason} for name in entrants.keys() - others.keys()}
        return race_torchgpipe(overrides, others, rounds, example, classes) | failed
    results = {}
    for name in entrants:
        ranks_of = [rank[name] for rank in of_ranks]
        forwards = zip(*(rank["forwards"] for rank in ranks_of if rank["forwards"]), strict=True)
        marks = [[*zip(*of_round, strict=True)] for of_round in forwards]
        results[name] = ranks_of[0] | {
            "forwards": [max(ends) - min(starts) for starts, ends in marks if max(ends) < inf],
            "peaks": [nbytes for rank in ranks_of for nbytes in rank["peaks"]],
            "losses": next(rank["losses"] for rank in ranks_of if rank["losses"]),
            "failure": "",
        }
    return results


def _race(groups: ProcessGroups, say: Say, task: Task, entrants: Entrants, rounds: int) -> dict[str, Any]:
    rank, contestants = groups.world.rank, list[Any]()
    ours: type[Ours] = Ours
    if any(who == THEIRS for who, *_ in entrants.values()):
        from benchmark.torchgpipe_contestant import OurRank, TorchGPipe  # torchgpipe may not be installed

        ours = OurRank
    for name, (who, balance, *words) in entrants.items():
        schedule = "gpipe" if who in (PLAIN, THEIRS) else who
        job = prepare(task.extended(partition(balance), *words), schedule, len(balance))
        settings = job.plan.settings
        if who == PLAIN:
            contestants.append(plain(name, job, groups, 1))
        elif who == THEIRS:
            deferred = settings.batchnorm == "batch"
            theirs = "except_last" if f"recompute={settings.recompute}" == SPARED else str(settings.recompute)
            contestants.append(TorchGPipe(job, groups, 1, theirs, deferred))
            contestants[-1].name = name
        else:
            takes_part = rank < len(balance)
            contestants.append(
                ours(name, job, groups, 1) if takes_part else Idle(name, job.plan, 0.0, groups)
            )
    series = race(groups, contestants, rounds, say)
    return {
        contestant.name: {
            "seconds": series[contestant.name],
            "forwards": getattr(contestant, "forwards", [])[-rounds:],
            "peaks": getattr(contestant, "peaks", list)(),
            "losses": contestant.losses,
        }
        for contestant in contestants
    }


def bound(ranks: int, m: int, spared: bool = False) -> float:
    """Return the most speed-up where every forward is run again, and a backward takes two forwards.

    c K m / (m + K - 1) with c = 3/4. `spared`: but for one microbatch; of one rank
    3 m / (4 m - 1).
    """
    return 3 * ranks * m / (4 * (m + ranks - 1) - ranks * spared)


def scaled(balance: Sequence[int], layers: int) -> list[int]:
    """Return the balance of a model for one of so many layers."""
    cuts = (round(end * layers / sum(balance)) for end in accumulate(balance, initial=0))
    return [end - start for start, end in pairwise(cuts)]


def sized(plan: Mapping[str, Any], layers: int, parameters: int) -> Check:
    """Hold a planned model's size against that of the record."""
    here = plan["layers"], plan["parameters"]
    theirs, ours = (f"{n} layers, {of:,} parameters" for n, of in ((layers, parameters), here))
    return Check("the model", theirs, "the same", ours, here == (layers, parameters), How.ARITHMETIC)


def under(what: str, gain: float, most: float, how: How) -> Check:
    """Hold a speed-up against its bound."""
    return Check.of(f"{what}: under its bound", NOT, (0, most), gain, how)


def held_against(race: Race, pairs: Mapping[str, str]) -> Iterator[Finding]:
    """Hold contestants of ours against those of torchgpipe, by their names."""
    ratios, bytes_of = dict[str, list[float]](), dict[str, list[float]]()
    forwards = dict[str, float]()
    for ours, theirs in pairs.items():
        fast, small = f"{ours}: as fast as torchgpipe", f"{ours}: holds no more than torchgpipe"
        if failure := race.of[theirs]["failure"]:
            why = f"torchgpipe does not run here: {failure}"
            yield from (Check(what, NOT, "-", why, None, How.RUN) for what in (fast, small))
            continue
        own_s, their_s = (median(race.seconds(name)) for name in (ours, theirs))
        own, other = bytes_of[ours] = [max(race.of[name]["peaks"]) / 2**20 for name in (ours, theirs)]
        ratios[ours], ratio = race.ratios(ours, theirs), race.ratio(ours, theirs)
        if all(known := [race.of[name]["forwards"] for name in (theirs, ours)]):
            forwards[ours] = median(known[0]) / median(known[1])
            what = f"{ours}: forwards as fast as torchgpipe's"
            yield Check.of(what, NOT, (1 - TIE, inf), forwards[ours], How.RUN, unit=f" {SPEED}")
        says = f"{ratio:.3f} in the median round; medians: {own_s:.3g} s beside {their_s:.3g}"
        yield Check.of(fast, NOT, (1 - TIE, inf), ratio, How.RUN, says, f" {SPEED}")
        says = f"{own / other:.3f}: {own:.4g} MiB beside {other:.4g}"
        yield Check.of(small, NOT, (0, 1), own / other, How.RUN, says, " of it")
    if ratios:
        yield Series.measured("", "beside torchgpipe", "", ratios, unit=SPEED)
        for n, who in enumerate(("ours", "torchgpipe")):
            most = {name: of[n] for name, of in bytes_of.items()}
            yield Series(who, "most bytes of a stage", "", most, unit="MiB")
    if forwards:
        yield Series("", "forwards alone", "", forwards, unit=SPEED)


def forwards_chart(race: Race, ranks: Sequence[int]) -> Chart:
    """Draw the seconds of a batch and of its forwards alone, of `pipeline-K` and `torchgpipe-K`."""
    lines = []
    for title, name in (("ours", "pipeline"), ("torchgpipe", "torchgpipe")):
        for what, key in ((title, "seconds"), (f"{title}, forwards", "forwards")):
            times = {n: of for n in ranks if (of := race.of[f"{name}-{n}"].get(key))}
            points = {n: median(of) for n, of in times.items()}
            lines += [Line(what, How.RUN, points, [*map(ends, times.values())])] if points else []
    return Chart("Time of a batch", "partitions K", "s", lines, "x")
