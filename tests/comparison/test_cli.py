"""The comparison from the outside: what it starts, keeps, refuses, survives and leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comparison import cli
from tests.comparison.support import compare, started

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
TWO = ("--schedules", "layer_dist", "pipedream", "--seeds", "0", "1")
ALL = ["layer_dist-seed0", "pipedream-seed0", "layer_dist-seed1", "pipedream-seed1"]
DIGITS = ("--", "model=vgg16", "data=digits")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures out, which take longer than everything else here."""
    monkeypatch.setattr(cli.plots, "write", lambda *_: [])


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def misbehave(monkeypatch: pytest.MonkeyPatch, **schedules: str) -> None:
    monkeypatch.setenv("FAKE", json.dumps(schedules))


def test_it_makes_every_run_leaves_tables_and_keeps_what_is_done(out, capsys):
    assert compare("--schedules", "pipedream", "--seeds", "0", "--out", str(out), *DIGITS) == 0
    assert compare(*TWO, "--out", str(out), *DIGITS) == 0
    assert started(out) == ["pipedream-seed0", "layer_dist-seed0", "layer_dist-seed1", "pipedream-seed1"]
    said = capsys.readouterr().out
    assert "[1/4] layer_dist seed 0 ... 97.40 % in " in said
    assert re.search(r"\[2/4\] pipedream seed 0 \.\.\. 96\.50 % in [\d.]+s, kept from before\n", said)
    assert (out / "table.md").read_text() in said
    assert said.endswith(f"written to {out}: table.md, runs.csv, report.html\n")


def test_it_goes_on_past_a_failed_run_and_tries_it_again(out, capsys, monkeypatch):
    misbehave(monkeypatch, **{"layer_dist:1": "fail"})
    assert compare(*TWO, "--out", str(out), *DIGITS) == 1
    assert started(out) == ALL
    said = capsys.readouterr().out
    assert "[3/4] layer_dist seed 1 ... FAILED (status 1) after " in said
    assert "    pipetrain: batch_size=0 must be a whole number of at least 1\n" in said
    assert f"    its output: {out}/runs/layer_dist-seed1.log\n" in said
    assert "1 of 4 runs failed: layer_dist seed 1;" in said
    assert "layer_dist vgg16 1 of 2" in (out / "table.md").read_text()
    misbehave(monkeypatch)
    assert compare(*TWO, "--out", str(out), *DIGITS) == 0
    assert started(out) == [*ALL, "layer_dist-seed1"]


def test_a_real_run(out, capsys):
    words = ["model=mlp", "data=digits", "epochs=1", "data.train_limit=64"]
    assert cli.main(["--method", "mine: schedule=layer_dist", "--out", str(out), *words]) == 0
    summary = json.loads((out / "runs" / "mine-seed0" / "summary.json").read_text())
    assert (summary["stages"], summary["updates"]) == (2, 1)
    log = (out / "runs" / "mine-seed0.log").read_text()
    assert "pipetrain: mlp on digits (64 train, 360 test samples), schedule layer_dist, 2 x " in log


def test_runs_of_other_metrics_are_not_compared(out, capsys):
    methods = ("--method", "a: schedule=gpipe", "--method", "b: schedule=gpipe task=language_modelling")
    assert compare(*methods, "--out", str(out), *DIGITS) == 2
    assert capsys.readouterr().err.startswith("compare: runs by acc and ppl cannot be compared; give all")


def test_a_run_without_whole_records_has_failed(out, capsys, monkeypatch):
    misbehave(monkeypatch, pipedream="partial")
    assert compare("--schedules", "pipedream", "layer_dist", "--out", str(out), *DIGITS) == 1
    assert "FAILED (it left no whole summary.json and metrics.csv: " in capsys.readouterr().out
    assert "|   failed |" in (out / "table.md").read_text().splitlines()[2]


def test_a_done_run_of_other_overrides_is_overwritten_by_fresh_alone_and_nothing_else_is(out, capsys):
    assert compare("--schedules", "gpipe", "--out", str(out), "--", "epochs=3") == 0
    mine = [out / "notes.txt", out / "runs" / "mine" / "summary.json"]
    mine[1].parent.mkdir()
    for path in mine:
        path.write_text("mine")
    assert compare("--schedules", "1f1b", "gpipe", "--out", str(out), "--", "epochs=4") == 2
    assert capsys.readouterr().err == (
        f"compare: {out}/runs/gpipe-seed0 was made by other overrides "
        "(epochs=3 schedule=gpipe seed=0, 2 processes); choose another --out, or start over with --fresh\n"
    )
    assert compare("--schedules", "gpipe", "--out", str(out), "--nproc", "4", "--", "epochs=3") == 2
    assert started(out) == ["gpipe-seed0"]
    assert compare("--schedules", "gpipe", "--out", str(out), "--fresh", "--", "epochs=4") == 0
    assert started(out) == ["gpipe-seed0"] * 2
    assert [path.read_text() for path in mine] == ["mine", "mine"]


def test_a_folder_of_another_origin_is_left_alone(out, capsys):
    foreign = out / "runs" / "gpipe-seed0" / "thesis.tex"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("")
    assert compare("--schedules", "gpipe", "--out", str(out), "--fresh") == 2
    assert "was not made by a comparison" in capsys.readouterr().err
    assert foreign.exists()


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_interrupted_it_ends_the_whole_run_and_goes_on_next_time(out):
    arguments = [sys.executable, "-m", "tests.comparison.support", *TWO, "--out", str(out), *DIGITS]
    code = os.pathsep.join(map(str, (ROOT, ROOT / "scripts")))
    environment = {**os.environ, "PYTHONPATH": code, "FAKE": '{"layer_dist:1": "hang"}'}
    process = subprocess.Popen(
        arguments, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    hanging = out / "runs" / "hanging.txt"
    try:
        deadline = time.monotonic() + 30
        while not (hanging.exists() and len(hanging.read_text().split()) == 2):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        pids = [int(pid) for pid in hanging.read_text().split()]
        assert all(map(alive, pids))
        assert compare(*TWO, "--out", str(out), *DIGITS) == 2  # the folder is taken
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"interrupted\n2 of 4 runs are kept in {out}; the same command goes on there" in said
    assert not any(map(alive, pids))
    report = (out / "report.html").read_text()
    assert "The comparison is not finished: 2 of 4 runs are not made yet." in report
    assert compare(*TWO, "--out", str(out), *DIGITS) == 0
    assert started(out) == [*ALL[:2], *["layer_dist-seed1"] * 2, "pipedream-seed1"]


def test_overrides_may_stand_anywhere_and_a_method_of_one_s_own_is_a_row(out, capsys):
    words = ["data=digits", "--method", "slow + steady: schedule=gpipe optim.lr=0.001", "epochs=4"]
    assert compare("--schedules", "gpipe", *words, "--out", str(out), "--", "batch_size=32") == 0
    assert started(out) == ["gpipe-seed0", "slow_steady-seed0"]
    mark = json.loads((out / "runs" / "slow_steady-seed0" / "compare.json").read_text())
    own = ["schedule=gpipe", "optim.lr=0.001"]
    assert mark["overrides"] == ["data=digits", "epochs=4", "batch_size=32", *own, "seed=0"]
    assert {"date", "machine", "python", "torch", "pipetrain"} <= set(mark["made"])
    assert 0 <= mark["others"] <= (os.cpu_count() or 1)
    assert "| slow + steady | digits  | vgg16 " in capsys.readouterr().out
