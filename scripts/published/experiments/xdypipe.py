"""XdyPipe's table: forward-backward parallelism and codecs beside taking turns, by the comparison's runs."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from comparison import request
from comparison.verdict import noise
from published.measures import trained
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step

FIRST, ONE = "layer_dist", "one process"
METHODS = (FIRST, "pipedream", "fbp", "fbp + topk", "fbp + int8")
WIDTHS = {"vgg16": 16, "resnet18": 8}  # a quarter and an eighth
PUBLISHED = {  # best accuracy in %, its epoch, and seconds of an epoch; None: not reported
    ("vgg16", FIRST): (90.79, 79, 21),
    ("vgg16", "pipedream"): (90.4, 75, 21),
    ("vgg16", "fbp + int8"): (91.36, 171, 7),
    ("resnet18", FIRST): (None, None, 156),
    ("resnet18", "fbp"): (None, None, 146),
    ("resnet18", "fbp + topk"): (None, None, 75),
}
TIMES, SLACK, NEAR = f"x {FIRST}", 0.05, 1e-6  # of its speed; of a published one; of a loss
STUDY = Path(__file__).parents[3] / "docs/results/xdypipe-cifar10/runs.csv"
Runs = Mapping[str, list[dict[str, float]]]
"""By method."""
KEYS = ("val_loss", "val_acc", "best_val_acc", "best_epoch", "epoch_s", "bytes_per_epoch")


def steps(quick: bool) -> dict[str, Step]:
    """Read the larger study; train by each method in turn, seed by seed."""
    sizes = ["epochs=1", "data.train_limit=128", "data.test_limit=64"] if quick else ["epochs=3"]
    methods = ["--schedules", FIRST] if quick else [word for name in METHODS for word in ("--method", name)]
    seeds = ["--seeds", "0", *["1"] * (not quick)]
    one = ["--schedules", FIRST, "--nproc", "1", "--seeds", "0", "partition=flops"]
    chosen = {"study": Step(study)}
    for model, width in {"vgg16": 2}.items() if quick else WIDTHS.items():
        words = ["--experiment", "xdypipe_full", "--models", model, "data=digits", f"model.width={width}"]
        for name, more in ((ONE, one), ("", [*methods, *seeds])):
            for spec in request.read([*words, *sizes, "threads=1", *more]).specs:
                arguments = {"overrides": spec.arguments[:-1], "seed": spec.seed, "nproc": spec.nproc}
                chosen[f"{model}, {name or spec.method.name}, {spec.seed}"] = Step(ran, arguments)
    return chosen


def study() -> list[dict[str, Any]]:
    """Return what docs/results/xdypipe-cifar10 has of each run."""
    with STUDY.open(newline="") as file:
        rows = csv.DictReader(file)
        return [{"method": row["method"], **{key: float(row[key]) for key in KEYS}} for row in rows]


def ran(overrides: Sequence[str], seed: int, nproc: int) -> dict[str, float]:
    """Train; return what the study has of a run."""
    summary = trained(overrides, seed, nproc)["summary"]
    return {key: summary[key] for key in KEYS}


def show(results: Results) -> Iterator[Finding]:
    """Say what the runs found of speed, and the study of accuracy."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}  # by model, then by method
    for key, result in results.items():
        if key != "study":
            model, method, _ = key.split(", ")
            runs.setdefault(model, {}).setdefault(method, []).append(result)
    lines = list[Line]()
    for model, of in runs.items():
        speed = speeds_of(model, of)
        yield from timed(model, of, speed)
        spread = [speed.spread[name] for name in speed.here]
        for how, by_method, band in ((How.RUN, speed.here, spread), (How.PUBLISHED, speed.published, None)):
            lines.append(
                Line(model, how, {METHODS.index(name) + 1: x for name, x in by_method.items()}, band)
            )
    yield from studied(results["study"])
    yield Chart("Speed by method", "method", TIMES, lines, categories=METHODS)


def published(model: str, n: int) -> dict[str, float]:
    """Return the published numbers of a kind, by method."""
    rows = {method: PUBLISHED[model, method] for method in METHODS if (model, method) in PUBLISHED}
    return {method: number for method, row in rows.items() if (number := row[n]) is not None}


def seconds_of(runs: Runs) -> dict[str, list[float]]:
    """Return the seconds of an epoch of each method's runs."""
    return {name: [run["epoch_s"] for run in runs[name]] for name in METHODS if name in runs}


def speeds_of(model: str, runs: Runs) -> Series:
    """Return how many times as fast as layer_dist each method is, and was as published."""
    seconds, theirs = seconds_of(runs), published(model, 2)
    speeds = {
        name: [first / own for first, own in zip(seconds[FIRST], of, strict=True)]
        for name, of in seconds.items()
    }
    faster = {name: theirs[FIRST] / of for name, of in theirs.items()}
    return Series.measured(model, "speed", "", speeds, unit=TIMES, published=faster)


def timed(model: str, runs: Runs, speed: Series) -> Iterator[Finding]:
    """Hold the methods' times against layer_dist's, and layer_dist against one process."""
    off = abs(runs[FIRST][0]["val_loss"] / runs[ONE][0]["val_loss"] - 1)
    yield Check.of(f"{model}: {FIRST} has one process's loss", NOT, (0, NEAR), off, How.RUN, unit=" off")
    seconds = seconds_of(runs)
    yield Series.measured(model, "an epoch", "", seconds, fmean, unit="s", published=published(model, 2))
    yield speed
    for name, theirs in speed.published.items():
        if name != FIRST and name in speed.here:
            what, limits = f"{model}, {name}: as fast as published", (theirs * (1 - SLACK), inf)
            yield Check.of(what, f"{theirs:.2f} {TIMES}", limits, speed.here[name], How.RUN)


def studied(rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Hold the study's accuracies against the record's, and the codecs' against those without."""
    by = {name: [row for row in rows if row["method"] == name] for name in METHODS}
    last, best = (
        {name: [100 * row[key] for row in of] for name, of in by.items()} for key in ("val_acc", KEYS[2])
    )
    at = {name: of[best[name].index(max(best[name]))]["best_epoch"] for name, of in by.items()}
    sent = {name: of[0]["bytes_per_epoch"] / 1e6 for name, of in by.items()}
    what, accuracy, epoch = "study, vgg16", published("vgg16", 0), published("vgg16", 1)
    yield Series.measured(what, "best accuracy", "", best, max, unit="%", published=accuracy)
    yield Series(what, "its epoch", "", at, published=epoch)
    accuracies = Series.measured(what, "last accuracy", "", last, fmean, unit="%")
    yield accuracies
    yield Series(what, "sent in an epoch", "", sent, unit="MB")
    means = accuracies.here
    int8, topk = "fbp + int8", "fbp + topk"
    gaps = {name: means[name] - means["fbp"] for name in (int8, topk)}
    margins = {name: noise(last[name], last["fbp"], len(gaps)) or 0.0 for name in gaps}
    here = {name: f"{gap:+.1f} points, noise ±{margins[name]:.1f}" for name, gap in gaps.items()}
    beside = "91.36 % beside 90.79 % of layer_dist"
    for name, theirs in ((int8, beside), (topk, NOT)):
        within = abs(gaps[name]) <= margins[name]
        yield Check(
            f"study: {name} is within the noise of fbp", theirs, "within it", here[name], within, How.RUN
        )
    lines = [
        Line(name, How.RUN, {sent[name]: mean}, [accuracies.spread[name]]) for name, mean in means.items()
    ]
    yield Chart("Study: what fewer bytes cost", "MB in an epoch", "last accuracy, %", lines)
