"""`python -m pipetrain.plan`: its figures are those of the formulas, and it leaves what was asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.image
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from pipetrain.building import make_model, make_schedule
from pipetrain.errors import ConfigError
from pipetrain.network.values import TensorSpec, ValueSpec
from pipetrain.plan import __main__ as command
from pipetrain.plan import describe as printing
from pipetrain.plan.costs import Choice, Prediction
from pipetrain.plan.describe import describe, verdict
from pipetrain.plan.plan import Plan, Samples, make_plan
from pipetrain.plan.replay import read_trace, refuse_other
from pipetrain.schedule.actions import Op
from pipetrain.schedule.chrome import write
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import one_f_one_b
from pipetrain.schedule.theory import theory
from pipetrain.schedule.timeline import Costs
from pipetrain.settings import Settings
from tests.support.cases import SCHEDULES, config
from tests.support.profiles import profile, profile_of
from tests.support.traces import about, as_measured

pytestmark = pytest.mark.slow

IMAGE = ValueSpec((TensorSpec((3, 32, 32), torch.float32),))


def planned(schedule: str, stages: int, microbatches: int, batches: int, *overrides: str) -> Plan:
    words = [f"schedule={schedule}", f"stages={stages}", f"microbatches={microbatches}", *overrides]
    cfg = config(["data=digits", *words])
    read = Settings.composed(cfg, schedule, None)
    model = make_model(cfg, read.seed, read.dtype)
    samples = Samples([read.batch_size] * batches, [read.batch_size])
    return make_plan(read, make_schedule(cfg), model, IMAGE, samples)


def figures(text: str) -> dict[str, tuple[str, ...]]:
    """The table of figures: name -> (simulated, formula)."""
    rows = re.findall(r"^(bubble|activations|versions|staleness) +(\S.*?)(?:  +(\S.*))?$", text, re.MULTILINE)
    return {name: (simulated, formula) for name, simulated, formula in rows}


# What it says


def test_vgg16_by_pipedream_on_four_stages():
    made = planned("pipedream", 4, 8, 16)
    text = describe(made)
    assert text.startswith(
        "vgg16, schedule pipedream: 4 stages on 4 ranks, batch 64 in 8 microbatches, "
        "window of 16 batches, buffer_size 2\n"
    )
    rows = [line for line in text.splitlines() if re.match(r"\d  ", line)]
    assert len(rows) == 4
    assert re.split(r"  +", rows[0])[:3] == ["0", "0", "0-2 conv1_1..conv2_1"]
    assert re.split(r"  +", rows[0])[-2:] == ["float32[8, 3, 32, 32]", f"{8 * 3 * 32 * 32 * 4:,}"]
    assert re.split(r"  +", rows[3])[2] == "9-13 conv4_3..head"
    assert sum(int(re.split(r"  +", row)[3].replace(",", "")) for row in rows) == 14_728_266
    shares = [float(re.split(r"  +", row)[4].removesuffix("%")) for row in rows]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    timeline = [line for line in text.splitlines() if line.startswith("rank ")]
    assert [line.split()[2] for line in timeline[:4]] == ["F0--", ".", ".", "."]
    # S = 4, m = 8: at stage s, S-s activations, ceil((S-1-s)/m)+1 versions, ceil((S-1-s)/m) updates late.
    assert figures(text) == {
        "bubble": (f"{3 / (16 * 8 + 3):.2%}",) * 2,
        "activations": ("4 3 2 1",) * 2,
        "versions": ("2 2 2 1",) * 2,
        "staleness": ("1 1 1 0",) * 2,
    }


def test_a_bubble_that_no_formula_gives_is_left_out(run):
    """Microbatches that are no multiple of the ranks, as by default with three of them."""
    status, out, err = run("schedule=interleaved_1f1b", "stages=3")
    assert (status, err) == (0, "")
    assert re.fullmatch(r"\d+\.\d\d%", figures(out)["bubble"][0])
    assert figures(out)["bubble"][1] == "-"
    assert figures(out)["activations"][0] == figures(out)["activations"][1]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_simulated_and_formula_agree_for_every_schedule(schedule):
    made = planned(schedule, 2, 4, 3, "model=mlp")
    shown = figures(describe(made))
    assert set(shown) == {"bubble", "activations", "versions", "staleness"}
    if made.policy:
        assert [shown[name][1] for name in ("activations", "versions", "staleness")] == ["8 1", "3 1", "2 0"]
        assert "the order is decided while it runs" in describe(made)
    elif made.by_costs or theory(schedule, 2, 3, 4, made.stages // 2) is None:
        assert ("as do these details and the order" in describe(made)) == made.by_costs
        assert {formula for _, formula in shown.values()} == {"-"}
    else:
        assert all(simulated == formula for simulated, formula in shown.values()), shown


@pytest.mark.parametrize(
    ("schedule", "over", "by", "bubble"),
    [
        ("1f1b", "auto", "the model: each update waits for the norms of all stages", "42.86%"),
        ("pipedream", "auto", "each stage", "4.48%"),
        ("pipedream", "model", "the model: each update waits for the norms of all stages", "34.02%"),
        ("fbp", "auto", "each stage", "4.48%"),
        ("zb_h2", "stage", "each stage", "20.33%"),
        ("zb_h2", "auto", "the model: each update waits for the norms of all stages", "25.00%"),
    ],
)
def test_what_clipping_costs_is_seen(schedule, over, by, bubble):
    words = ("clip_grad_norm=0.5", f"clip_grad_norm_over={over}")
    text = describe(planned(schedule, 4, 4, 16, "model=mlp", *words))
    assert f"\nclip_grad_norm 0.5 by the norm of {by}\n" in text
    assert figures(text)["bubble"][0] == bubble
    if schedule == "zb_h2":
        assert figures(text)["bubble"][1] == bubble


def test_a_schedule_without_a_formula_says_so():
    cfg = config(["data=digits", "schedule=gpipe", "model=mlp"])
    read = Settings.composed(cfg, "homemade", None)
    model = make_model(cfg, 0, read.dtype)
    made = make_plan(read, make_schedule(cfg), model, IMAGE, Samples([64], [64]))
    assert {formula for _, formula in figures(describe(made)).values()} == {"-"}


# With a profile


def test_codecs_and_what_they_make_of_each_cut_are_said():
    made = planned("1f1b", 3, 4, 1, "model=mlp", "codec.forward=half", "codec.backward=topk_int8")
    head, second, *_ = describe(made).splitlines()
    assert "3 stages on 3 ranks" in head
    assert second == "codec forward half, backward topk_int8"
    rows = [re.split(r"  +", line) for line in describe(made).splitlines() if re.match(r"(stage|\d)  ", line)]
    assert rows[0][-3:] == ["bytes", "on the wire", "and back"]
    kept = 21  # 1 % of 16 x 128, and no fewer
    assert [row[-2:] for row in rows[1:]] == [["-", "-"], *[["4,096", str(5 * kept + 4)]] * 2]
    assert "wire" not in describe(planned("1f1b", 3, 4, 1, "model=mlp"))


def test_a_profile_s_prediction_stands_beside_the_partition():
    """Six layers of 1, 1, 1, 1, 1 and 3 s, twice that backward; 4 microbatches; messages for nothing."""
    cfg = config(["data=digits", "model=mlp", "partition=profile", "stages=2"])
    read = Settings.composed(cfg, "1f1b", None)
    measured = profile_of(make_model(cfg, 0, read.dtype), IMAGE.of(16), [1, 1, 1, 1, 1, 3])
    model = make_model(cfg, 0, read.dtype)
    text = describe(make_plan(read, make_schedule(cfg), model, IMAGE, Samples([64], [64]), measured))
    rows = [re.split(r"  +", line) for line in text.splitlines() if re.match(r"(stage|\d)  ", line)]
    assert rows[0][-6:] == ["F ms", "B ms", "messages ms", "STEP ms", "batch ms", "MiB"]
    assert [row[2] for row in rows[1:]] == ["0-3 hidden1..hidden4", "4-5 hidden5..head"]
    assert [row[-6:-1] for row in rows[1:]] == [["4000.00", "8000.00", "0.00", "0.00", "48000.00"]] * 2
    # 1F1B on paper, with B twice F: (m + S - 1) of what one microbatch takes, S - 1 of them idle.
    assert "messages free, as none were measured; the schedule at these times: 60000.00 ms" in text
    assert "bubble 20.0%" in text
    shown = dict(re.findall(r"^(profile|even|params|flops) +(\[\d\] +[\d.]+) +[\d.]+$", text, re.MULTILINE))
    assert re.split(" +", shown["profile"]) == ["[4]", "48000.00"]
    assert re.split(" +", shown["even"]) == ["[3]", "60000.00"]
    assert set(shown) == {"profile", "even", "params", "flops"}


def said(*not_fitting: str, **slowest: float) -> str:
    choices = {
        name: Choice([index], seconds, 0, name not in not_fitting)
        for index, (name, seconds) in enumerate(slowest.items())
    }
    return verdict(Prediction(profile([]), [], choices, Costs({}))).partition("a batch, by cuts: ")[2]


def test_the_verdict_says_what_was_beaten_and_what_was_not():
    assert said(profile=0.5, even=0.6, params=2, flops=1) == (
        "profile [0] 500.0, even [1] 600.0, params [2] 2000.0, flops [3] 1000.0: "
        "profile beats even, params and flops"
    )
    assert said(profile=0.5, even=0.5, params=2, flops=0.5).endswith(
        ": profile beats params, even is as good, flops is as good"
    )
    assert said(profile=0.5, even=0.7, params=2, flops=0.4).endswith(
        ": profile beats even and params, flops would be faster, but is ruled out"
    )
    assert said("even", "flops", profile=0.5, even=0.7, params=2, flops=0.4).endswith(
        ": profile beats params, even does not fit into memory_limit, flops does not fit into memory_limit"
    )


def test_a_profile_s_table_says_which_cut_does_not_fit():
    def table(*words: str) -> dict[str, tuple[str, str]]:
        cfg = config(["data=digits", "model=mlp", "partition=profile", "stages=2", *words])
        read = Settings.composed(cfg, "1f1b", None)
        measured = profile_of(make_model(cfg, 0, read.dtype), IMAGE.of(16), [1, 1, 1, 1, 1, 3])
        model = make_model(cfg, 0, read.dtype)
        text = describe(make_plan(read, make_schedule(cfg), model, IMAGE, Samples([64], [64]), measured))
        assert "fullest stage, MiB\n" in text
        rows = re.findall(r"^(profile|even|params|flops) +\[\d\] +[\d.]+ +([\d.]+)(.*)$", text, re.MULTILINE)
        return {name: (held, note.strip()) for name, held, note in rows}

    free = table()
    assert {note for _, note in free.values()} == {""}
    assert float(free["params"][0]) < float(free["even"][0]) - 0.2
    limited = table("recompute=never", f"memory_limit={(float(free['even'][0]) - 0.1) / 1024}")
    says = "does not fit into memory_limit"
    assert [(name, note) for name, (_, note) in limited.items() if note] == [("even", says)]


# The command


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Give a function that runs the command in this process: (status, out, err)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["pipetrain.plan", *words])
        with pytest.raises(SystemExit) as end:
            command.main()
        return int(end.value.code or 0), *capsys.readouterr()

    yield call
    GlobalHydra.instance().clear()


@pytest.mark.parametrize(
    ("room", "says"),
    [
        (None, None),
        (2**30, r"each rank fits into its GPU: of 1 GiB rank \d, the fullest, is predicted to hold 0\.0\d+"),
        (
            2**20,
            r"rank \d is likely to run out of memory: it is predicted to hold 0\.0\d+ GiB, and its GPU has",
        ),
    ],
)
def test_on_a_gpu_it_says_whether_each_rank_fits(run, monkeypatch, room, says):
    monkeypatch.setattr(printing, "gpu_bytes", lambda device: room)
    status, out, _ = run("model=mlp", "schedule=zbv", "batches=1")
    assert status == 0
    assert re.search(rf"^{says}" if says else "MiB held", out, re.MULTILINE)
    assert ("GPU" in out) == (says is not None)


def test_a_limit_that_a_rank_does_not_keep_is_refused(run):
    status, out, err = run("model=mlp", "memory_limit=0.001")
    assert (status, out) == (2, "")
    assert err.startswith("pipetrain: memory_limit=0.001 is too small: rank 0 is predicted to hold 0.00")
    status, out, err = run("model=mlp", "memory_limit=1")
    assert (status, err) == (0, "")
    assert "memory_limit 1024.0 MiB a rank\n" in out


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
        (["out=x.pdf"], "pipetrain: a timeline is written as .svg or .png; got x.pdf\n"),
        (
            ["schedule=foo"],
            "pipetrain: In 'config': Could not find 'schedule/foo'; choose one in 'schedule': 1f1b ",
        ),
        (["stages=7"], "pipetrain: stages=7 needs at least as many layers, but the model has 6: 0 hidden1"),
        (["schedule=pipedream_2bw", "stages=4", "microbatches=2"], "pipetrain: schedule pipedream_2bw needs"),
    ],
)
def test_what_cannot_be_is_one_sentence(run, tmp_path, words, says):
    status, _, err = run("model=mlp", *words)
    assert status == 2
    assert err.startswith(says)
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_it_profiles_in_this_process_and_leaves_nothing(run, tmp_path):
    status, out, err = run("model=mlp", "partition=profile", "threads=1", "stages=3")
    assert (status, err) == (0, "profiling 6 layers in this process\n")
    assert "profiled on device cpu, ranks 1, threads 1, torch" in out
    assert "messages free, as none were measured" in out
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_is_not_there_is_one_sentence(run):
    for word in ("partition.profile=none.json", "+partition.profile=none.json"):
        status, out, err = run("model=mlp", word)
        assert (status, out) == (2, "")
        assert err.startswith(
            "pipetrain: partition.profile=none.json cannot be read: No such file or directory"
        )
        assert err.count("\n") == 1


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


ALONE = """
import sys
from pipetrain.plan.__main__ import main
try:
    main()
finally:
    unwanted = ("pipetrain.runtime", "pipetrain.training", "torch._dynamo", "sklearn", "torchvision")
    print([name for name in sys.modules if name.startswith(unwanted)], file=sys.stderr)
"""


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


def test_it_draws_a_png_and_leaves_no_folder(run, tmp_path):
    status, out, err = run("model=mlp", "schedule=pipedream", "batches=2", "out=x.png")
    assert (status, err) == (0, "")
    assert "window of 2 batches" in out
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"]
    height, width, _ = matplotlib.image.imread(tmp_path / "x.png").shape
    assert height > 50
    assert width > 200


def test_a_long_window_is_drawn_in_short_unless_all_of_it_is_asked_for(run, tmp_path):
    words = ["model=mlp", "schedule=pipedream", "stages=3", "microbatches=8"]
    status, short, _ = run(*words, "out=short.svg")
    assert status == 0
    assert short.count("rank 0  ") == 2 * 3  # two lines of the beginning and one of the end, with memory
    assert "mlp, pipedream, 3 ranks, makespan" in short
    assert "forwards of 1/3 of the model, bubble" in short
    assert len(re.findall("bubble", short.partition("details of")[0])) == 1
    status, whole, _ = run(*words, "span=all")
    assert status == 0
    assert whole.count("rank 0  ") > 2 * 20
    svg = (tmp_path / "short.svg").read_text()
    assert float(re.search(r'width="([\d.]+)pt"', svg)[1]) < 1300
    assert "<!-- mlp, pipedream  ·  3 ranks  ·  makespan" in svg


# Several schedules


def rows_of(table: str) -> dict[str, list[str]]:
    lines = [re.split(r"  +", line) for line in table.split("\n\n")[1].splitlines()]
    return {name: rest for name, *rest in lines}


def test_schedules_are_compared_in_one_unit_of_time(run, tmp_path):
    """A batch of m takes m + S - 1 by 1f1b, a third of the bubble less by zb_h1, hardly any more by zbv."""
    status, out, err = run("compare=[1f1b,zb_h1,zbv]", "stages=8", "microbatches=32")
    assert (status, err) == (0, "")
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
    assert list(tmp_path.iterdir()) == []


def test_with_a_model_its_own_costs_stand_beside_equal_ones(run):
    status, out, _ = run("compare=[zbv,1f1b]", "stages=2", "microbatches=4", "model=mlp")
    assert status == 0
    rows = rows_of(out)
    assert rows["schedule"][:4] == ["batch", "bubble", "mlp batch", "mlp bubble"]
    plan = planned("zbv", 2, 4, 16, "model=mlp")
    took = plan.timeline().makespan / 16 / 3
    assert rows["zbv"][2:4] == [f"{took:.4g}", f"{1 - 4 / took:.1%}"]
    assert float(rows["1f1b"][0]) == 5


def test_what_cannot_be_compared_is_said_below_the_others(run):
    status, out, _ = run("compare=all", "stages=4", "microbatches=2")
    assert status == 0
    assert set(rows_of(out)) == {"schedule", *SCHEDULES} - {"pipedream_2bw"}
    assert out.endswith(
        "\nwithout pipedream_2bw: schedule pipedream_2bw needs microbatches >= stages; got microbatches=2, "
        "stages=4\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["compare=[1f1b,foo]"], "compare= has no schedule foo; write compare=all, or some of: 1f1b, "),
        (["compare=[]"], "compare=[] names no schedule; write compare=all"),
        (["compare=[1f1b]", "stages=0"], "stages=0 must be a whole number of at least 1"),
        (
            ["compare=[pipedream_2bw]", "stages=4", "microbatches=2"],
            "compare= has no schedule that can be planned with these settings; pipedream_2bw: schedule ",
        ),
        (["compare=all", "out=x.svg"], "compare= prints a table, which takes no out="),
        (["compare=all", "partition=profile"], "compare= needs one profile for all schedules"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(run, words, says):
    status, out, err = run(*words)
    assert (status, out) == (2, "")
    assert err.startswith(f"pipetrain: {says}")
    assert err.count("\n") == 1


def test_a_comparison_without_a_model_never_imports_torch(tmp_path):
    code = ALONE.replace('"torch._dynamo"', '"torch", "matplotlib"')
    ended = subprocess.run(
        [sys.executable, "-c", code, "compare=all", "stages=2"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "[]\n")


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
    assert "mlp, pipedream, 2 ranks, makespan 9.9 s, bubble 3.0%\n" in out
    assert "\na cell is 0.1 s; " in out
    table = out[out.index("by the durations of 3 windows") :]
    rows = {line.split("  ")[0]: re.split(r"  +", line)[1:] for line in table.splitlines()[1:]}
    assert rows[""] == ["1f1b, measured", "1f1b, replayed", "pipedream, this plan"]
    assert rows["seconds a batch"] == ["1.5000", "1.5000", f"{9.9 / 8:.4f}"]
    assert rows["samples/s"] == ["42.7", "42.7", "51.7 (+21.2%)"]
    assert rows["bubble, by rank"] == ["20.0% 20.0%", "20.0% 20.0%", "3.0% 3.0%"]
    assert rows["wait, by rank"] == ["20.0% 20.0%", "20.0% 20.0%", "3.0% 1.0%"]


def test_more_microbatches_of_the_same_size_can_be_predicted(run, trace, tmp_path):
    words = ["model=mlp", "schedule=gpipe", "batch_size=128", "microbatches=8"]
    status, out, _ = run(*words, f"cost={trace}", "out=x.png")
    assert status == 0
    assert "2.7000" in out  # (8 + 1) * 0.3 s
    assert "47.4 (+11.1%)" in out
    assert (tmp_path / "x.png").exists()


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
        (["+model.width=64", "partition=[1]"], "is of another mlp, with 460,682 parameters"),
        (["schedule._target_=tests.runtime.test_engine.split_pipedream"], "has no I of stage 1"),
    ],
)
def test_a_plan_that_the_trace_says_nothing_of_is_refused(trace, words, says):
    plan = planned("1f1b", 2, 4, 1, "model=mlp", *words)
    with pytest.raises(ConfigError, match=rf"^cost={trace} .*{re.escape(says)}"):
        refuse_other(plan, read_trace(trace), str(trace))


def test_a_trace_of_other_numbers_of_stages_says_what_to_trace(trace):
    plan = planned("zbv", 2, 4, 1, "model=mlp")
    with pytest.raises(
        ConfigError, match=r"is of 1f1b with 2 stages on 2 ranks, and zbv has 4: trace a run of zbv$"
    ):
        refuse_other(plan, read_trace(trace), str(trace))


def test_a_plan_of_another_model_is_refused_by_the_command(run, trace):
    status, _, err = run("model=vgg11", f"cost={trace}")
    assert status == 2
    assert err.startswith(f"pipetrain: cost={trace} is of mlp cut before layers [1], ")
    assert err.endswith("pass model=mlp partition=[1], or trace a run of this plan\n")


def test_a_file_that_is_no_trace_is_refused(run, tmp_path):
    (tmp_path / "x.json").write_text("{}")
    for name, says in (("x.json", "is not a whole trace.json"), ("y.json", "cannot be read")):
        status, _, err = run("model=mlp", f"cost={name}")
        assert status == 2
        assert says in err
        assert err.count("\n") == 1
