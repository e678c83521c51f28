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

from comparison import cli, request
from comparison.methods import of_schedule
from comparison.runs import Spec, torchrun
from pipetrain.cli import quoted
from tests.comparison.support import compare, started

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
TWO = ("--schedules", "layer_dist", "pipedream", "--seeds", "0", "1")
ALL = ["layer_dist-seed0", "pipedream-seed0", "layer_dist-seed1", "pipedream-seed1"]
DIGITS = ("--", "model=vgg16", "data=digits")


@pytest.fixture
def drawn() -> None:
    """For a test that looks at the pictures."""


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures out, which take longer than everything else here."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(cli.plots, "write", lambda *_: None)
        monkeypatch.setattr(cli.report, "write", lambda *_: None)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def misbehave(monkeypatch: pytest.MonkeyPatch, **schedules: str) -> None:
    monkeypatch.setenv("FAKE", json.dumps(schedules))


def test_it_makes_every_run_and_leaves_tables_and_pictures(out, drawn, capsys):
    assert compare(*TWO, "--out", str(out), *DIGITS) == 0
    assert started(out) == ALL
    said = capsys.readouterr().out
    assert said.startswith("[1/4] layer_dist seed 0 ... 97.8 % in 0.")
    assert (out / "table.md").read_text() in said
    assert f"written to {out}: table.md, table.csv, runs.csv, accuracy_epoch.png" in said
    for name in cli.FILES:
        assert (out / name).stat().st_size > 0


def test_done_runs_are_kept(out, capsys):
    assert compare(*TWO, "--out", str(out), *DIGITS) == 0
    first = (out / "table.md").read_text()
    assert compare(*TWO, "--out", str(out), *DIGITS) == 0
    assert started(out) == ALL
    said = capsys.readouterr().out
    assert re.search(r"\[4/4\] pipedream seed 1 \.\.\. 97\.1 % in [\d.]+s, kept from before\n", said)
    assert (out / "table.md").read_text() == first


def test_more_seeds_and_schedules_join_what_is_there(out):
    assert compare("--schedules", "pipedream", "--seeds", "0", "--out", str(out), *DIGITS) == 0
    assert compare(*TWO, "--out", str(out), *DIGITS) == 0
    assert started(out) == ["pipedream-seed0", "layer_dist-seed0", "layer_dist-seed1", "pipedream-seed1"]


def test_it_goes_on_past_a_failed_run_and_tries_it_again(out, capsys, monkeypatch):
    misbehave(monkeypatch, **{"layer_dist:1": "fail"})
    assert compare(*TWO, "--out", str(out), *DIGITS) == 1
    assert started(out) == ALL
    said = capsys.readouterr().out
    assert "[3/4] layer_dist seed 1 ... FAILED (status 1) after " in said
    assert "    pipetrain: batch_size=0 must be a whole number of at least 1\n" in said
    assert "elastic" not in said
    assert f"    its output: {out}/runs/layer_dist-seed1.log\n" in said
    assert "1 of 4 runs failed: layer_dist seed 1;" in said
    assert "layer_dist vgg16 1 of 2" in (out / "table.md").read_text()
    misbehave(monkeypatch)
    assert compare(*TWO, "--out", str(out), *DIGITS) == 0
    assert started(out) == [*ALL, "layer_dist-seed1"]


@pytest.mark.parametrize("what", ["empty", "partial"])
def test_a_run_without_whole_records_has_failed(out, capsys, monkeypatch, what):
    misbehave(monkeypatch, pipedream=what)
    assert compare("--schedules", "pipedream", "layer_dist", "--out", str(out), *DIGITS) == 1
    assert "FAILED (it left no whole summary.json and metrics.csv: " in capsys.readouterr().out
    rows = (out / "table.md").read_text().splitlines()
    assert rows[2].startswith("| pipedream ")
    assert "| failed |" in rows[2]


def test_all_failed_still_writes_everything(out, drawn, monkeypatch):
    misbehave(monkeypatch, layer_dist="fail", pipedream="fail")
    assert compare(*TWO, "--out", str(out), *DIGITS) == 1
    assert all((out / name).stat().st_size for name in cli.FILES)


def test_a_done_run_of_other_overrides_is_not_overwritten(out, capsys):
    assert compare("--schedules", "gpipe", "--out", str(out), "--", "epochs=3") == 0
    assert compare("--schedules", "1f1b", "gpipe", "--out", str(out), "--", "epochs=4") == 2
    assert capsys.readouterr().err == (
        f"compare: {out}/runs/gpipe-seed0 was made by other overrides "
        "(epochs=3 schedule=gpipe seed=0, 2 processes); choose another --out, or start over with --fresh\n"
    )
    assert started(out) == ["gpipe-seed0"]
    assert compare("--schedules", "gpipe", "--out", str(out), "--nproc", "4", "--", "epochs=3") == 2


def test_fresh_starts_over_and_removes_only_what_it_made(out, capsys):
    assert compare(*TWO, "--out", str(out), "--", "epochs=3") == 0
    mine = [out / "notes.txt", out / "runs" / "mine" / "summary.json"]
    mine[1].parent.mkdir()
    for path in mine:
        path.write_text("mine")
    assert compare("--schedules", "pipedream", "--out", str(out), "--fresh", "--", "epochs=4") == 0
    assert started(out) == [*ALL, "pipedream-seed0"]
    assert [path.read_text() for path in mine] == ["mine", "mine"]
    assert (out / "runs" / "layer_dist-seed0" / "summary.json").exists()


def test_the_command_that_makes_it_again_removes_nothing(out, monkeypatch):
    shown = []
    monkeypatch.setattr(cli.report, "write", lambda *given: shown.append(given[-1]))
    assert compare("--fresh", "--schedules", "gpipe", "--out", str(out), "--fresh", "data=digits") == 0
    assert shown == [f"--schedules gpipe --out {out} data=digits"]


def test_a_folder_of_another_origin_is_left_alone(out, capsys):
    foreign = out / "runs" / "gpipe-seed0" / "thesis.tex"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("")
    for fresh in ([], ["--fresh"]):
        assert compare("--schedules", "gpipe", "--out", str(out), *fresh) == 2
        assert "was not made by a comparison" in capsys.readouterr().err
    assert foreign.exists()


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_the_whole_run_and_goes_on_next_time(out, number):
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
        process.send_signal(number)
        said, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert f"interrupted\n2 of 4 runs are kept in {out}; the same command goes on there" in said
    assert not any(map(alive, pids))
    report = (out / "report.html").read_text()
    assert "The comparison is not finished: 2 of 4 runs are not made yet." in report
    assert compare(*TWO, "--out", str(out), *DIGITS) == 0
    assert started(out) == [
        "layer_dist-seed0",
        "pipedream-seed0",
        *["layer_dist-seed1"] * 2,
        "pipedream-seed1",
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "there is nothing to compare: give --schedules, --method or --experiment"),
        (["--schedules", "gpipe", "1f2b"], "--schedules: there is no 1f2b; choose from 1f1b, "),
        (["--schedules", "gpipe", "gpipe"], "--schedules: gpipe stands there twice"),
        (["--schedules", "gpipe", "--seeds", "1", "1"], "--seeds: 1 stands there twice"),
        (["--schedules", "gpipe", "--models", "vgg61"], "--models: there is no vgg61; choose from "),
        (["--schedules", "gpipe", "--nproc", "0"], "--nproc must be 1 or more; got 0"),
        (
            ["--schedules", "gpipe", "--", "seed=3"],
            "seed is set by --seeds; leave seed=3 out of the overrides",
        ),
        (["--schedules", "gpipe", "--", "+run_dir=x"], "run_dir is set by --out;"),
        (["--schedules", "gpipe", "--models", "vgg16", "--", "model=mlp"], "model is set by --models;"),
        (
            ["--schedules", "gpipe", "--", "--multirun"],
            "after -- come overrides such as epochs=5; got --multirun",
        ),
        (["--method", "mine"], "--method: there is no mine; say what it is: 'mine: schedule=...'"),
        (["--method", "mine: schedule=gpipe codec"], "--method mine: codec is no override, such as"),
        (["--method", "mine: optim.lr=1"], "--method mine: a method needs one schedule=NAME among"),
        (["--method", "mine: schedule=gpipe seed=1"], "--method mine: seed is not the method's to say;"),
        (["--method", "+: schedule=gpipe"], "--method +: a method needs a name with letters or digits"),
        (["--method", "mine: schedule=1f2b"], "method mine: there is no 1f2b; choose from 1f1b, "),
        (
            ["--method", "a b: schedule=gpipe", "--method", "a+b: schedule=gpipe"],
            "the methods a b and a+b would share the folder a_b; rename one",
        ),
        (
            ["--method", "slow: schedule=gpipe optim.lr=0.1", "optim.lr=1"],
            "optim.lr is set by the method slow; leave optim.lr=1 out of the overrides",
        ),
        (["--experiment", "nothing"], "--experiment: there is no nothing; choose from xdypipe, or FILE.yaml"),
        (["--experiment", "no/such.yaml"], "--experiment: no/such.yaml cannot be read: No such file"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(
    tmp_path, monkeypatch, capsys, arguments, why
):
    monkeypatch.chdir(tmp_path)
    assert compare(*arguments) == 2
    assert capsys.readouterr().err.startswith(f"compare: {why}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [["--schedules"], ["--schedules", "gpipe", "--seeds"]])
def test_an_empty_list_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        compare(*arguments)
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        ([], "default"),
        (["--", "model=vgg16", "data=digits", "epochs=5"], "vgg16-digits-epochs_5"),
        (["--models", "vgg16", "mlp", "--", "++optim.lr=0.1"], "vgg16+mlp-optim.lr_0.1"),
        (["--nproc", "4", "--", "partition=[3,6,9]"], "partition_3_6_9_-nproc_4"),
    ],
)
def test_the_folder_is_named_after_what_is_compared(arguments, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compare("--schedules", "gpipe", *arguments) == 0
    assert [path.name for path in Path("comparisons").iterdir()] == [folder]


def test_models_are_rows_of_one_table(out):
    arguments = ["--schedules", "layer_dist", "pipedream", "--models", "vgg16", "resnet18", "--out", str(out)]
    assert compare(*arguments) == 0
    assert started(out) == [
        f"{m}-{s}-seed0" for m in ("vgg16", "resnet18") for s in ("layer_dist", "pipedream")
    ]
    rows = [line.split() for line in (out / "table.md").read_text().splitlines()[2:6]]
    assert [(row[1], row[5], row[-2]) for row in rows] == [
        ("layer_dist", "vgg16", "1.00x"),
        ("pipedream", "vgg16", "1.90x"),
        ("layer_dist", "resnet18", "1.00x"),
        ("pipedream", "resnet18", "1.90x"),
    ]


def test_overrides_may_stand_anywhere_and_a_method_of_one_s_own_is_a_row(out, capsys):
    words = ["data=digits", "--method", "slow + steady: schedule=gpipe optim.lr=0.001", "epochs=4"]
    assert compare("--schedules", "gpipe", *words, "--out", str(out), "--", "batch_size=32") == 0
    assert started(out) == ["gpipe-seed0", "slow_steady-seed0"]
    mark = json.loads((out / "runs" / "slow_steady-seed0" / "compare.json").read_text())
    own = ["schedule=gpipe", "optim.lr=0.001"]
    assert mark["overrides"] == ["data=digits", "epochs=4", "batch_size=32", *own, "seed=0"]
    assert {"date", "machine", "python", "torch", "pipetrain"} <= set(mark["made"])
    assert "| slow + steady | digits" in capsys.readouterr().out


def test_a_run_is_started_as_a_user_would():
    (spec,) = request.read(["--schedules", "gpipe", "--", "stages=3", "epochs=2"])[1].specs
    assert torchrun(spec, Path("/a b/c"))[1:] == [
        *("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3", "-m", "pipetrain"),
        *("checkpoint.every=null", "stages=3", "epochs=2", "schedule=gpipe", "seed=0", "run_dir='/a b/c'"),
    ]


@pytest.mark.parametrize("path", ["/plain/path-1.0", "/a b", "/it's", "/x=1,y", "/a\\'b", "/(1)"])
def test_hydra_reads_a_quoted_path_as_it_was(path):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert OverridesParser.create().parse_override(f"run_dir={quoted(path)}").value() == path


def test_the_comparison_never_imports_torch():
    code = (
        "import sys; from comparison import cli, request, timelines; "
        "drawn = timelines.timelines(request.read(['--schedules', *request.names('schedule')])[1].specs); "
        "sys.exit('torch' in sys.modules or len(drawn) != len(request.names('schedule')))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "scripts", check=False).returncode == 0


def test_the_name_of_a_run():
    spec = Spec(of_schedule("1f1b"), 2, "vgg16", ("epochs=1",), 2)
    assert (spec.name, spec.title) == ("vgg16-1f1b-seed2", "vgg16 1f1b seed 2")
