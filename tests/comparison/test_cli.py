"""The comparison from the outside: what it starts, keeps, refuses, survives and leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from comparison import cli
from tests.comparison.support import compare, started
from tests.support import DEADLINE_S
from tests.support.processes import CHECKOUT, ended, running

pytestmark = pytest.mark.processes

TWO = ("--schedules", "layer_dist", "pipedream", "--seeds", "0", "1")
ALL = ["layer_dist-seed0", "pipedream-seed0", "layer_dist-seed1", "pipedream-seed1"]


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures out, which take longer than everything else here."""
    monkeypatch.setattr(cli.plots, "write", lambda *_: [])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def misbehave(monkeypatch: pytest.MonkeyPatch, **schedules: str) -> None:
    monkeypatch.setenv("FAKE", json.dumps(schedules))


def test_it_goes_on_past_failed_runs_leaves_tables_and_keeps_what_is_done(out, capsys, monkeypatch):
    misbehave(monkeypatch, **{"layer_dist:1": "fail", "pipedream:0": "partial"})
    assert compare(*TWO, "--out", str(out), "data=digits") == 1
    assert started(out) == ALL
    said = capsys.readouterr().out
    assert "[1/4] layer_dist seed 0 ... 97.40 % in " in said
    assert "FAILED (it left no whole summary.json and metrics.csv: " in said
    assert "[3/4] layer_dist seed 1 ... FAILED (status 1) after " in said
    assert "    pipetrain: batch_size=0 must be a whole number of at least 1\n" in said
    assert f"    its output: {out}/runs/layer_dist-seed1.log\n" in said
    assert "2 of 4 runs failed: pipedream seed 0, layer_dist seed 1;" in said
    assert "layer_dist vgg16 1 of 2, pipedream vgg16 1 of 2" in (out / "table.md").read_text()
    misbehave(monkeypatch)
    again = ("--target", "97.45", "--latex")
    assert compare(*TWO, *again, "--out", str(out), "data=digits") == 0
    assert started(out) == [*ALL, "pipedream-seed0", "layer_dist-seed1"]
    said = capsys.readouterr().out
    assert re.search(r"\[4/4\] pipedream seed 1 \.\.\. 96\.50 % in [\d.]+s, kept from before\n", said)
    assert (out / "table.md").read_text() in said
    assert "| pipedream  | vgg16 |  97.45 |" in said
    assert said.endswith(f"written to {out}: table.md, runs.csv, table.tex, report.html\n")


def test_a_real_run(out, capsys):
    words = ["model=mlp", "data=digits", "epochs=1", "data.train_limit=64"]
    assert cli.main(["--nproc", "1", "--method", "mine: schedule=layer_dist", "--out", str(out), *words]) == 0
    summary = json.loads((out / "runs" / "mine-seed0" / "summary.json").read_text())
    assert (summary["stages"], summary["updates"]) == (1, 1)
    log = (out / "runs" / "mine-seed0.log").read_text()
    assert "pipetrain: mlp on digits (64 train, 360 test samples), schedule layer_dist, 1 x " in log


def test_runs_of_other_metrics_are_not_compared(out, capsys):
    methods = ("--method", "a: schedule=gpipe", "--method", "b: schedule=gpipe task=language_modelling")
    assert compare(*methods, "--out", str(out)) == 2
    assert capsys.readouterr().err.startswith("compare: runs by acc and ppl cannot be compared; give all")


def test_what_is_there_is_overwritten_only_where_it_is_asked_for_and_a_comparison_s_own(out, capsys):
    words = ["data=digits", "--method", "slow + steady: schedule=gpipe optim.lr=0.001", "--out", str(out)]
    assert compare(*words, "--", "epochs=3") == 0
    mark = json.loads((out / "runs" / "slow_steady-seed0" / "compare.json").read_text())
    assert mark["overrides"] == ["data=digits", "epochs=3", "schedule=gpipe", "optim.lr=0.001", "seed=0"]
    assert {"date", "machine", "python", "torch", "pipetrain"} <= set(mark["made"])
    assert 0 <= mark["others"] <= (os.cpu_count() or 1)
    capsys.readouterr()
    assert compare(*words, "--", "epochs=4") == compare(*words, "--nproc", "4", "--", "epochs=3") == 2
    assert capsys.readouterr().err.splitlines()[0] == (
        f"compare: {out}/runs/slow_steady-seed0 was made by other overrides ({' '.join(mark['overrides'])}, "
        "2 processes); choose another --out, or start over with --fresh"
    )
    mine = [out / "notes.txt", out / "runs" / "gpipe-seed0" / "thesis.tex"]
    mine[1].parent.mkdir()
    for path in mine:
        path.write_text("mine")
    assert compare("--schedules", "gpipe", "--out", str(out), "--fresh") == 2
    assert "was not made by a comparison" in capsys.readouterr().err
    assert compare(*words, "--fresh", "--", "epochs=4") == 0
    assert started(out) == ["slow_steady-seed0"] * 2
    assert [path.read_text() for path in mine] == ["mine", "mine"]


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_interrupted_it_ends_the_whole_run_and_goes_on_next_time(out):
    words = ["-m", "tests.comparison.support", *TWO, "--out", out, "data=digits"]
    hanging = out / "runs" / "hanging.txt"
    with running(CHECKOUT, words, {"FAKE": '{"layer_dist:1": "hang"}'}) as process:
        deadline = time.monotonic() + DEADLINE_S
        while not (hanging.exists() and len(hanging.read_text().split()) == 2):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        pids = [int(pid) for pid in hanging.read_text().split()]
        assert all(map(alive, pids))
        assert compare(*TWO, "--out", str(out), "data=digits") == 2  # the folder is taken
        process.send_signal(signal.SIGTERM)
        said = ended(process)
    assert process.returncode == 130
    assert f"interrupted\n2 of 4 runs are kept in {out}; the same command goes on there" in said
    assert not any(map(alive, pids))
    report = (out / "report.html").read_text()
    assert "The comparison is not finished: 2 of 4 runs are not made yet." in report
    assert compare(*TWO, "--out", str(out), "data=digits") == 0
    assert started(out) == [*ALL[:2], *["layer_dist-seed1"] * 2, "pipedream-seed1"]
