"""GPT-2's memory: peak activation by microbatches, with and without recomputation, beside torchgpipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from statistics import median
from typing import Any

import numpy as np
import torch

from pipetrain.commands.cli import composed, values_of
from pipetrain.plan.paper_plan import planned
from pipetrain.schedule.memory import GIB, totals
from published.measures import Race, ends, partition
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step, those
from published.torchgpipe_race import SPEED, THEIRS, TIE, race_torchgpipe

PARAMETERS = 89_762_304
MODES = NEVER, LAST, ALWAYS = "never", "except_first_microbatch", "always"  # LAST: torchgpipe's except_last
OURS, OWN = "gpipe", "the record's own"
BALANCES = {1: [15], 2: [7, 8], 4: [4, 3, 3, 5]}
IN = (1, 2, 4, 8, 16, 32, 64)  # microbatches
TOTALS = {  # published, by whom and K: MiB reserved on all devices at each of IN, without and with it
    (THEIRS, 1): ((7618, 7260, 7050, 7258, 7056, 8114, 7244), (7618, 5248, 4662, 4234, 3812, 3976, 3442)),
    (THEIRS, 2): ((8024, 7492, 7312, 7604, 7718, 8252, 7430), (8024, 4766, 3242, 2720, 2692, 2178, 2108)),
    (THEIRS, 4): ((8482, 8008, 7806, 7994, 8386, 8480, 7616), (8482, 5328, 3784, 3286, 3576, 2508, 2418)),
    (OWN, 1): ((7642, 7236, 7050, 7258, 7056, 8114, 7244), (7218, 5576, 4752, 4284, 3892, 3934, 3454)),
    (OWN, 2): ((8024, 7532, 7338, 7608, 7718, 8254, 7430), (7600, 5702, 4178, 3490, 2920, 2246, 1990)),
    (OWN, 4): ((8530, 7984, 7764, 8026, 8480, 8486, 7754), (8390, 6312, 4316, 3462, 3586, 2582, 2478)),
}
VOID = "0.95 to 1.51, void: not synchronised"
TIMES = (1.27, 1.4)  # 4/3 within 5 %
GPT = ("model=gpt", "data=text", "task=language_modelling", "optim=adamw")
FULL = (*GPT, "data.block=128", "model.vocabulary=3000")
NARROW = (*GPT, "data.block=16", "model.vocabulary=375", "model.width=96")
WIDER = (*GPT, "data.block=32", "model.vocabulary=750", "model.width=192")
TINY = (*GPT, "data.block=8", "model.vocabulary=256", "model.width=16", "model.heads=2", "model.depth=2")

ByM = Mapping[int, float]
"""Numbers by microbatches."""
Peaks = defaultdict[str, defaultdict[str, dict[int, float]]]
"""MiB by whom, mode and microbatches."""


def steps(quick: bool) -> dict[str, Step]:
    """Plan the model at full size; count a narrow one's bytes; time a wider one."""
    balances, counts, full, narrow = (
        ({2: [2, 3]}, (1, 4), TINY, TINY) if quick else (BALANCES, IN, FULL, NARROW)
    )
    made = {f"planned {k}": Step(plan, {"overrides": full, "balance": b, "counts": counts}, timed=False)
            for k, b in balances.items()}  # fmt: skip
    for k, balance in balances.items():
        for m in counts:
            others = k > 2 and m in (4, 16)
            known = {"overrides": narrow, "balance": balance, "batch": 64, "m": m, "others": others}
            made[f"bytes {k} {m}"] = Step(race, known, timed=False)
        if not quick:
            wider = {"overrides": WIDER, "balance": balance, "batch": 32, "m": 8, "rounds": 5}
            made[f"time {k}"] = Step(race, wider)
    return made


def plan(overrides: Sequence[str], balance: Sequence[int], counts: Sequence[int]) -> dict[str, Any]:
    """Return the parameters, and by mode the sum of what each rank has open at most, in bytes, by counts."""
    words = [partition(balance), f"stages={len(balance)}", "batch_size=64"]
    result: dict[str, Any] = {mode: [] for mode in MODES}
    for m, mode in ((m, mode) for m in counts for mode in MODES):
        more = [f"microbatches={m}", f"recompute={mode}", "schedule=gpipe"]
        with torch.device("meta"):
            of = planned(values_of(composed("plan", [*overrides, *words, *more])), "gpipe", 1)
        result[mode].append(sum(max(totals(rank, ("activations", "messages"))) for rank in of.memory()))
        result["parameters"] = sum(layer.params for layer in of.layers)
    return result


def race(
    overrides: Sequence[str],
    balance: Sequence[int],
    batch: int,
    m: int,
    others: bool = False,
    rounds: int = 0,
) -> dict[str, Any]:
    """Race gpipe and torchgpipe in all modes, `others` in two; return seconds and each device's bytes."""
    words = {"1f1b": [], "zbv": ["partition=flops"]} if others else {}
    modes = {OURS: MODES, THEIRS: MODES, **dict.fromkeys(words, (NEVER, ALWAYS))}
    entrants = {f"{who} {mode}": (who, balance, f"recompute={mode}", *words.get(who, ()))
                for who, of in modes.items() for mode in of}  # fmt: skip
    raced = Race(race_torchgpipe([*overrides, f"batch_size={batch}", f"microbatches={m}"], entrants, rounds))
    return {name: {"seconds": raced.seconds(name), "peaks": raced.of[name]["peaks"]} for name in entrants}


def published(who: str, k: int) -> dict[str, dict[int, float]]:
    """Return the published peak activations, in MiB, by mode and microbatches.

    As the record has them: reserved on all devices, less weights, gradients and momentum.
    """
    parameters = 3 * 4 * PARAMETERS / 2**20
    modes = zip((NEVER, LAST), TOTALS[who, k], strict=True)
    return {mode: {m: mib - parameters for m, mib in zip(IN, of, strict=True)} for mode, of in modes}


def peaks_of(races: Mapping[str, Any], over: Callable[[Iterable[int]], float]) -> Peaks:
    """Return `over` all devices, in MiB, by whom, mode and microbatches."""
    peaks: Peaks = defaultdict(lambda: defaultdict(dict))
    for m, race in races.items():
        for name, of in race.items():
            who, mode = name.split()
            peaks[who][mode][int(m)] = over(of["peaks"]) / 2**20
    return peaks


def ratios(of: Mapping[str, ByM], mode: str) -> dict[int, float]:
    """Return which share of the peaks of `of[NEVER]` a mode leaves, from two microbatches on."""
    return {m: of[mode][m] / peak for m, peak in of[NEVER].items() if m > 1}


def flatness(peaks: ByM) -> float:
    """Return the most over the least."""
    return max(peaks.values()) / min(peaks.values())


def factors(here: ByM, there: ByM) -> list[float]:
    """Return how many times as much each of `here` is, at the same microbatches."""
    return [of / there[m] for m, of in here.items()]


def apart(here: ByM, there: ByM) -> float:
    """Return the factor, at least 1, by which two differ at most, at the same microbatches."""
    return max(factors(here, there) + [1 / of for of in factors(here, there)])


def fitted(peaks: ByM) -> tuple[float, float, float]:
    """Return N and A of the line N + A / m through peaks by m, by least squares.

    And how far it is off at most, as a share of the peak there.
    """
    y, x = np.array([*peaks.values()]), np.array([[1, 1 / m] for m in peaks])
    (floor, shared), *_ = np.linalg.lstsq(x, y)
    return float(floor), float(shared), float(np.abs(x @ (floor, shared) / y - 1).max())


def show(results: Results) -> Iterator[Finding]:
    """Hold flatness, ratios, fit and time against what was published, and against torchgpipe."""
    plans = {int(k): plan for k, plan in those(results, "planned ").items()}
    parameters = {of["parameters"] for of in plans.values()}
    says = " and ".join(f"{n:,}" for n in parameters)
    yield Check("parameters", f"{PARAMETERS:,}", "the same", says, parameters == {PARAMETERS}, How.ARITHMETIC)
    peaks = {k: peaks_of(those(results, f"bytes {k} "), sum) for k in plans}
    for k in plans:
        yield from held(k, peaks[k])
    for k in plans:
        known = ratios(published(THEIRS, k), LAST)
        fullest = peaks_of(those(results, f"bytes {k} "), max)
        for who in (OURS, THEIRS):
            of, name = f"K = {k}, {who}", f"{LAST} / never"
            yield Series(of, name, "m", ratios(peaks[k][who], LAST), published=known)
            yield Series(of, f"{name}, fullest device", "m", ratios(fullest[who], LAST))
            yield Series(of, f"{ALWAYS} / never", "m", ratios(peaks[k][who], ALWAYS))
        here, known = ratios(peaks[k][OURS], LAST), ratios(published(OWN, k), LAST)
        yield Series(f"K = {k}, {OURS}, beside {OWN}", f"{LAST} / never", "m", here, published=known)
    yield from by_partitions(plans, peaks)
    for (who, k), mode in ((row, mode) for row in TOTALS if row[1] in plans for mode in (NEVER, LAST)):
        mib = dict(zip(peaks[k][OURS][mode], (nbytes / 2**20 for nbytes in plans[k][mode]), strict=True))
        known, of = published(who, k)[mode], f"K = {k}, {OURS}, beside {who}"
        yield Series(of, f"{mode}, full size", "microbatches", mib, How.PLANNED, "MiB", known)
    yield from timed({int(k): Race(of) for k, of in those(results, "time ").items()})
    yield from charts(plans, peaks)


def held(k: int, peaks: Peaks) -> Iterator[Check]:
    """Hold one number of partitions against the record, and against torchgpipe here."""
    at, ours, theirs = f"K = {k}", peaks[OURS], peaks[THEIRS]
    record, own = (published(who, k) for who in (THEIRS, OWN))
    flattest, least = ends(flatness(published(*row)[NEVER]) for row in TOTALS)
    says = f"{flattest:.2f} to {least:.2f}"
    yield Check.of(f"{at}: flat in m without, max / min", says, (1, least), flatness(ours[NEVER]), How.RUN)
    known, other = ratios(record, LAST), ratios(own, LAST)
    span = "{1:.2f} to {0:.2f}".format(*ends(known.values()))
    for mode in (LAST, ALWAYS):
        worst = max(factors(ratios(ours, mode), ratios(theirs, mode)))
        what = f"{at}: {mode} / never, at most torchgpipe's here"
        yield Check.of(what, NOT, (0, 1), worst, How.RUN, unit=" of it")
    off, limit = (apart(of, known) for of in (ratios(theirs, LAST), other))
    what = f"{at}: torchgpipe's own ratios, as near as the record's two are"
    yield Check.of(what, span, (0, limit), off, How.RUN, unit=" x apart")
    floor, shared, off = fitted(ours[LAST])
    says, most = f"{floor:.2f} + {shared:.1f} / m MiB, off by {off:.1%}", fitted(record[LAST])[-1]
    what = f"{at}: {LAST} is N + A / m, off by no more than the record is"
    yield Check.of(what, f"off by {most:.1%}", (0, most), off, How.RUN, says)
    for mode in MODES:
        most = max(factors(ours[mode], theirs[mode]))
        what = f"{at}: {mode}: holds no more than torchgpipe"
        yield Check.of(what, NOT, (0, 1), most, How.RUN, unit=" of it")


def by_partitions(plans: Mapping[int, Any], peaks: Mapping[int, Peaks]) -> Iterator[Series]:
    """Return flatness, N and A, and the planned bytes at full size, by numbers of partitions."""
    record = {k: published(THEIRS, k) for k in plans}
    flat = {k: flatness(of[NEVER]) for k, of in record.items()}
    for who in (OURS, THEIRS):
        here = {k: flatness(of[who][NEVER]) for k, of in peaks.items()}
        yield Series(who, "max / min without", "K", here, published=flat)
    sources = {who: (How.RUN, {k: of[who][LAST] for k, of in peaks.items()}) for who in (OURS, THEIRS)}
    sources[f"{THEIRS} as published"] = How.ARITHMETIC, {k: of[LAST] for k, of in record.items()}
    for who, (how, by_k) in sources.items():
        fits = {k: fitted(of) for k, of in by_k.items()}
        yield Series(who, "N of N + A / m", "K", {k: n for k, (n, _, _) in fits.items()}, how, "MiB")
        yield Series(who, "A of N + A / m", "K", {k: a for k, (_, a, _) in fits.items()}, how, "MiB")
        yield Series(who, "N / (N + A)", "K", {k: n / (n + a) for k, (n, a, _) in fits.items()}, how)


def charts(plans: Mapping[int, Any], peaks: Mapping[int, Peaks]) -> Iterator[Chart]:
    """Draw the sums of all devices by microbatches, the ratios, and what is planned at full size."""
    lines: dict[str, list[Line]] = {name: [] for name in (NEVER, ALWAYS, "ratio", "plan")}
    for k, of in peaks.items():
        for who, by_mode in of.items():
            for kind, mode in ((NEVER, NEVER), (ALWAYS, LAST if LAST in by_mode else ALWAYS)):
                lines[kind].append(Line(f"{who} K={k}", How.RUN, by_mode[mode]))
        lines["ratio"] += [Line(f"{w} K={k}", How.RUN, ratios(of[w], LAST)) for w in (OURS, THEIRS)]
        known = ratios(published(THEIRS, k), LAST)
        lines["ratio"].append(Line(f"{THEIRS} K={k}", How.PUBLISHED, known))
        for mode in MODES:
            gib = {m: of / GIB for m, of in zip(peaks[k][OURS][mode], plans[k][mode], strict=True)}
            lines["plan"].append(Line(f"{mode} K={k}", How.PLANNED, gib))
    part = "activations of all devices"
    for title, key, unit, logs in (
        (f"Never recomputed: {part}", NEVER, "MiB", "x"),
        (f"Recomputed: {part}", ALWAYS, "MiB", "xy"),
        ("Recomputed / never", "ratio", "x never", "xy"),
        (f"Full size, gpipe: {part}", "plan", "GiB", "xy"),
    ):
        yield Chart(title, "microbatches m", unit, lines[key], logs)


def timed(races: Mapping[int, Race]) -> Iterator[Finding]:
    """Hold what recomputation costs in time, and our speed, against torchgpipe's."""
    cost: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
    for k, race in races.items():
        seconds = {name: median(race.of[name]["seconds"]) for name in race.of}
        for who, mode in ((who, mode) for who in (OURS, THEIRS) for mode in MODES[1:]):
            cost[who, mode][k] = seconds[f"{who} {mode}"] / seconds[f"{who} {NEVER}"]
        what = f"K = {k}: time of recomputation, 4/3 within 5 %, x"
        yield Check.of(what, VOID, TIMES, cost[OURS, ALWAYS][k], How.RUN)
        for mode in MODES:
            faster = seconds[f"{THEIRS} {mode}"] / seconds[f"{OURS} {mode}"]
            what = f"K = {k}: as fast as torchgpipe, {mode}"
            yield Check.of(what, NOT, (1 - TIE, inf), faster, How.RUN, unit=f" {SPEED}")
    for (who, mode), by_k in cost.items():
        yield Series(f"{who}, {mode}", "time x", "K", by_k, bound=dict.fromkeys(by_k, 4 / 3))
