"""`python -m pipetrain.plan`: it leaves what was asked for, and nothing else; several schedules at once."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from xml.etree import ElementTree

import pytest
from hydra.core.global_hydra import GlobalHydra

from pipetrain.commands import plan as command
from pipetrain.plan import memory_fit as memory
from pipetrain.plan import schedule_choice as choosing
from tests.support.cases import SCHEDULES
from tests.support.plans import ALONE, figures, planned

pytestmark = pytest.mark.slow


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Give a function that runs the command in this process: (status, out, err)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setattr(command, "SILENCE_S", 1e6)  # on a slow machine too

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["pipetrain.plan", *words])
        with pytest.raises(SystemExit) as end:
            command.main()
        return int(end.value.code or 0), *capsys.readouterr()

    yield call
    GlobalHydra.instance().clear()


def test_batches_are_played_through_instead_of_the_window(run):
    for words, batches in (
        (("schedule=pipedream",), 16),  # a window of an epoch
        (("schedule=pipedream", "batches=3", "window=5"), 3),
        (("schedule=pipedream", "window=5"), 5),
    ):
        status, out, err = run("model=mlp", *words)
        assert (status, err) == (0, "")
        assert f"window of {batches} batch" in out


def test_what_words_refer_to_is_not_read_until_it_is_needed(run):
    for word in ("run_dir=runs/${oc.env:NO_SUCH}", "checkpoint.keep=${.every}"):
        for more in ((), ("advise=true", "compare=[1f1b,gpipe]")):
            status, _, err = run("model=mlp", word, *more)
            assert (status, err) == (0, "")


REFUSED = [
    (["out=0"], "a timeline is written as .svg or .png; got 0\n"),
    (["out=x.pdf"], "a timeline is written as .svg or .png; got x.pdf\n"),
    (["schedule=foo"], "there is no schedule/foo: choose one of 1f1b, "),
    (["memory_limit=0.001"], "memory_limit=0.001 is too small: rank 0 is predicted to hold 0.00"),
    (["+partition.profile=no.json"], "partition.profile=no.json cannot be read: No such file or directory"),
    (
        ["costs=mine.csv"],
        "costs= stands in place of a model: leave model= out, or give the model's times by pa",
    ),
    (["bandwidth=1"], "bandwidth= is for costs=FILE: of a model, partition.profile=FILE has it"),
    (["cost=trace.json"], "there is no cost in the configuration; "),
    (["batches=100000000"], "batches=100000000 must be a whole number of at least 1 and at most 1000"),
    (["span=9-3"], "span='9-3' must be all, or from which cell to which, such as 0-40"),
    (["span='0 - 10'"], "span=0 - 10 must be all, or from which cell to which, such as 0-40"),
    (["span='+0-1_0'"], "span=+0-1_0 must be all, or from which cell to which, such as 0-40"),
    (["compare=[1f1b,foo]"], "compare=[1f1b,foo] must be all, or some of 1f1b, "),
    (["compare=[]"], "compare=[] must be all, or some of 1f1b, "),
    (["batch_size=${model.width}"], "batch_size cannot be read: Interpolation key 'model.width' not found"),
    (["model.width=${oc.env:NO_SUCH}"], "model cannot be built: KeyError raised while resolving interpola"),
    (["replicas=auto"], "replicas=auto chooses for a number of ranks: give ranks=N"),
    (["replicas=auto", "ranks=3", "partition=profile"], "replicas=auto needs measured times: give partiti"),
    (["compare=[1f1b]", "replicas=auto"], "no schedule can be planned with these settings: replicas=auto ch"),
    (["compare=[1f1b]", "stages=0"], "stages=0 must be a whole number of at least 1"),
    (
        ["compare=pipedream_2bw", "stages=4", "microbatches=2"],
        "no schedule can be planned with these setting",
    ),
    (["compare=[1f1b]", "schedule.buffer=2"], "schedule.buffer=2 is an option of none of these schedules: "),
    (["compare=all", "out=x.svg"], "several schedules are a table, which takes no out=: leave it out"),
    (
        ["advise=true", "schedule=fbp"],
        "advise=true chooses the schedule: leave schedule=fbp out, or name tho",
    ),
    (
        ["advise=true", "compare=fbp"],
        "no schedule can be planned with these settings: decides its order whil",
    ),
    (
        ["advise=true", "stages=1"],
        "advise=true compares pipelines, and one stage is none: choose stages=2 or",
    ),
]


@pytest.mark.parametrize(("words", "says"), REFUSED)
def test_what_cannot_be_is_one_sentence(run, tmp_path, words, says):
    status, out, err = run("model=mlp", *words)
    assert (status, out, list(tmp_path.iterdir())) == (2, "", [])
    assert err.startswith(f"pipetrain: {says}")
    assert err.count("\n") == 1


def test_on_paper_nothing_is_measured_and_nothing_left(run, tmp_path):
    """Without a file partition=profile is what a run begins with."""
    planned, said = (run("model=mlp", f"partition={name}", "stages=3") for name in ("flops", "profile"))
    assert planned == (0, said[1], "")
    assert said[::2] == (0, "partition=profile measures when a run starts; this is its draft, cut by flops\n")
    # --cfg works beside overrides, and an argument of the model needs no plus.
    status, out, err = run("--cfg", "job", "model=mlp", "model.width=16", "batches=3")
    assert (status, err) == (0, "")
    assert "batches: 3" in out
    assert "width: 16" in out
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_plans_draws_and_loads_nothing_that_runs(tmp_path):
    words = ["model=vgg11", "schedule=pipedream", "stages=4", "microbatches=8", "batches=2", "out=x.svg"]
    ended = subprocess.run(
        [sys.executable, "-c", ALONE, *words], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert (ended.returncode, ended.stderr) == (0, "[]\n")
    assert ended.stdout.endswith("\ntimeline drawn in x.svg\n")
    assert figures(ended.stdout)["activations"] == ("4 3 2 1", "")
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]
    assert ElementTree.parse(tmp_path / "x.svg").getroot().tag.endswith("svg")


def test_costs_of_one_s_own_need_no_model_and_a_plan_is_a_row_a_stage(run, tmp_path):
    """Sixteen layers of one millisecond and two, on 16 ranks: a batch of m takes 3 (m + 15) ms by 1f1b."""
    lines = ["name,forward_ms,backward_ms", *(f"layer{n},1,2" for n in range(16))]
    (tmp_path / "mine.csv").write_text("\n".join(lines))
    (tmp_path / "folder").mkdir()
    words = ["costs=mine.csv", "stages=16", "microbatches=8"]
    status, out, err = run(*words)
    rows = list(csv.DictReader(out.splitlines()))
    assert (status, err, len(rows)) == (0, "", 16)
    assert {row["batch_ms"] for row in rows} == {"69"}
    assert {row["bubble"] for row in rows} == {f"{15 / 23:.6g}"}
    assert [row["activations"] for row in rows] == [str(min(16 - n, 8)) for n in range(16)]
    status, text, _ = run(*words, "out=./folder/.csv")
    assert text.startswith("mine, schedule 1f1b: 16 stages on 16 ranks, batch 8 in 8 microbatches")
    assert text.endswith("\na row a stage in ./folder/.csv\n")
    assert (tmp_path / "folder" / ".csv").read_text() == out
    table = rows_of(run(*words, "compare=[1f1b,gpipe]")[1])
    assert table["schedule"][:4] == ["microbatches", "ms an update", "x 1f1b", "bubble"]
    assert [row[:4] for name, row in table.items() if name != "schedule"] == [
        ["8", "69.00", "1.00", "65.2%"]
    ] * 2
    of_ranks = run("costs=mine.csv", "ranks=4", "bandwidth=1")
    assert run("costs=mine.csv", "ranks=4", "bandwidth=1", "advise=null") == of_ranks == (0, of_ranks[1], "")
    # Without times it is in units of work, as the timeline is.
    assert run("model=mlp", "out=work.csv")[0] == 0
    rows = list(csv.DictReader((tmp_path / "work.csv").read_text().splitlines()))
    assert sum(float(row["forward"]) for row in rows) == pytest.approx(2, rel=1e-5)
    assert [row["recompute"] for row in rows] == ["never"] * 2


def test_a_long_window_is_drawn_in_short_unless_all_of_it_is_asked_for(run, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "gpu_bytes", lambda device: 2**20)
    words = ["model=mlp", "schedule=pipedream", "stages=3", "microbatches=8"]
    status, short, _ = run(*words, "out=short.svg", "memory_limit=1")
    assert status == 0
    assert short.count("rank 0  ") == 2  # lines
    assert "mlp, pipedream, 3 ranks, makespan" in short
    assert "forwards of 1/3 of the model, bubble" in short
    assert len(re.findall("bubble", short.partition("details of")[0])) == 1
    assert "memory_limit 1024.0 MiB a rank\n" in short
    assert "GiB of its GPU and is likely to run out" in short
    svg = (tmp_path / "short.svg").read_text()
    assert float(re.search(r'width="([\d.]+)pt"', svg)[1]) < 1300
    assert "<!-- mlp, pipedream  ·  3 ranks  ·  makespan" in svg
    status, whole, _ = run(*words, "span=all")
    assert status == 0
    assert whole.count("rank 0  ") > 2 * 20


# Several schedules


def rows_of(table: str) -> dict[str, list[str]]:
    lines = [re.split(r"  +", line) for line in table.split("\n\n")[1].splitlines()]
    return {name: rest for name, *rest in lines}


def test_schedules_are_compared_in_one_unit_of_time(run, tmp_path):
    """A batch of m takes m + S - 1 by 1f1b, a third of the bubble less by zb_h1, hardly any more by zbv."""
    _, out, err = run("compare=[1f1b,zb_h1,zbv]", "stages=8", "microbatches=32")
    assert out.startswith("8 ranks, 32 microbatches a batch; all stages equal, messages free\n")
    rows = rows_of(out)
    assert rows.pop("schedule") == ["batch", "bubble", "activations", "versions", "staleness"]
    assert {name: row[:2] for name, row in rows.items()} == {
        "1f1b": ["39", "17.9%"],
        "zb_h1": [f"{32 + 7 / 3:.4g}", "6.8%"],
        "zbv": [f"{32 + 7 / 6 / 16:.4g}", "0.2%"],
    }
    assert rows["1f1b"][2:] == ["8 7 6 5 4 3 2 1", "1 1 1 1 1 1 1 1", "0 0 0 0 0 0 0 0"]
    assert rows["zbv"][2] == "8 8 8 8 8 8 8 8"  # of two half stages each
    assert (err, list(tmp_path.iterdir())) == ("", [])


def test_of_a_model_the_schedules_go_by_its_costs_and_one_is_recommended(run, tmp_path):
    """Each at the microbatches of its file; an update's time is in that of what a rank computes for it."""
    words = ["model=mlp", "model.width=16", "stages=2", "seed=1"]
    words += ["compare=[zbv,1f1b,pipedream]", "batches=3", "partition=even"]
    status, out, err = run(*words)
    rows = rows_of(out)
    took = planned("zbv", 2, 4, 3, "model=mlp", "model.width=16", "partition=even").timeline()
    assert rows["zbv"][:2] == ["4", f"{took.makespan / 3 / (3 * 4):.3f}"]
    assert [rows[name][0] for name in ("1f1b", "pipedream")] == ["4", "1"]
    recommended = re.search(r"\nRecommended: (\w+), .*:\n  torchrun --nproc_per_node=2 -m (.*)\n", out)
    assert recommended[2].startswith(
        "pipetrain model=mlp model.width=16 stages=2 seed=1 partition=even sched"
    )
    assert (status, err, list(tmp_path.iterdir())) == (0, "", [])


def test_schedules_are_compared_with_replicas_where_a_stage_has_as_much_work_as_ranks(run):
    out = run("compare=[1f1b,gpipe,fbp]", "replicas=[2,1]", "microbatches=4", "window=1")[1]
    assert out.startswith(
        "3 ranks, 4 microbatches a batch; placement=0-1.2, a stage's work as its ranks, messages"
    )
    rows = rows_of(out)
    # A stage of 2 (F), 4 (B) on two ranks, and one of 1, 2: the first F, all of the last, and the last B.
    assert rows["gpipe"][:3] == [f"{(2 + 4 * 3 + 4) / 3:.4g}", "33.3%", "2 2 4"]
    assert rows["1f1b"][2:] == ["2 2 1", "1 1 1", "0 0 0"]
    assert "\nwithout fbp: it decides its order while it runs, and" in out


@pytest.mark.parametrize("words", [(), ("model=mlp", "partition=even")])
def test_what_takes_long_says_for_how_long_and_which_schedule_it_plans(run, monkeypatch, capsys, words):
    said: list[str] = []

    def slow(real: Callable[..., Any], *given: Any) -> Any:
        while " pipedream, 2 of 2 schedules, " not in "".join(said[-2:]) and calls:
            said.append(capsys.readouterr().err)
        calls.append(given)
        return real(*given)

    calls: list[Any] = []
    monkeypatch.setattr(command, "_on_even_stages", partial(slow, command._on_even_stages))
    monkeypatch.setattr(choosing, "planned", partial(slow, choosing.planned))
    monkeypatch.setattr(command, "SILENCE_S", 0.01)
    run("compare=[1f1b,pipedream]", "stages=2", *words)
    assert re.search(r"^pipetrain: planning pipedream, 2 of 2 schedules, \d+ s so far$", "".join(said), re.M)


def test_an_option_of_some_schedules_is_theirs_alone_in_a_comparison(run):
    _, out, err = run("compare=[ssp,pipedream]", "stages=2", "schedule.buffer=4")
    assert (rows_of(out)["ssp"][3], rows_of(out)["pipedream"][3], err) == ("4 4", "2 1", "")
    assert out.endswith("\nschedule.buffer=4 is for ssp\n")


def test_a_comparison_without_a_model_imports_no_torch_and_says_what_it_leaves_out(tmp_path):
    code, words = ALONE.replace('"torch._dynamo"', '"torch", "matplotlib"'), ["stages=4", "microbatches=2"]
    ended = subprocess.run(
        [sys.executable, "-c", code, "compare=all", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "[]\n")
    assert set(rows_of(ended.stdout)) == {"schedule", *SCHEDULES} - {"pipedream_2bw"}
    assert ended.stdout.endswith(
        "\nwithout pipedream_2bw: schedule pipedream_2bw needs microbatches >= stages; got microbatches=2, "
        "stages=4\n"
    )
