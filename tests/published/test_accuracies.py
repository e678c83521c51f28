"""The records of XdyPipe and of torchgpipe's accuracy: their verdicts can fail, line by line."""

from __future__ import annotations

from typing import Any

import pytest

from published.experiments import torchgpipe_accuracy, xdypipe
from published.record import Findings

SLOW = ["vgg16, fbp + int8: as fast as published", "resnet18, fbp + topk: as fast as published"]
COSTS = "study: fbp + topk is within the noise of fbp"


def failed(findings: Findings) -> list[str]:
    return [check.what for check in findings.checks if check.came_back is False]


@pytest.mark.parametrize(
    ("model", "method", "more", "fails"),
    [
        ("vgg16", "fbp + topk", {}, []),
        ("vgg16", "layer_dist", {"val_loss": 1.001}, ["vgg16: layer_dist has one process's loss"]),
        ("resnet18", "fbp", {"epoch_s": 10}, ["resnet18, fbp: as fast as published"]),
    ],
)
def test_xdypipe_says_what_is_slow_or_not_one_process(
    model: str, method: str, more: dict[str, float], fails: list[str]
) -> None:
    results: dict[str, Any] = {"study": xdypipe.study()}
    for key in (f"{m}, {name}, 0" for m in xdypipe.WIDTHS for name in (xdypipe.ONE, *xdypipe.METHODS)):
        own = more if key == f"{model}, {method}, 0" else {}
        results[key] = {"val_loss": 1.0, "epoch_s": 10 if "layer_dist" in key else 7, **own}
    assert {*failed(Findings.of(xdypipe.show(results)))} == {*SLOW, COSTS, *fails}


def test_xdypipe_says_what_codecs_cost_in_the_study() -> None:
    rows = xdypipe.study()
    for row in rows:
        row["val_acc"] = {"fbp + int8": 0.3, "fbp + topk": 0.6}.get(row["method"], row["val_acc"])
    assert [check.came_back for check in Findings.of(xdypipe.studied(rows)).checks] == [False, True]


BESIDE = "pipeline-1k less dataparallel-1k"


@pytest.mark.parametrize(
    ("key", "more", "fails"),
    [
        ("pipeline-1k", {}, []),
        ("pipeline-1k", {"errors": [46.3 + 0.1 * seed for seed in range(10)]}, [f"{BESIDE}: top-1 error"]),
        (
            "pipeline-1k",
            {"errors": [45.0 + 2 * (seed % 2) + 0.1 * seed for seed in range(10)]},
            [f"{BESIDE}: top-1 error", f"{BESIDE}: half of its interval"],
        ),
        (
            "without BatchNorm: pipeline-4k",
            {"losses": [2.01]},
            ["pipeline-4k: without BatchNorm, off the loss of one process"],
        ),
        (
            torchgpipe_accuracy.AGAIN,
            {"losses": [2.01]},
            [f"{torchgpipe_accuracy.AGAIN}: the loss on 2"],
        ),
    ],
)
def test_torchgpipe_s_accuracy_says_which_row_learns_otherwise(
    key: str, more: dict[str, Any], fails: list[str]
) -> None:
    steps = torchgpipe_accuracy.steps(False)
    assert len(steps) == 6 + 1 + 9
    results = {}
    for name, step in steps.items():
        seeds = range(step.arguments["seeds"])
        of = {"errors": [46.0 + 0.1 * seed for seed in seeds], "losses": [2.0 for _ in seeds]}
        results[name] = of | (more if name == key else {})
    assert failed(Findings.of(torchgpipe_accuracy.show(results))) == fails


def test_the_rate_is_the_record_s() -> None:
    """It rises from 0.1 in four of 90 epochs, and falls to a tenth after 30, 60 and 80."""
    rates = [torchgpipe_accuracy.rate(epoch / 90, 0.4) for epoch in (0, 2, 4, 29, 31, 61, 81)]
    assert rates == pytest.approx([0.1, 0.25, 0.4, 0.4, 0.04, 0.004, 0.0004])


def test_no_step_names_a_folder_of_this_machine() -> None:
    assert all("/" not in str(step.asked) for step in torchgpipe_accuracy.steps(False).values())
