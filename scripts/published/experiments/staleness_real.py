"""What the study of late gradients recommends, in real pipelines of eight stages, beside synchronous ones."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

from comparison.verdict import noise
from published.measures import trained
from published.record import Chart, Check, Finding, How, Line, Results, Series, Step

RANKS, SEEDS = 8, (0, 1, 2)
CLOSE = 0.3  # points of accuracy
DIGITS = ["data=digits", "model=vgg16", "model.width=16", "epochs=4", "batch_size=64"]
CIFAR = ["data=cifar10", "data.root=${oc.env:CIFAR10,data}", "data.fallback=null", "model=resnet18"]
CIFAR += ["model.width=8", "epochs=4", "batch_size=64", "data.train_limit=10000"]
RECIPE = ["threads=1", "device=cpu", "lr_schedule=cosine", "warmup=0.05"]
SGD, MUON = ["optim=sgd", "optim.lr=0.02"], ["optim=muon", "optim.lr=0.01"]
EIGHT = ["microbatches=8"]
METHODS = {
    "SGD, 1f1b": [*SGD, *EIGHT, "schedule=1f1b"],
    "SGD, pipedream": [*SGD, "schedule=pipedream", "microbatches=1"],
    "Muon, 1f1b": [*MUON, *EIGHT, "schedule=1f1b"],
    "Muon, pipedream_2bw": [*MUON, *EIGHT, "schedule=pipedream_2bw"],
}
CURED = (
    ("SGD", "gap_aware,msnag"),
    ("SGD", "hybrid,gap_aware,msnag"),
    ("Muon", "msnag"),
    ("Muon", "hybrid,spectrain"),
)
for optimizer, names in CURED:
    correction = f"[{names}]" if "," in names else names
    METHODS[f"{optimizer}, pipedream_2bw, {names.replace(',', '+')}"] = [
        *METHODS[f"{optimizer}, 1f1b"][:-1],
        "schedule=pipedream_2bw",
        f"correction={correction}",
    ]
ON_CIFAR = ("Muon, 1f1b", "Muon, pipedream_2bw, msnag", "Muon, pipedream_2bw, hybrid+spectrain")


def steps(quick: bool) -> dict[str, Step]:
    """Train by each method, seed by seed; of two seeds all methods come before the third."""
    if quick:
        words = [
            "data=digits",
            "model=mlp",
            *RECIPE,
            "data.train_limit=128",
            "data.test_limit=64",
            "epochs=1",
        ]
        return {f"digits: {ON_CIFAR[1]}: 0": _step([*words, *METHODS[ON_CIFAR[1]]], 0, 1)}
    return {
        f"{data}: {name}: {seed}": _step([*words, *RECIPE, *METHODS[name]], seed, RANKS)
        for data, words, names in (("digits", DIGITS, METHODS), ("CIFAR-10", CIFAR, ON_CIFAR))
        for seed in SEEDS
        for name in names
    }


def _step(overrides: list[str], seed: int, nproc: int) -> Step:
    return Step(ended, {"overrides": overrides, "seed": seed, "nproc": nproc})


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
        gap, margin = fmean(of) - fmean(other), noise(of, other, 1)
        within = "too few seeds" if margin is None else f"noise ±{margin:.2f}"
        what, here = f"{data}: {name}: within {CLOSE} points", f"{gap:+.2f}, {within}"
        yield Check(what, "-", here, gap >= -CLOSE)
    curves = {
        name: zip(*(run["curve"] for run in of), strict=True)
        for (on, name), of in runs.items()
        if on == "digits"
    }
    lines = [Line(name, How.RUN, dict(enumerate(map(fmean, of), 1))) for name, of in curves.items()]
    yield Chart("Test accuracy on 8 stages", "epochs", "%", lines)
