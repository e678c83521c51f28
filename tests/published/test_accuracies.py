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


@pytest.mark.parametrize(
    ("key", "more", "fails"),
    [
        ("pipeline-2: seed 1", {}, []),
        ("pipeline-4: without BatchNorm", {"loss": 2.01}, ["without BatchNorm: the loss of one process"]),
        (
            "pipeline-4, recompute: seed 1",
            {"loss": 2.01},
            ["recompute and more stages change no bit of a loss"],
        ),
        (
            "pipeline-2, deferred",
            {"error": 70.0},
            [
                "pipeline-2, deferred: within the noise of one process",
                "pipeline-2, deferred: as near to one process as published",
            ],
        ),
    ],
)
def test_torchgpipe_s_accuracy_says_which_way_learns_otherwise(
    key: str, more: dict[str, float], fails: list[str]
) -> None:
    steps = torchgpipe_accuracy.steps(False)
    assert len(steps) == 5 + 3 * 7
    results = {
        name: {"error": 60.0 + step.arguments["seed"], "loss": 2.0, **(more if name.startswith(key) else {})}
        for name, step in steps.items()
    }
    assert failed(Findings.of(torchgpipe_accuracy.show(results))) == fails


def test_no_step_names_a_folder_of_this_machine() -> None:
    assert all("/" not in str(step.asked) for step in torchgpipe_accuracy.steps(False).values())
