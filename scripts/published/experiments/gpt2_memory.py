"""GPT-2's memory: peak activation by microbatches, with and without recomputation, beside torchgpipe."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import inf
from statistics import median
from typing import Any

import numpy as np
import torch

from pipetrain.commands.cli import composed, values_of
from pipetrain.plan.paper_plan import planned
from pipetrain.schedule.memory import GIB, totals
from published.measures import Race, partition
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step, those
from published.torchgpipe_race import SPEED, THEIRS, TIE, race_torchgpipe

PARAMETERS = 89_762_304
MODES = NEVER, ALWAYS = "never", "always"
OURS = "gpipe"
WHO = OURS, THEIRS
BALANCES = {1: [15], 2: [7, 8], 4: [4, 3, 3, 5]}
IN = (1, 2, 4, 8, 16, 32, 64)  # microbatches
RATIOS = {  # always / never, from two microbatches on
    1: dict(zip(IN[1:], (0.68, 0.60, 0.51, 0.46, 0.42, 0.39), strict=True)),
    2: dict(zip(IN[1:], (0.58, 0.35, 0.26, 0.25, 0.16, 0.17), strict=True)),
    4: dict(zip(IN[1:], (0.62, 0.41, 0.32, 0.35, 0.20, 0.21), strict=True)),
}
FLAT, FIT, TIMES, NO_MORE = (
    1.2,
    0.98,
    (1.27, 1.4),
    1.05,
)  # TIMES: 4/3 within 5 %; NO_MORE: of torchgpipe's bytes
VOID = "void: not synchronised"
GPT = ("model=gpt", "data=text", "task=language_modelling", "optim=adamw")
FULL = (*GPT, "data.block=128", "model.vocabulary=3000")
NARROW = (*GPT, "data.block=16", "model.vocabulary=375", "model.width=96")
WIDER = (*GPT, "data.block=32", "model.vocabulary=750", "model.width=192")
TINY = (*GPT, "data.block=8", "model.vocabulary=256", "model.width=16", "model.heads=2", "model.depth=2")


def steps(quick: bool) -> dict[str, Step]:
    """Plan the model at full size; count a narrow one's bytes; time a wider one."""
    balances, counts, full, narrow = (
        ({2: [2, 3]}, (1, 4), TINY, TINY) if quick else (BALANCES, IN, FULL, NARROW)
    )
    made = {f"planned {k}": Step(plan, {"overrides": full, "balance": b, "counts": counts})
            for k, b in balances.items()}  # fmt: skip
    for k, balance in balances.items():
        for m in counts:
            others = k > 1 and m in (4, 16) and not quick
            known = {"overrides": narrow, "balance": balance, "batch": 64, "m": m, "others": others}
            made[f"bytes {k} {m}"] = Step(race, known)
        if k < 4 and not quick:
            wider = {"overrides": WIDER, "balance": balance, "batch": 32, "m": 8, "rounds": 9}
            made[f"time {k}"] = Step(race, wider)
    return made


def plan(overrides: Sequence[str], balance: Sequence[int], counts: Sequence[int]) -> dict[str, Any]:
    """Return the parameters, and by mode what the fullest rank has open, in bytes, by microbatches."""
    words = [partition(balance), f"stages={len(balance)}", "batch_size=64"]
    result: dict[str, Any] = {mode: [] for mode in MODES}
    for m, mode in ((m, mode) for m in counts for mode in MODES):
        more = [f"microbatches={m}", f"recompute={mode}", "schedule=gpipe"]
        with torch.device("meta"):
            of = planned(values_of(composed("plan", [*overrides, *words, *more])), "gpipe", 1)
        of_ranks = of.memory()
        result[mode].append(max(max(totals(rank, ("activations", "messages"))) for rank in of_ranks))
        result["parameters"] = sum(layer.params for layer in of.layers)
    return result


def race(
    overrides: Sequence[str],
    balance: Sequence[int],
    batch: int,
    m: int,
    others: bool = False,
    rounds: int = 1,
) -> dict[str, Any]:
    """Race gpipe, `others`, and torchgpipe in both modes; return seconds and the fullest device's bytes."""
    words: dict[str, list[str]] = {who: [] for who in WHO}
    words |= {"1f1b": [], "zbv": ["partition=flops"]} if others else {}
    entrants = {
        f"{who} {mode}": (who, balance, f"recompute={mode}", *more)
        for who, more in words.items()
        for mode in MODES
    }
    raced = Race(race_torchgpipe([*overrides, f"batch_size={batch}", f"microbatches={m}"], entrants, rounds))
    return {name: {"seconds": raced.seconds(name), "peak": max(raced.of[name]["peaks"])} for name in entrants}


def fitted(peaks: dict[int, float]) -> tuple[float, float, float]:
    """Return N and A of the line N + A / m through peaks by m, by least squares, and its R squared."""
    y, x = np.array([*peaks.values()]), np.array([[1, 1 / m] for m in peaks])
    (fixed, shared), *_ = np.linalg.lstsq(x, y)
    left, all_of_it = ((y - of) ** 2 for of in (x @ (fixed, shared), y.mean()))
    return float(fixed), float(shared), float(1 - left.sum() / all_of_it.sum()) if all_of_it.any() else 1.0


def show(results: Results) -> Iterator[Finding]:
    """Hold flatness, fit, ratios and time against what was published, and against torchgpipe."""
    plans = {int(k): plan for k, plan in those(results, "planned ").items()}
    parameters = {of["parameters"] for of in plans.values()}
    says = " and ".join(f"{n:,}" for n in parameters)
    yield Check("parameters", f"{PARAMETERS:,}", "the same", says, parameters == {PARAMETERS}, How.ARITHMETIC)
    lines: dict[str, list[Line]] = {name: [] for name in (*MODES, "ratio", "plan")}
    flat, fits, full = (defaultdict[str, dict[int, float]](dict) for _ in range(3))  # by K
    for k, plan in plans.items():
        peaks: dict[str, dict[int, float]] = {}  # by contestant and microbatches, in MiB
        for m, race in those(results, f"bytes {k} ").items():
            for name, of in race.items():
                peaks.setdefault(name, {})[int(m)] = of["peak"] / 2**20
        for name, by_m in peaks.items():
            who, mode = name.split()
            lines[mode].append(Line(f"{who} K={k}", How.RUN, by_m))
        for who in WHO:
            never, always = (peaks[f"{who} {mode}"] for mode in MODES)
            here = {m: always[m] / never[m] for m in never if m > 1}
            ratio = Series(f"K = {k}, {who}", "always / never", "m", here, published=RATIOS[k])
            yield ratio
            lines["ratio"].append(ratio.line(f"{who} K={k}"))
            worst = flat[who][k] = max(never.values()) / min(never.values())
            fixed, shared, fits[who][k] = fitted(always)
            if who == OURS:
                what = f"K = {k}: flat in m without, max / min"
                yield Check.of(what, "1.12 to 1.18", (1, FLAT), worst, How.RUN)
                says = f"{fixed:.2f} + {shared:.1f} / m MiB, R² {fits[who][k]:.3f}"
                what, limits = f"K = {k}: with recomputation, R² of N + A / m", (FIT, 1)
                yield Check.of(what, NOT, limits, fits[who][k], How.RUN, says)
        lines["ratio"].append(Line(f"K={k}", How.PUBLISHED, RATIOS[k]))
        most = max(peaks[f"{OURS} {mode}"][m] / peaks[f"{THEIRS} {mode}"][m] for mode in MODES for m in never)
        what = f"K = {k}: holds no more than torchgpipe"
        yield Check.of(what, NOT, (0, NO_MORE), most, How.RUN, unit=" of it")
        for mode in MODES:
            gib = {m: nbytes / GIB for m, nbytes in zip(never, plan[mode], strict=True)}
            lines["plan"].append(Line(f"{mode} K={k}", How.PLANNED, gib))
            full[mode][k] = gib[max(gib)]
    for who in WHO:
        yield Series(who, "max / min without", "K", flat[who], published=dict.fromkeys(plans, 1.18))
        yield Series(who, "R² of N + A / m", "K", fits[who])
    for mode, by_k in full.items():
        yield Series(f"full size, m = {max(never)}", mode, "K", by_k, How.PLANNED, "GiB")
    yield from timed({int(k): Race(of) for k, of in those(results, "time ").items()})
    part = "of the fullest device"
    for title, key, unit, logs in (
        (f"Never recomputed: activations {part}", NEVER, "MiB", "x"),
        (f"Always recomputed: activations {part}", ALWAYS, "MiB", "xy"),
        ("Always / never", "ratio", "x never", "xy"),
        (f"Full size, gpipe: activations {part}", "plan", "GiB", "xy"),
    ):
        yield Chart(title, "microbatches m", unit, lines[key], logs)


def timed(races: dict[int, Race]) -> Iterator[Finding]:
    """Hold what recomputation costs in time, and our speed, against torchgpipe's."""
    cost: dict[str, dict[int, float]] = {who: {} for who in WHO}
    for k, race in races.items():
        seconds = {name: median(race.of[name]["seconds"]) for name in race.of}
        for who in WHO:
            cost[who][k] = seconds[f"{who} {ALWAYS}"] / seconds[f"{who} {NEVER}"]
        yield Check.of(f"K = {k}: time of recomputation, x", VOID, TIMES, cost[OURS][k], How.RUN)
        for mode in MODES:
            faster = seconds[f"{THEIRS} {mode}"] / seconds[f"{OURS} {mode}"]
            what = f"K = {k}: as fast as torchgpipe, {mode}"
            yield Check.of(what, NOT, (1 - TIE, inf), faster, How.RUN, unit=f" {SPEED}")
    for who, by_k in cost.items() if races else ():
        ideal, published = dict.fromkeys(by_k, 4 / 3), dict.fromkeys(by_k, 1.3)
        yield Series(who, "time x", "K", by_k, published=published, bound=ideal)
