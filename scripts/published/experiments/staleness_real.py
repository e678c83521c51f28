"""What the study of late gradients recommends, in real pipelines of eight stages, beside synchronous ones."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from statistics import fmean
from typing import Any

from comparison.verdict import noise
from published.measures import trained
from published.record import NOT, Chart, Check, Finding, How, Line, Results, Series, Step

RANKS, SEEDS = 8, (0, 1, 2)
CLOSE = 0.3  # points of accuracy
DIGITS = ["data=digits", "model=vgg16", "model.width=16", "epochs=4", "batch_size=64"]
CIFAR = ["data=cifar10", "data.root=${oc.env:CIFAR10,data}", "data.fallback=null", "model=resnet18"]
CIFAR += ["model.width=8", "epochs=4", "batch_size=64", "data.train_limit=10000"]
RECIPE = ["threads=1", "device=cpu", "lr_schedule=cosine", "warmup=0.05"]
SGD, MUON, PIPE = ["optim=sgd", "optim.lr=0.02"], ["optim=muon", "optim.lr=0.01"], "schedule=pipedream_2bw"
EIGHT = ["microbatches=8"]
METHODS = {
    "SGD, 1f1b": [*SGD, *EIGHT, "schedule=1f1b"],
    "SGD, pipedream": [*SGD, "schedule=pipedream", "microbatches=1"],
    "Muon, 1f1b": [*MUON, *EIGHT, "schedule=1f1b"],
    "Muon, pipedream_2bw": [*MUON, *EIGHT, PIPE],
    "SGD, pipedream_2bw, gap_aware+msnag": [*SGD, *EIGHT, PIPE, "correction=[gap_aware,msnag]"],
    "SGD, pipedream_2bw, hybrid+gap_aware+msnag": [*SGD, *EIGHT, PIPE, "correction=[hybrid,gap_aware,msnag]"],
    "Muon, pipedream_2bw, msnag": [*MUON, *EIGHT, PIPE, "correction=msnag"],
    "Muon, pipedream_2bw, hybrid+spectrain": [*MUON, *EIGHT, PIPE, "correction=[hybrid,spectrain]"],
}
ON_CIFAR = ("Muon, 1f1b", "Muon, pipedream_2bw, msnag", "Muon, pipedream_2bw, hybrid+spectrain")
TASKS = [("digits", DIGITS, METHODS), ("CIFAR-10", CIFAR, ON_CIFAR)]
TINY = ["data=digits", "model=mlp", "data.train_limit=128", "data.test_limit=64", "epochs=1"]


def steps(quick: bool) -> dict[str, Step]:
    """Train by each method, seed by seed; of two seeds all methods come before the third."""
    tasks = [("digits", TINY, ON_CIFAR[1:2])] if quick else TASKS
    return {
        f"{data}: {name}: {seed}": Step(
            ended,
            {
                "overrides": [*words, *RECIPE, *METHODS[name]],
                "seed": seed,
                "nproc": 1 if quick else RANKS,
            },
            timed=False,
        )
        for data, words, names in tasks
        for seed in SEEDS[: 1 if quick else None]
        for name in names
    }


def ended(overrides: list[str], seed: int, nproc: int) -> dict[str, Any]:
    """Train; return the last test accuracy in %, and loss, and the accuracy after each epoch."""
    run = trained(overrides, seed, nproc)
    accuracies = [100 * accuracy for accuracy in run["curves"]["val_acc"]]
    return {"accuracy": accuracies[-1], "loss": run["summary"]["val_loss"], "curve": accuracies}


def show(results: Results) -> Iterator[Finding]:
    """Hold each method against the synchronous one of its optimizer."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, result in results.items():
        data, name, _ = key.split(": ")
        runs.setdefault((data, name), []).append(result)
    last = {key: [run["accuracy"] for run in of] for key, of in runs.items()}
    for data in dict.fromkeys(data for data, _ in last):
        of_data = {name: of for (on, name), of in last.items() if on == data}
        yield Series.measured(data, "test accuracy", "", of_data, fmean, unit="%")
    for (data, name), of in last.items():
        other = last.get((data, f"{name.split(', ')[0]}, 1f1b"))
        if other is None or other is of:
            continue
        worse, margin = fmean(other) - fmean(of), noise(of, other, 1)
        what = f"{data}: {name}: worse than the synchronous one"
        if margin is None:
            yield Check(what, NOT, f"at most {CLOSE} points", "too few seeds", None, How.RUN, untold=True)
        else:
            yield Check.of_interval(what, NOT, (-inf, CLOSE), worse, margin, "points")
    curves = {
        name: zip(*(run["curve"] for run in of), strict=True)
        for (on, name), of in runs.items()
        if on == "digits"
    }
    lines = [Line(name, How.RUN, dict(enumerate(map(fmean, of), 1))) for name, of in curves.items()]
    yield Chart("Test accuracy on 8 stages", "epochs", "%", lines)
