"""XdyPipe's tables: forward-backward parallelism and codecs beside taking turns, by the comparison's runs."""

from __future__ import annotations

import csv
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import sha256
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from comparison import request
from comparison.verdict import noise
from published.measures import trained
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Rows, Series, Step

FIRST, ONE = "layer_dist", "one process"
WORKERS, TOPK, THRESHOLD, INT8 = "fbp + 2 workers", "fbp + topk", "fbp + threshold", "fbp + int8"
METHODS = (FIRST, "pipedream", "fbp", WORKERS, TOPK, THRESHOLD, INT8)
WIDTHS = {"vgg16": 16, "resnet18": 8}  # a quarter and an eighth
AT = "method"
TIMES, SLACK, NEAR = f"x {FIRST}", 0.05, 1e-6  # of its speed; of a published one; of a loss
SAME = 1.0  # points of accuracy; the record's rows differ by at most .7 where it trains to the end
STUDY = Path(__file__).parents[3] / "docs/results/xdypipe-cifar10/runs.csv"
RECORD = Path(__file__).with_suffix(".csv")
"""The record's rows as printed; `here`: the method that stands for a row, of the same model."""
MODELS = {"vgg16": "vgg16", "Res18": "resnet18"}  # of the rows that have a method here
Runs = Mapping[str, list[dict[str, float]]]
"""By method."""
KEYS = ("val_loss", "val_acc", "best_val_acc", "best_epoch", "epoch_s", "bytes_per_epoch")


def steps(quick: bool) -> dict[str, Step]:
    """Read the larger study; train by each method in turn, seed by seed."""
    sizes = ["epochs=1", "data.train_limit=128", "data.test_limit=64"] if quick else ["epochs=3"]
    seeds = ["--seeds", "0", *["1"] * (not quick)]
    one = ["--schedules", FIRST, "--nproc", "1", "--seeds", "0", "partition=flops"]
    chosen = {"study": Step(study, {"digest": sha256(STUDY.read_bytes()).hexdigest()[:16]}, timed=False)}
    for model, width in {"vgg16": 2}.items() if quick else WIDTHS.items():
        words = ["--experiment", "xdypipe_full", "--models", model, "data=digits", f"model.width={width}"]
        names = [name for name in METHODS if name != WORKERS or model == "vgg16"]  # the record's is VGG16
        methods = [word for name in names[: 1 if quick else None] for word in ("--method", name)]
        for name, more in ((ONE, one), ("", [*methods, *seeds])):
            for spec in request.read([*words, *sizes, "threads=1", *more]).specs:
                arguments = {"overrides": spec.arguments[:-1], "seed": spec.seed, "nproc": spec.nproc}
                chosen[f"{model}, {name or spec.method.name}, {spec.seed}"] = Step(ran, arguments)
    return chosen


def rows_of(path: Path) -> list[dict[str, str]]:
    """Read a table with a head."""
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]


def study(digest: str) -> list[dict[str, Any]]:
    """Return what docs/results/xdypipe-cifar10 has of each run; `digest`: of the file, read again if new."""
    return [
        {"model": row["model"], "method": row["method"], **{key: float(row[key]) for key in KEYS}}
        for row in rows_of(STUDY)
    ]


def ran(overrides: Sequence[str], seed: int, nproc: int) -> dict[str, float]:
    """Train; return what the study has of a run."""
    summary = trained(overrides, seed, nproc)["summary"]
    return {key: summary[key] for key in KEYS}


def show(results: Results) -> Iterator[Finding]:
    """Say what the runs found of speed, and the study of accuracy; list the record's rows."""
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
    yield Chart("Speed by method", AT, TIMES, lines, categories=METHODS)
    by_model: dict[str, list[dict[str, Any]]] = {}
    for row in results["study"]:
        by_model.setdefault(row["model"], []).append(row)
    for model, rows in by_model.items():
        yield from studied(model, rows)
    yield record_rows({(model, method) for model, of in runs.items() for method in of})


def record_rows(made: Collection[tuple[str, str]]) -> Rows:
    """Return the record's rows, each with what stands for it here, or why nothing does.

    `made`: the models and methods of which there are runs.
    """
    rows = rows_of(RECORD)
    *shown, here, remark = rows[0]
    lines = []
    for row in rows:
        stands = "not run"
        if row[here]:
            model = MODELS[row["model"]]
            stands = f"{'run' if (model, row[here]) in made else 'not run yet'}: {model}, {row[here]}"
        lines.append(
            [*(row[name] or "-" for name in shown), f"{stands}: {row[remark]}" if row[remark] else stands]
        )
    note = "As printed; -: not reported. A part of result.md, grad compress, has the rows of pipeline again."
    return Rows("The record's rows", [*shown, here], lines, [note], (*shown[:4], here))


def published(model: str, column: str) -> dict[str, float]:
    """Return the published numbers of a column, by method: seconds of an epoch, accuracy in %, its epoch."""
    rows = [row for row in rows_of(RECORD) if row["here"] and MODELS[row["model"]] == model and row[column]]
    return {row["here"]: seconds(row[column]) if column == "eachtime" else float(row[column]) for row in rows}


def device_of(model: str, name: str) -> str:
    """Return the device of the row whose time is published for a method."""
    rows = [row for row in rows_of(RECORD) if row["here"] == name and row["eachtime"]]
    return next(row["device"] for row in rows if MODELS[row["model"]] == model)


def seconds(text: str) -> float:
    """Read a time such as 2m36s."""
    minutes, _, rest = text.rpartition("m")
    return 60 * float(minutes or 0) + float(rest.removesuffix("s"))


def seconds_of(runs: Runs) -> dict[str, list[float]]:
    """Return the seconds of an epoch of each method's runs."""
    return {name: [run["epoch_s"] for run in runs[name]] for name in METHODS if name in runs}


def speeds_of(model: str, runs: Runs) -> Series:
    """Return how many times as fast as layer_dist each method is, and was as published."""
    here, theirs = seconds_of(runs), published(model, "eachtime")
    speeds = {
        name: [first / own for first, own in zip(here[FIRST], of, strict=True)] for name, of in here.items()
    }
    faster = {name: theirs[FIRST] / of for name, of in theirs.items()}
    return Series.measured(model, "speed", AT, speeds, unit=TIMES, published=faster)


def timed(model: str, runs: Runs, speed: Series) -> Iterator[Finding]:
    """Hold the methods' times against layer_dist's, and layer_dist against one process."""
    off = abs(runs[FIRST][0]["val_loss"] / runs[ONE][0]["val_loss"] - 1)
    yield Check.of(f"{model}: {FIRST} has one process's loss", NOT, (0, NEAR), off, How.RUN, unit=" off")
    here = seconds_of(runs)
    yield Series.measured(
        model, "an epoch", AT, here, fmean, unit="s", published=published(model, "eachtime")
    )
    yield speed
    sent = {name: runs[name][0]["bytes_per_epoch"] / 1e6 for name in here}
    yield Series(model, "sent in an epoch", AT, sent, unit="MB")
    for name, theirs in speed.published.items():
        if name != FIRST and name in speed.here:
            what, limits = f"{model}, {name}: as fast as published", (theirs * (1 - SLACK), inf)
            says = f"{theirs:.2f} {TIMES}" + ", which had another GPU" * (
                device_of(model, name) != device_of(model, FIRST)
            )
            yield Check.of(what, says, limits, speed.here[name], How.RUN)


def studied(model: str, rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    """Hold the study's accuracies against the record's, and the codecs' against those without."""
    of_methods = {name: [row for row in rows if row["method"] == name] for name in METHODS}
    by = {name: of for name, of in of_methods.items() if of}
    last, best = (
        {name: [100 * row[key] for row in of] for name, of in by.items()} for key in ("val_acc", KEYS[2])
    )
    at = {name: of[best[name].index(max(best[name]))]["best_epoch"] for name, of in by.items()}
    sent = {name: of[0]["bytes_per_epoch"] / 1e6 for name, of in by.items()}
    what, theirs = f"study, {model}", published(model, "acc")
    yield Series.measured(what, "best accuracy", AT, best, max, unit="%", published=theirs)
    yield Series(what, "its epoch", AT, at, published=published(model, "epoch"))
    accuracies = Series.measured(what, "last accuracy", AT, last, fmean, unit="%")
    yield accuracies
    yield Series(what, "sent in an epoch", AT, sent, unit="MB")
    means = accuracies.here
    gaps = {name: means[name] - means["fbp"] for name in (INT8, TOPK, THRESHOLD) if name in means}
    for name, gap in gaps.items():
        margin = noise(last[name], last["fbp"], len(gaps)) or 0.0
        said = f"{theirs[name]} % beside {theirs[FIRST]} % of {FIRST}" if name in theirs else NOT
        yield Check.of_interval(f"{what}: {name} less fbp", said, (-SAME, SAME), gap, margin, "points")
    lines = [
        Line(name, How.RUN, {sent[name]: mean}, [accuracies.spread[name]]) for name, mean in means.items()
    ]
    yield Chart(f"Study, {model}: what fewer bytes cost", "MB in an epoch", "last accuracy, %", lines)
