"""The command line: suites that run, fail, are interrupted, or are not there; and the targets on a GPU."""

from __future__ import annotations

import re

import pytest
import torch

from benchmark import cli, contestants, models
from benchmark.report import Row
from benchmark.tasks import Scale

SHOWN = {
    "held": ["held, mlp pipedream 2 ranks", "stage 1", "within 10%"],
    "factory": ["factory, rank 3", "after a step"],
}


@pytest.mark.processes
def test_suites_run_small(tmp_path, capsys):
    """Those whose contestants no other test runs."""
    out = tmp_path / "new" / "report.md"
    assert cli.main([*SHOWN, "--quick", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert out.read_text() == said.out
    assert f"command: python scripts/bench.py {' '.join(SHOWN)} --quick" in said.out
    for suite, words in SHOWN.items():
        assert [word for word in words if word not in said.out] == [], suite


def test_a_row_that_failed_is_told_by_the_status(monkeypatch, capsys):
    rows = [Row("a", "torch zbv", [], "", failure="no more"), Row("a", "1f1b", [1.0], "ms")]
    monkeypatch.setattr(cli, "SUITES", {"a": [lambda scale, say: iter(rows)]})
    assert cli.main([]) == cli.FAILED
    assert re.search(r"torch zbv +\| FAILED .*no more.*\n.*1f1b +\| +1 ms", capsys.readouterr().out)


def rows_of(part, series, bounds, monkeypatch):
    """Return the rows of a suite whose race goes as said, by contestant."""
    monkeypatch.setattr(contestants, "run_world", lambda *_, **__: [(series, bounds)])
    return {row.contestant: row for row in part(Scale(2), print)}


def test_everybody_is_held_against_its_bound_our_1f1b_and_torchs(monkeypatch):
    seconds = {"1f1b": 1.0, "torch 1f1b": 1.0, "zb_h1": 0.8, "torch zb_h1": 0.84, "v_min": 1.25}
    series = {f"{name}, m = 8": [s, s] for name, s in seconds.items()}
    (part,) = cli.SUITES["schedules"]
    rows = rows_of(part, series, dict.fromkeys(series, 0.78), monkeypatch)
    found = rows["zb_h1, m = 8"]
    assert found.ratios == pytest.approx({"of bound": 0.975, "x 1f1b": 1.25, "x torch's": 1.05})
    assert found.targets == {"of bound >= 0.97": True, "x torch's >= 1.00": True, "x 1f1b >= 1.12": True}
    assert rows["v_min, m = 8"].ratios == pytest.approx({"of bound": 0.624, "x 1f1b": 0.8})
    assert rows["torch 1f1b, m = 8"].targets == {}


def test_replicas_are_held_against_their_bound_ddp_one_replica_and_the_plan(monkeypatch):
    (part,) = cli.SUITES["replicas"]
    seconds = {"[2, 1]": 1.0, "[1, 1]": 2.6, "[1, 3]": 1.0, "torch DDP": 0.97, "replicas=2": 1.0}
    series = {name: [s, s] for name, s in seconds.items()}
    bounds = {"[2, 1]": 0.96, "replicas=2": 0.89}
    monkeypatch.setattr(contestants, "run_world", lambda *_, **__: [(series, bounds)])
    targets = {(row.benchmark, row.contestant): row.targets for row in part(Scale(2), print)}
    assert targets["replicas, 1f1b", "[2, 1]"] == {"of bound >= 0.95": True}
    assert targets["replicas, pipedream, times 1 : 3", "[1, 3]"] == {"x [1, 1] >= 2.50": True}
    assert targets["replicas, VGG16", "replicas=2"] == {
        "x torch DDP >= 0.97": True,
        "of predicted within 10%": False,
    }


def test_the_schedule_that_is_predicted_to_be_fastest_is_held_against_the_fastest(monkeypatch):
    (part,) = cli.SUITES["advice"]
    seconds, bounds = {"1f1b": 1.0, "zb_h1": 0.7, "zbv": 0.65}, {"1f1b": 1.05, "zb_h1": 0.64, "zbv": 0.66}
    rows = rows_of(part, {name: [s, s] for name, s in seconds.items()}, bounds, monkeypatch)
    assert rows["zbv"].ratios == pytest.approx(
        {"x 1f1b": 1 / 0.65, "of predicted": 0.66 / 0.65, "predicted x 1f1b": 1.05 / 0.66}
    )
    assert {name: [*row.targets.values()] for name, row in rows.items()} == {
        "1f1b": [True],
        "zb_h1": [True, False],  # 1.08 times the time of zbv
        "zbv": [True],
    }


def test_the_targets_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    series = {"1f1b": 0.010, "gpipe": 0.012, "pipedream": 0.008, "torch 1f1b": 0.01, "torch gpipe": 0.011}
    series |= {"1f1b, CUDA graphs": 0.0051, "pipedream, CUDA graphs": 0.004}
    pair, *_, one = cli.SUITES["gpu"]
    rows = rows_of(pair, {name: [s] * 2 for name, s in series.items()}, {}, monkeypatch)
    assert {name: list(row.targets.values()) for name, row in rows.items()} == {
        "1f1b": [True],
        "gpipe": [False],
        "pipedream": [True],
        "1f1b, CUDA graphs": [False],
        "pipedream, CUDA graphs": [True],
        "torch 1f1b": [],
        "torch gpipe": [],
    }
    rows = rows_of(one, {models.PLAIN: [0.97, 0.97], "1f1b": [1.0, 1.0]}, {}, monkeypatch)
    assert (rows["1f1b"].targets, rows[models.PLAIN].targets) == ({"x plain loop >= 0.97": True}, {})


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (
            cli.WorldFailed("rank 1: Traceback (most recent call last):\n  File\nno more\nand why"),
            1,
            "a FAILED: no more",
        ),
        (KeyboardInterrupt(), 130, "INTERRUPTED in suite a: what follows it is missing."),
    ],
)
def test_what_was_measured_is_kept_whatever_ends_it_and_other_parts_go_on(
    monkeypatch, capsys, error, status, says
):
    def failing(scale, say):
        yield Row("a, first", "1f1b", [1.0], "ms")
        raise error

    def going_on(scale, say):
        yield Row("a, second", "1f1b", [1.0], "ms")

    monkeypatch.setattr(cli, "SUITES", {"a": [failing, going_on]})
    assert cli.main([]) == status
    said = capsys.readouterr().out
    assert says in said
    assert "a, first" in said
    assert ("a, second" in said) == (status == 1)
