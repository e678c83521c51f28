"""The records of XdyPipe and of torchgpipe's accuracy: their verdicts can fail, line by line."""

from __future__ import annotations

from typing import Any

import pytest

from published.cli import record_of
from published.experiments import torchgpipe_accuracy, xdypipe
from published.page import Section
from published.record import NOT, Findings

SLOW = ["vgg16, fbp + int8: as fast as published", "resnet18, fbp + threshold: as fast as published"]
COSTS = [f"study, {model}: fbp + topk less fbp" for model in ("vgg16", "resnet18")]


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
    results: dict[str, Any] = {"study": xdypipe.study("")}
    for key in (f"{m}, {name}, 0" for m in xdypipe.WIDTHS for name in (xdypipe.ONE, *xdypipe.METHODS)):
        own = more if key == f"{model}, {method}, 0" else {}
        seconds = 10 if "layer_dist" in key else 7
        results[key] = {"val_loss": 1.0, "epoch_s": seconds, "bytes_per_epoch": 1e6, **own}
    assert {*failed(Findings.of(xdypipe.show(results)))} == {*SLOW, *COSTS, *fails}


@pytest.mark.parametrize(("model", "worse"), [("vgg16", xdypipe.INT8), ("resnet18", xdypipe.THRESHOLD)])
def test_xdypipe_says_what_codecs_cost_in_the_study_of_each_model(model: str, worse: str) -> None:
    rows = [row for row in xdypipe.study("") if row["model"] == "vgg16"]
    rows += [row | {"method": xdypipe.THRESHOLD} for row in rows if row["method"] == "fbp"]
    wrong = {xdypipe.TOPK: 0.6, worse: 0.3}
    for row in rows:
        row |= {"model": model, "val_acc": wrong.get(row["method"], row["val_acc"])}
    checks = Findings.of(xdypipe.show({"study": rows})).checks
    assert {check.what: check.came_back for check in checks} == {
        f"study, {model}: {name} less fbp": False if name == worse else None  # three seeds do not tell
        for name in (xdypipe.INT8, xdypipe.TOPK, xdypipe.THRESHOLD)
    }
    assert (checks[0].published == NOT) == (model == "resnet18")


def test_each_of_xdypipe_s_rows_stands_in_the_page_with_its_run_or_why_there_is_none() -> None:
    findings = Findings.of(xdypipe.show({"study": []}))
    section = Section("xdypipe", record_of("xdypipe"), findings, "", "", ())
    (table,) = findings.rows
    assert section.tables[-1] is section.short_tables[-1] is table
    assert len(table.lines) == 39
    assert all(line[-1].startswith(("not run yet: ", "not run: ")) for line in table.lines)
    numbers = {(line[6], line[7], line[8]) for line in table.lines}
    assert {("189", "92.92", "22s"), ("138", "92.54", "32s"), ("183", "91.38", "12s")} <= numbers
    tianhe = [line[1] for line in table.lines if line[3] == "tianhe*2"]
    assert tianhe == ["layer_dist", "pipeline", "ours", "ours + grad_compress"]
    (ours,) = (line for line in xdypipe.record_rows([("vgg16", xdypipe.WORKERS)]).lines if line[4] == "2")
    assert ours[-1] == "run: vgg16, fbp + 2 workers"
    assert xdypipe.published("vgg16", "acc") == {"layer_dist": 90.79, "pipedream": 90.4, "fbp + int8": 91.36}
    assert xdypipe.published("vgg16", "epoch") == {"layer_dist": 79, "pipedream": 75, "fbp + int8": 171}
    assert xdypipe.published("vgg16", "eachtime") == {"layer_dist": 21, "pipedream": 21, "fbp + int8": 7}
    times = {"layer_dist": 156, "fbp": 146, "fbp + threshold": 75}
    assert xdypipe.published("resnet18", "eachtime") == times


def test_xdypipe_s_own_method_has_two_data_workers_as_the_record_had_it() -> None:
    steps = {name: step for name, step in xdypipe.steps(False).items() if name != "study"}
    workers = {name for name, step in steps.items() if "data.workers=2" in step.arguments["overrides"]}
    assert workers == {"vgg16, fbp + 2 workers, 0", "vgg16, fbp + 2 workers, 1"}
    assert len(steps) == 28
    assert xdypipe.steps(True).keys() == {"study", "vgg16, one process, 0", "vgg16, layer_dist, 0"}


BESIDE = "pipeline-1k less dataparallel-1k"


@pytest.mark.parametrize(
    ("key", "more", "fails"),
    [
        ("pipeline-1k", {}, []),
        (
            "pipeline-1k",
            {"errors": [46.3 + 0.1 * seed for seed in range(torchgpipe_accuracy.SEEDS)]},
            [f"{BESIDE}: top-1 error"],
        ),
        (
            "pipeline-1k",
            {"errors": [45.0 + 2 * (seed % 2) + 0.1 * seed for seed in range(torchgpipe_accuracy.SEEDS)]},
            [f"{BESIDE}: half of its interval, so that it can be told"],
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
