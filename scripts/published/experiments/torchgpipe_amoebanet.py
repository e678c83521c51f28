"""torchgpipe's speed of AmoebaNet-D: run narrow in 2 partitions, and planned in 2, 4 and 8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import median
from typing import Any

from pipetrain.schedule.memory import GIB
from published.measures import Race, predicted, profiled
from published.record import Chart, Check, Finding, How, Line, Results, Series, Step
from published.torchgpipe_race import THEIRS, TIE, bound, held_against, race_torchgpipe, scaled

LAYERS, PARAMETERS = 24, 122_470_120
CUTS = {2: [9, 15], 4: [3, 6, 7, 8], 8: [2, 2, 2, 3, 3, 4, 4, 4]}
CUTS_OF_ONE = {2: [7, 17], 4: [3, 4, 5, 12], 8: [2, 2, 2, 2, 2, 3, 4, 7]}  # where m = 1
RATES = {  # 0.0.7's samples/s, by partitions and microbatches
    2: {1: 26.733, 4: 41.133, 32: 47.386},
    4: {1: 26.827, 4: 44.543, 32: 72.412},
    8: {1: 24.918, 4: 70.065, 32: 132.413},
}
SPEED = {n: {m: round(of / RATES[2][1], 3) for m, of in by_m.items()} for n, by_m in RATES.items()}
OLD_RATES = {"naive-2": 14.188, "pipeline-2": 20.346, "pipeline-4": 29.074, "pipeline-8": 34.392}  # 0.0.3's
BATCHES = {2: {1: 96, 4: 256, 32: 1280}, 4: {1: 160, 4: 360, 32: 1152}, 8: {1: 196, 4: 480, 32: 1280}}
OLD = {2: 1.434, 4: 2.049, 8: 2.424}  # 0.0.3's speed over naive-2, under bounds of 1.47, 2.74, 4.92
P40 = 22.4  # GiB
WORDS = ["model._target_=published.amoebanet.amoebanet", "optim.momentum=0", "optim.weight_decay=0"]
FULL = {"words": [*WORDS, "model.num_classes=1000"], "side": 224}
NARROW = {"words": [*WORDS, "model.filters=64"], "side": 96, "samples": 2, "layers": LAYERS}
TINY = {
    "words": ["model=mlp", "model.width=4", *WORDS[1:]],
    "side": 32,
    "samples": 2,
    "layers": 6,
    "counts": [1, 4],
}
AGAIN, SIZE = "recompute=always", "(18, 64), 96x96"


def steps(quick: bool) -> dict[str, Step]:
    """Plan the record's sizes by work; plan a narrow model by its profile, and race it."""
    size = TINY if quick else NARROW
    return {
        **({} if quick else {"full": Step(full, FULL, timed=False)}),
        "narrow": Step(narrow, {"counts": [1, 4, 32], **size, "partitions": [2] if quick else [*CUTS]}),
        "race": Step(run, {**size, "counts": [1] if quick else [1, 4, 16], "rounds": 1 if quick else 3}),
    }


def full(words: list[str], side: int) -> dict[str, Any]:
    """Plan the record's model, batches and cuts with most microbatches."""
    return {
        str(k): predicted([*words, AGAIN], CUTS[k], 32, BATCHES[k][32] // 32, [3, side, side]) for k in CUTS
    }


def narrow(
    words: list[str], side: int, samples: int, layers: int, counts: list[int], partitions: list[int]
) -> Any:
    """Return the planned samples/s, from a profile on two ranks, by partitions and microbatches."""
    example = [3, side, side]
    profile = profiled(words, samples, example)
    known = samples, example, profile
    return {
        str(k): {
            str(m): samples * m / predicted([*words, AGAIN], cut(k, m, layers), m, *known)["seconds"]
            for m in counts
        }
        for k in partitions
    }


def cut(k: int, m: int, layers: int) -> list[int]:
    """Return the layers of each partition of the record, for a model of so many layers."""
    return scaled((CUTS_OF_ONE if m == 1 else CUTS)[k], layers)


def run(words: list[str], side: int, samples: int, layers: int, counts: list[int], rounds: int) -> Any:
    """Race 2 partitions, ours and torchgpipe's, by microbatches of so many samples."""
    entrants = {}
    for m in counts:
        for name, who in (("pipeline-2", "gpipe"), ("torchgpipe-2", THEIRS)):
            sizes = [f"microbatches={m}", f"batch_size={samples * m}", AGAIN]
            entrants[f"{name}, m = {m}"] = (who, cut(2, m, layers), *sizes)
    return {
        "counts": counts,
        "samples": samples,
        "race": race_torchgpipe(words, entrants, rounds, [3, side, side]),
    }


def show(results: Results) -> Iterator[Finding]:
    """Hold the order of speeds by partitions and microbatches against the record's."""
    counts, race = results["race"]["counts"], Race(results["race"]["race"])
    samples = results["race"]["samples"]
    rates = {int(k): {int(m): rate for m, rate in of.items()} for k, of in results["narrow"].items()}
    planned = {k: {m: rate / rates[2][1] for m, rate in of.items()} for k, of in rates.items()}
    yield from sizes({int(k): of for k, of in results.get("full", {}).items()})
    for k, of in rates.items():
        yield Series(f"n = {k}, {SIZE}", "speed", "m", of, How.PLANNED, "samples/s", RATES[k])
    for k, of in planned.items():
        bounds = {m: bound(k, m) for m in of}
        yield Series(f"n = {k}", "speed", "m", of, How.PLANNED, "x naive-2", SPEED[k], bounds)
        yield grows(f"n = {k}: grows with m", SPEED[k], of, How.PLANNED)
    yield Series("0.0.3's (18, 256)", "speed", "", OLD_RATES, How.PUBLISHED, "samples/s")
    most = max(planned[2])
    for m in {4, most}:
        theirs, of_m = ({k: of[k][m] for k in planned} for of in (SPEED, planned))
        yield grows(f"m = {m}: grows with n", theirs, of_m, How.PLANNED)
    ran = list[Series]()
    for name, limits in (("pipeline-2", {m: bound(2, m) for m in counts if m > 1}), ("torchgpipe-2", {})):
        gains = {m: [m * r for r in race.ratios(f"{name}, m = {m}", f"{name}, m = 1")] for m in counts}
        series = Series.measured(name, "speed", "m", gains, unit="x m = 1", published=SPEED[2], bound=limits)
        ran.append(series)
        here = {m: samples * m / median(race.seconds(f"{name}, m = {m}")) for m in counts}
        yield Series(f"{name}, {SIZE}", "speed", "m", here, unit="samples/s", published=RATES[2])
    yield from ran
    yield grows("n = 2: grows with m", SPEED[2], ran[0].here, How.RUN)
    yield from held_against(race, {f"pipeline-2, m = {m}": f"torchgpipe-2, m = {m}" for m in counts})
    by_n = [Line(f"m = {m}", How.PUBLISHED, {k: of[m] for k, of in SPEED.items()}) for m in (4, 32)]
    by_n += [Line(f"m = {m}", How.PLANNED, {k: of[m] for k, of in planned.items()}) for m in {4, most}]
    by_n.append(Line("0.0.3", How.PUBLISHED, OLD))
    by_n.append(Line("m = 32", How.BOUND, {k: bound(k, 32) for k in SPEED}))
    by_m = [Line("torchgpipe", How.PUBLISHED, SPEED[2]), Line("ours", How.PLANNED, planned[2])]
    by_m += [of.line(name) for of, name in zip(ran, ("ours", "torchgpipe"), strict=True)]
    by_m.append(Line("c K m / (m + K - 1)", How.BOUND, {m: bound(2, m) for m in SPEED[2] if m > 1}))
    yield Chart("Speed over naive-2", "partitions n", "x", by_n, "x")
    yield Chart("Speed of 2 partitions over m = 1", "microbatches m", "x", by_m, "x")


def sizes(full: Mapping[int, Any]) -> Iterator[Finding]:
    """Say what the full size has, holds and gains, by partitions."""
    if not full:
        return
    size, here, theirs = "full size, m = 32", (full[2]["layers"], full[2]["parameters"]), (LAYERS, PARAMETERS)
    says, published = (f"{layers}, {parameters:,}" for layers, parameters in (here, theirs))
    yield Check("layers and parameters", published, "the same", says, here == theirs, How.ARITHMETIC)
    for k, of in full.items():
        crossing = [sum(source == n for source, *_ in of["routes"]) for n in range(k - 1)]
        says, two = " ".join(map(str, crossing)), crossing == [2] * (k - 1)
        yield Check(f"n = {k}: values over each cut", "2", "the same", says, two, How.ARITHMETIC)
    gib = {k: max(of["peaks"]) / GIB for k, of in full.items()}
    yield Series(size, "fullest device", "n", gib, How.PLANNED, "GiB", bound=dict.fromkeys(full, P40))
    gains, bounds = {k: 3 * 32 / of["seconds"] for k, of in full.items()}, {k: bound(k, 32) for k in full}
    yield Series(size, "speed by work", "n", gains, How.PLANNED, "x naive-2", bound=bounds)


def grows(what: str, theirs: Mapping[int, float], gains: Mapping[int, float], how: How) -> Check:
    """Check that speed grows with the keys, by more than two runs of the same contestant differ."""
    says, published = (", ".join(f"{gain:.2f} at {n}" for n, gain in of.items()) for of in (gains, theirs))
    rises = all(less * (1 + TIE) < more for less, more in pairwise(gains.values()))
    return Check(what, published, f"{TIE:.0%} over the one before", says, rises, how)
