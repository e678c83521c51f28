"""GPT-2's memory: peak activation by microbatches, with and without recomputation, beside torchgpipe."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np
import torch

from pipetrain.commands.cli import composed, values_of
from pipetrain.plan.paper_plan import planned
from pipetrain.schedule.memory import GIB, totals
from published.record import Chart, Check, Figure, Findings, How, Line, Record, Results, Step

PARAMETERS = 89_762_304
MODES = NEVER, ALWAYS = "never", "always"
WHO = OURS, THEIRS = "gpipe", "torchgpipe"
BALANCES = {1: [15], 2: [7, 8], 4: [4, 3, 3, 5]}
IN = (1, 2, 4, 8, 16, 32, 64)  # microbatches
RATIOS = {  # always / never, from two microbatches on
    1: dict(zip(IN[1:], (0.68, 0.60, 0.51, 0.46, 0.42, 0.39), strict=True)),
    2: dict(zip(IN[1:], (0.58, 0.35, 0.26, 0.25, 0.16, 0.17), strict=True)),
    4: dict(zip(IN[1:], (0.62, 0.41, 0.32, 0.35, 0.20, 0.21), strict=True)),
}
FLAT, FIT, TIMES, NO_MORE = 1.2, 0.98, (1.28, 1.34), 1.05  # NO_MORE: of torchgpipe's bytes
GPT = ("model=gpt", "data=text", "task=language_modelling", "optim=adamw")
FULL = (*GPT, "data.block=128", "model.vocabulary=3000")
NARROW = (*GPT, "data.block=16", "model.vocabulary=375", "model.width=96")
WIDER = (*GPT, "data.block=32", "model.vocabulary=750", "model.width=192")
TINY = (*GPT, "data.block=8", "model.vocabulary=256", "model.width=16", "model.heads=2", "model.depth=2")
NOTES = (
    "The record counts 16 layers, with the embeddings of tokens and of positions apart; here there are 15. "
    "Its cuts [16], [8,8], [5,3,3,5], three blocks a quarter, are [15], [7,8], [4,3,3,5].",
    "Runs: 12 blocks of 12 heads, an eighth of its width, vocabulary and sequence (96, 375, 16), 64 samples "
    "of Shakespeare; times: a quarter of these (192, 750, 32), 32 samples in 8. Counted alike for all, at "
    "each operation: activations, gradients on their way, messages; not weights and their gradients.",
    "Ratios are of the fullest device. Flat in m is what keeps all microbatches open, gpipe: 1f1b and zbv "
    "keep about K, and fall with m either way. What its backward follows at once is not recomputed here.",
    "torchgpipe orders the backwards of microbatches by the gradients of what they take, and tokens have "
    "none: on one device it runs all forwards again before the first backward, and frees nothing by it.",
)


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
    words = [f"partition={[*accumulate(balance)][:-1] or 'even'}", f"stages={len(balance)}", "batch_size=64"]
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
) -> Any:
    """Race gpipe, `others`, and torchgpipe in both modes; return seconds and the fullest device's bytes."""
    from benchmark.beside_torchgpipe import race_torchgpipe  # an extra

    schedules = {OURS: ()} | ({"1f1b": (), "zbv": ("partition=flops",)} if others else {})
    ways = {f"{s} {mode}": (s, f"recompute={mode}", *schedules[s]) for s in schedules for mode in MODES}
    figures: dict[str, Any] = {}
    for mode, more in ((NEVER, ways), (ALWAYS, {})):
        how: Any = {"rounds": rounds, "ways": more, "example": None, "say": lambda text: None}
        of_race = race_torchgpipe(overrides, balance, batch, m, mode, **how)
        figures |= {name if " " in name else f"{name} {mode}": of for name, of in of_race.items()}
    return {
        name: {"seconds": of["step_s"]["all"], "peak": max(of["peak_bytes"])} for name, of in figures.items()
    }


def fitted(peaks: dict[int, float]) -> tuple[float, float, float]:
    """Return N and A of the line N + A / m through peaks by m, by least squares, and its R squared."""
    y, x = np.array([*peaks.values()]), np.array([[1, 1 / m] for m in peaks])
    (fixed, shared), *_ = np.linalg.lstsq(x, y)
    left = y - x @ (fixed, shared)
    return float(fixed), float(shared), float(1 - (left**2).sum() / ((y - y.mean()) ** 2).sum())


def show(results: Results) -> Findings:
    """Hold flatness, fit, ratios and time against what was published, and against torchgpipe."""
    plans = {int(key.split()[1]): of for key, of in results.items() if key.startswith("planned")}
    parameters, figures = {of["parameters"] for of in plans.values()}, list[Figure]()
    same, says = parameters == {PARAMETERS}, " and ".join(f"{n:,}" for n in parameters)
    checks = [Check("parameters", f"{PARAMETERS:,}", says, same)]
    lines: dict[str, list[Line]] = {name: [] for name in (*MODES, "ratio", "plan")}
    for k, of in plans.items():
        peaks: dict[str, dict[int, float]] = {}
        for key, races in results.items():
            for name in races if key.startswith(f"bytes {k} ") else ():
                peaks.setdefault(name, {})[int(key.split()[2])] = races[name]["peak"] / 2**20
        for name, by_m in peaks.items():
            lines[name.split()[1]].append(Line(f"{name.split()[0]} K={k}", How.RUN, [*by_m.items()]))
        for who in WHO:
            never, always = peaks[f"{who} {NEVER}"], peaks[f"{who} {ALWAYS}"]
            ratios = {m: always[m] / never[m] for m in never if m > 1}
            for m, ratio in ratios.items():
                figures.append(Figure(f"K = {k}, m = {m}: always / never, {who}", RATIOS[k][m], ratio))
            lines["ratio"].append(Line(f"{who} K={k}", How.RUN, [*ratios.items()]))
            flat, (fixed, shared, fit) = max(never.values()) / min(never.values()), fitted(always)
            figures.append(Figure(f"K = {k}: max / min without, {who}", 1.18, flat))
            figures.append(Figure(f"K = {k}: R² of N + A / m, {who}", None, fit))
            if who == OURS:
                says = f"{fixed:.2f} + {shared:.1f} / m MiB, R² {fit:.3f}"
                checks += [
                    Check(
                        f"K = {k}: flat in m without", "max / min 1.12 to 1.18", f"{flat:.2f}", flat <= FLAT
                    ),
                    Check(f"K = {k}: with recomputation", "N + A / m", says, fit > FIT),
                ]
        lines["ratio"].append(Line(f"K={k}", How.PUBLISHED, [*RATIOS[k].items()]))
        most = max(peaks[f"{OURS} {mode}"][m] / peaks[f"{THEIRS} {mode}"][m] for mode in MODES for m in never)
        what = f"K = {k}: holds no more than torchgpipe"
        checks.append(Check(what, "1", f"{most:.2f} at most", most <= NO_MORE))
        for mode in MODES:
            gib = {m: nbytes / GIB for m, nbytes in zip(never, of[mode], strict=True)}
            lines["plan"].append(Line(f"{mode} K={k}", How.PLANNED, [*gib.items()]))
            what = f"full size, K = {k}, m = {m}: {mode}"
            figures.append(Figure(what, None, gib[m], How.PLANNED, unit="GiB"))
        for timed in (races for key, races in results.items() if key == f"time {k}"):
            seconds = {name: median(of["seconds"]) for name, of in timed.items()}
            dear = {who: seconds[f"{who} {ALWAYS}"] / seconds[f"{who} {NEVER}"] for who in WHO}
            figures += [Figure(f"K = {k}: time x, {who}", 1.3, dear[who], bound=4 / 3) for who in WHO]
            came = TIMES[0] <= dear[OURS] <= TIMES[1]
            checks.append(Check(f"K = {k}: time x", "1.28 to 1.30, ideal 4/3", f"{dear[OURS]:.2f}", came))
            for mode in MODES:
                faster = seconds[f"{THEIRS} {mode}"] / seconds[f"{OURS} {mode}"]
                what = f"K = {k}: as fast as torchgpipe, {mode}"
                checks.append(Check(what, "1", f"{faster:.2f}", faster >= 1))
    x, part = "microbatches m", "of the fullest device"
    charts = [
        Chart(f"Never recomputed: activations {part}", x, "MiB", lines[NEVER], "x"),
        Chart(f"Always recomputed: activations {part}", x, "MiB", lines[ALWAYS], "xy"),
        Chart("Always / never", x, "", lines["ratio"], "xy"),
        Chart(f"Full size, gpipe: activations {part}", x, "GiB", lines["plan"], "xy"),
    ]
    return Findings(figures, checks, charts, NOTES)


RECORD = Record(
    "Peak activation of GPT-2 by microbatches, with and without recomputation, beside torchgpipe",
    "A published experiment with GPT-2 small (vocabulary 3000, 128 tokens, batch 64) on 1, 2 and 4 GPUs, "
    "with an implementation of its own and with torchgpipe 0.0.7.",
    steps,
    show,
    "Its throughput column was taken without synchronising and is void. Its attention ran across the batch.",
)
