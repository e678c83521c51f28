"""`python -m pipetrain.plan`: it leaves what was asked for, and nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import pytest

from pipetrain.errors import ConfigError
from pipetrain.plan import describe as printing
from pipetrain.plan.replay import read_trace, refuse_other
from pipetrain.schedule.actions import Op, Program
from pipetrain.schedule.chrome import write
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import one_f_one_b, pipedream
from pipetrain.schedule.timeline import Costs
from tests.support.plans import ALONE, figures, planned
from tests.support.traces import about, as_measured

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("room", "runs_out"), [(None, False), (2**30, False), (2**20, True)])
def test_on_a_gpu_it_says_whether_each_rank_fits(run, monkeypatch, room, runs_out):
    monkeypatch.setattr(printing, "gpu_bytes", lambda device: room)
    status, out, _ = run("model=mlp", "schedule=zbv", "batches=1")
    assert status == 0
    said = re.search(
        r"^rank \d, the fullest, is predicted to hold 0\.0\d+ of the .* GiB of its GPU", out, re.M
    )
    assert (said is not None) == (room is not None)
    assert ("is likely to run out" in out) == runs_out


def test_batches_are_played_through_instead_of_the_window(run, tmp_path):
    for words, batches in (
        (("schedule=pipedream",), 16),  # a window of an epoch
        (("schedule=pipedream", "batches=3"), 3),
        (("schedule=pipedream", "window=5"), 5),
        (("schedule=1f1b",), 1),
    ):
        status, out, err = run("model=mlp", *words)
        assert (status, err) == (0, "")
        assert f"window of {batches} batch" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["out=x.pdf"], "a timeline is written as .svg or .png; got x.pdf\n"),
        (["schedule=foo"], "In 'config': Could not find 'schedule/foo'; choose one in 'schedule': 1f1b "),
        (["stages=7"], "stages=7 needs at least as many layers, but the model has 6: 0 hidden1"),
        (["schedule=pipedream_2bw", "stages=4", "microbatches=2"], "schedule pipedream_2bw needs"),
        (["memory_limit=0.001"], "memory_limit=0.001 is too small: rank 0 is predicted to hold 0.00"),
        (
            ["partition.profile=no.json"],
            "partition.profile=no.json cannot be read: No such file or directory",
        ),
        (
            ["+partition.profile=no.json"],
            "partition.profile=no.json cannot be read: No such file or directory",
        ),
        (["cost=no.json"], "cost=no.json cannot be read"),
        (["span=9-3"], "span=9-3 must be all, or from which cell to which, such as 0-40"),
    ],
)
def test_what_cannot_be_is_one_sentence(run, tmp_path, words, says):
    status, _, err = run("model=mlp", *words)
    assert status == 2
    assert err.startswith(f"pipetrain: {says}")
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_on_paper_nothing_is_measured(run, tmp_path):
    """Without a file partition=profile is what a run begins with."""
    planned, said = (run("model=mlp", f"partition={name}", "stages=3") for name in ("flops", "profile"))
    assert planned == (0, said[1], "")
    assert said[::2] == (0, "partition=profile measures when a run starts; this is its draft, cut by flops\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("word", ["model.width=16", "+model.width=16", "++model.width=16"])
def test_an_argument_of_the_model_needs_no_plus(run, word):
    status, out, err = run("model=mlp", word)
    assert (status, err) == (0, "")
    assert "float32[16, 16]" in out


def test_cfg_job_works_beside_overrides(run, tmp_path):
    status, out, err = run("--cfg", "job", "model=mlp", "batches=3")
    assert (status, err) == (0, "")
    assert "batches: 3" in out
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_plans_draws_and_loads_nothing_that_runs(tmp_path):
    words = ["model=vgg16", "schedule=pipedream", "stages=4", "microbatches=8", "batches=2", "out=x.svg"]
    ended = subprocess.run(
        [sys.executable, "-c", ALONE, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert (ended.returncode, ended.stderr) == (0, "[]\n")
    assert ended.stdout.endswith("\ntimeline drawn in x.svg\n")
    assert figures(ended.stdout)["activations"] == ("4 3 2 1", "4 3 2 1")
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")


def test_it_draws_a_png_and_says_the_limit(run, tmp_path):
    status, out, err = run("model=mlp", "schedule=pipedream", "batches=2", "out=x.png", "memory_limit=1")
    assert (status, err) == (0, "")
    assert "window of 2 batches" in out
    assert "memory_limit 1024.0 MiB a rank\n" in out
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    height, width, _ = matplotlib.image.imread(tmp_path / "x.png").shape
    assert (height > 50, width > 200) == (True, True)


def test_a_long_window_is_drawn_in_short_unless_all_of_it_is_asked_for(run, tmp_path):
    words = ["model=mlp", "schedule=pipedream", "stages=3", "microbatches=8"]
    status, short, _ = run(*words, "out=short.svg")
    assert status == 0
    assert short.count("rank 0  ") == 2  # lines
    assert "mlp, pipedream, 3 ranks, makespan" in short
    assert "forwards of 1/3 of the model, bubble" in short
    assert len(re.findall("bubble", short.partition("details of")[0])) == 1
    status, whole, _ = run(*words, "span=all")
    assert status == 0
    assert whole.count("rank 0  ") > 2 * 20
    svg = (tmp_path / "short.svg").read_text()
    assert float(re.search(r'width="([\d.]+)pt"', svg)[1]) < 1300
    assert "<!-- mlp, pipedream  ·  3 ranks  ·  makespan" in svg


# By a trace's durations


@pytest.fixture
def trace(tmp_path) -> Path:
    """A trace of 1F1B over two stages of the MLP, as `plan` cuts it: F takes 0.1 s, B 0.2 s, nothing else."""
    program = lower(one_f_one_b(2, 1, 4))
    costs = Costs({(stage, op): n for stage in (0, 1) for op, n in ((Op.F, 0.1), (Op.B, 0.2))})
    plan = planned("1f1b", 2, 4, 1, "model=mlp")
    parameters = sum(layer.params for layer in plan.layers)
    said = about(program, 4, 16, partition=plan.cuts, parameters=parameters, epoch_batches=8)
    (tmp_path / "traces").mkdir()
    write(tmp_path / "traces" / "trace.json", said, as_measured(program, costs, windows=3, microbatch=16))
    return tmp_path / "traces" / "trace.json"


def test_a_trace_says_what_its_own_and_another_schedule_take(run, trace):
    status, out, err = run("model=mlp", "schedule=pipedream", "microbatches=4", f"cost={trace}")
    assert (status, err) == (0, "")
    assert "window of 8 batches" in out  # an epoch of the traced run
    assert "mlp, pipedream, 2 ranks, makespan 9.9 s, bubble 3.0%; a cell is 0.1 s; " in out
    rows = [re.split(r"  +", line) for line in out[out.index("by the durations in") :].splitlines()]
    assert [row[1:] for row in rows] == [
        ["seconds a batch", "samples/s"],
        ["1.5000", "42.7"],
        ["1.2375", "51.7 (+21.2%)"],
    ]
    assert [row[0] for row in rows[1:]] == ["1f1b, measured", "pipedream, this plan"]


def test_more_microbatches_of_the_same_size_can_be_predicted(run, trace, tmp_path):
    words = ["model=mlp", "schedule=gpipe", "batch_size=128", "microbatches=8"]
    status, out, _ = run(*words, f"cost={trace}", "out=x.png")
    assert status == 0
    assert "2.7000" in out  # (8 + 1) * 0.3 s
    assert "47.4 (+11.1%)" in out
    assert (tmp_path / "x.png").exists()


def split_pipedream(ranks: int, batches: int, microbatches: int) -> Program:
    whole = pipedream(ranks, batches, microbatches)
    halves = {Op.B: (Op.I, Op.W)}
    return [[replace(a, op=op) for a in row for op in halves.get(a.op, (a.op,))] for row in whole]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["partition=[3]"], "16 samples a microbatch: pass partition=[1], or trace"),
        (["microbatches=2"], "pass batch_size=32, or trace"),
        (["dtype=float64", "memory_format=channels_last"], "pass dtype=float32, or trace"),
        (["precision=bf16"], "pass precision=fp32, or trace"),
        (["memory_format=contiguous"], "pass memory_format=channels_last, or trace"),
        (["codec.backward=int8"], "pass codec.backward=identity, or trace"),
        (["stages=3"], "pass stages=2 partition=[1], or trace"),
        (["+model.width=64", "partition=[1]"], "with 460,682 parameters, cut before layers [1], 16 samples"),
        (["schedule._target_=tests.plan.test_main.split_pipedream"], "trace a run of this model by 1f1b, or"),
    ],
)
def test_a_plan_that_the_trace_says_nothing_of_is_refused(trace, words, says):
    plan = planned("1f1b", 2, 4, 1, "model=mlp", *words)
    with pytest.raises(ConfigError, match=rf"^cost={trace} .*{re.escape(says)}"):
        refuse_other(plan, read_trace(trace), str(trace))


def test_a_plan_of_another_model_is_refused_by_the_command(run, trace):
    status, _, err = run("model=vgg11", f"cost={trace}")
    assert status == 2
    assert err.startswith(f"pipetrain: cost={trace} is of mlp by 1f1b with ")
    assert err.endswith("pass model=mlp partition=[1], or trace a run of this plan\n")
