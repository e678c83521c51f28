"""XdyPipe's table: forward-backward parallelism and codecs beside taking turns, by the comparison's runs."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from comparison import request
from comparison.verdict import noise
from published.measures import trained
from published.record import Chart, Check, Figure, Findings, How, Line, Record, Results, Step

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
TIMES, FAST, NEAR = f"x {FIRST}", 1.4, 1e-6  # of its speed; of a loss
STUDY = Path(__file__).parents[3] / "docs/results/xdypipe-cifar10/runs.csv"
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


def show(results: Results) -> Findings:
    """Say what the runs found of speed, and the study of accuracy."""
    runs: dict[str, dict[str, list[dict[str, float]]]] = {}  # by model, then by method
    for key, result in results.items():
        if key != "study":
            model, method, _ = key.split(", ")
            runs.setdefault(model, {}).setdefault(method, []).append(result)
    parts = [timed(model, of) for model, of in runs.items()]
    names = ", ".join(f"{n} {method}" for n, method in enumerate(METHODS, 1))
    speeds = Chart("Speed by method", names, TIMES, [line for _, _, lines in parts for line in lines])
    figures, checks, chart = studied(results["study"])
    return Findings(
        [*figures, *(figure for of, _, _ in parts for figure in of)],
        [*(check for _, of, _ in parts for check in of), *checks],
        [chart, speeds],
        [NOTE],
    )


def timed(
    model: str, runs: dict[str, list[dict[str, float]]]
) -> tuple[list[Figure], list[Check], list[Line]]:
    """Hold the methods' times against layer_dist's, and layer_dist against one process."""
    off = abs(runs[FIRST][0]["val_loss"] / runs[ONE][0]["val_loss"] - 1)
    checks = [Check(f"{model}: {FIRST} is one process", "equal", f"loss off by {off:.1g}", off <= NEAR)]
    seconds = {name: [run["epoch_s"] for run in runs[name]] for name in METHODS if name in runs}
    speeds = {
        name: [first / own for first, own in zip(seconds[FIRST], of, strict=True)]
        for name, of in seconds.items()
    }
    theirs = {name: PUBLISHED[model, name][2] for name in METHODS if (model, name) in PUBLISHED}
    faster = {name: theirs[FIRST] / of for name, of in theirs.items()}
    figures = []
    for name, each in seconds.items():
        what, speed = f"{model}, {name}", median(speeds[name])
        figures += [
            Figure(f"{what}: an epoch", theirs.get(name), fmean(each), How.RUN, ends(each), unit="s"),
            Figure(f"{what}: speed", faster.get(name), speed, How.RUN, ends(speeds[name]), unit=TIMES),
        ]
        if name in ("pipedream", "fbp"):
            says = f"{faster[name]:.2f}" if name in faster else "not reported"
            checks.append(Check(f"{what}: at least {FAST} {TIMES}", says, f"{speed:.2f}", speed >= FAST))
    medians = {name: median(each) for name, each in speeds.items()}
    lines = [
        Line(model, how, [(METHODS.index(name) + 1, y) for name, y in of.items()])
        for how, of in ((How.RUN, medians), (How.PUBLISHED, faster))
    ]
    return figures, checks, lines


def studied(rows: Sequence[dict[str, Any]]) -> tuple[list[Figure], list[Check], Chart]:
    """Hold the study's accuracies against the record's, and the codecs' against those without."""
    by = {name: [row for row in rows if row["method"] == name] for name in METHODS}
    last = {name: [100 * row["val_acc"] for row in of] for name, of in by.items()}
    sent = {name: of[0]["bytes_per_epoch"] / 1e6 for name, of in by.items()}
    figures = []
    for name, of in by.items():
        what, (accuracy, epoch, _) = f"study, vgg16, {name}", PUBLISHED.get(("vgg16", name), (None,) * 3)
        best = [100 * row["best_val_acc"] for row in of]
        at = of[best.index(max(best))]["best_epoch"]
        figures += [
            Figure(f"{what}: best accuracy", accuracy, max(best), How.RUN, ends(best), unit="%"),
            Figure(f"{what}: its epoch", epoch, at),
            Figure(f"{what}: last accuracy", None, fmean(last[name]), How.RUN, ends(last[name]), unit="%"),
            Figure(f"{what}: sent in an epoch", None, sent[name], unit="MB"),
        ]
    gaps = {name: fmean(last[name]) - fmean(last["fbp"]) for name in ("fbp + int8", "fbp + topk")}
    margins = {name: noise(last[name], last["fbp"], len(gaps)) or 0.0 for name in gaps}
    here = {name: f"{gap:+.1f} points, noise ±{margins[name]:.1f}" for name, gap in gaps.items()}
    int8, topk = gaps
    within, costs = abs(gaps[int8]) <= margins[int8], gaps[topk] < -margins[topk]
    beside = "91.36 % beside 90.79 % of layer_dist"
    checks = [
        Check(f"study: {int8} is within the noise of fbp", beside, here[int8], within),
        Check(f"study: the price of {topk} in accuracy", "not reported", here[topk], costs),
    ]
    lines = [Line(name, How.RUN, [(sent[name], fmean(of))]) for name, of in last.items()]
    return figures, checks, Chart("Study: what fewer bytes cost", "MB in an epoch", "last accuracy, %", lines)


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Return the least and the most."""
    return min(values), max(values)


NOTE = (
    "Run here: a VGG16 a quarter and a ResNet18 an eighth as wide, on the 1,437 images of data=digits, in 3 "
    "epochs by the record's recipe and cuts, 2 seeds, two processes with a thread each. Study: "
    "docs/results/xdypipe-cifar10, of 2026-11-23: VGG16 a quarter as wide, 10,000 images of CIFAR-10, 12 "
    "epochs, 3 seeds; its seconds are left out, because other programs ran beside it. Accuracy and its "
    "epoch: the best epoch of all seeds, as published. Noise: half of Welch's 95 % interval, for 2 "
    "differences."
)
RECORD = Record(
    "Layers on two devices: in turns, pipelined, and forward-backward parallel with codecs",
    "XdyPipe, ours/result.md (CoderXDY/XdyPipe on GitHub): CIFAR-10, rate 0.01, batches of 64; VGG16 on two "
    "2080 Ti (8 bit: two 2080), ResNet18 on two 2080.",
    steps,
    show,
    "One seed, and the best epoch of up to 200. pipedream stashes no weights. Its own method has two data "
    "workers, the others none, and 8 bit another GPU. The 8-bit row of ResNet18 (91.38 %, epoch 183, 12 s) "
    "is probably of VGG16, and is left out. Gradient clipping is in truth top-k, whose indices overflowed; "
    "8 bit did not clamp, and its error feedback subtracted the wrong thing.",
)
