"""What a plan says: its figures are those of the papers, and a profile's prediction stands beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipetrain.commands.plan import show_replicas
from pipetrain.config.build import make_model, make_schedule
from pipetrain.config.settings import Settings
from pipetrain.errors import ConfigError
from pipetrain.model.specs import Size
from pipetrain.plan.make_plan import estimate_model, make_plan
from pipetrain.plan.plan import Samples
from pipetrain.plan.replica_partition import Machines, Planner
from pipetrain.plan.text import describe, describe_replicas
from pipetrain.plan.verification import Draft
from tests.plan.test_replica_partition import sums_of
from tests.schedule.theory import theory
from tests.support.cases import SCHEDULES, config, options_of
from tests.support.plans import IMAGE, figures, planned, profile_of

pytestmark = pytest.mark.slow


def partition(text: str) -> list[str]:
    """The lines of the table of stages."""
    return text.split("\n\n")[1].splitlines()


def test_vgg16_by_pipedream_on_four_stages():
    made = planned("pipedream", 4, 8, 16)
    text = describe(made)
    assert text.startswith(
        "vgg16, schedule pipedream: 4 stages on 4 ranks, batch 64 in 8 microbatches, "
        "window of 16 batches, buffer_size 2\n"
    )
    assert "as for the first batch" not in text  # all sizes are known
    rows = [re.split(r"  +", line) for line in partition(text) if re.match(r"\d  ", line)]
    assert [row[:3] for row in (rows[0], rows[3])] == [
        ["0", "0", "0-2 conv1_1..conv2_1"],
        ["3", "3", "9-13 conv4_3..head"],
    ]
    assert rows[0][-2:] == ["float32[8, 3, 32, 32]", f"{8 * 3 * 32 * 32 * 4:,}"]
    assert sum(int(row[3].replace(",", "")) for row in rows) == 14_728_266
    assert sum(float(row[4].removesuffix("%")) for row in rows) == pytest.approx(100, abs=0.3)
    timeline = [line for line in text.splitlines() if line.startswith("rank ")]
    assert [line.split()[2] for line in timeline[:4]] == ["F0--", ".", ".", "."]
    # S = 4, m = 8: at stage s, S-s activations, ceil((S-1-s)/m)+1 versions, ceil((S-1-s)/m) updates late.
    assert figures(text) == {
        "bubble": (f"{3 / (16 * 8 + 3):.2%}", ""),
        "activations": ("4 3 2 1", ""),
        "versions": ("2 2 2 1", ""),
        "staleness": ("1 1 1 0", ""),
    }


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_said_of_a_schedule_is_what_its_formula_gives(schedule):
    made = planned(schedule, 2, 4, 3, "model=mlp")
    text = describe(made)
    shown, formula = figures(text), theory(schedule, 2, max(made.windows), 4, made.stages // 2)
    assert set(shown) == {"bubble", "activations", "versions", "staleness"}
    assert ("as do these details and the order" in text) == made.by_costs
    assert ("the order is decided while it runs" in text) == bool(made.draft.policy)
    if made.draft.policy:
        assert [most for _, most in shown.values()] == ["-", "8 1", "3 1", "2 0"]
    elif formula and not made.by_costs:
        by_stage = {name: getattr(formula, name) for name in ("activations", "versions", "staleness")}
        said = {"bubble": f"{formula.bubble:.2%}"} | {n: " ".join(map(str, of)) for n, of in by_stage.items()}
        assert shown == {name: (value, "") for name, value in said.items()}


def test_ssp_is_described_by_its_own_buffer():
    shown = figures(describe(planned("ssp", 2, 1, 8, "model=mlp", "schedule.buffer=3")))
    assert shown["versions"] == ("3 3", "")
    assert shown["staleness"] == ("2 2", "")


def test_replicas_are_ranks_of_a_stage():
    made = planned("1f1b", 2, 4, 1, "model=mlp", "replicas=[2,1]")
    text = describe(made)
    assert [line.split()[:2] for line in partition(text)] == [["stage", "rank"], ["0", "0-1"], ["1", "2"]]
    assert "\nrank 1 (stage 0)  F1" in text
    assert "\nthe peak of each stage on its fullest rank, and" in text


@pytest.mark.parametrize(
    ("schedule", "over", "by", "bubble"),
    [
        ("pipedream", "auto", "each stage", "4.48%"),
        ("pipedream", "model", "the model: each update waits for the norms of all stages", "34.02%"),
        ("zb_h2", "stage", "each stage", "20.33%"),
        ("zb_h2", "auto", "the model: each update waits for the norms of all stages", "25.00%"),
    ],
)
def test_what_clipping_costs_is_seen(schedule, over, by, bubble):
    words = ("clip_grad_norm=0.5", f"clip_grad_norm_over={over}")
    text = describe(planned(schedule, 4, 4, 16, "model=mlp", *words))
    assert f"\nclip_grad_norm 0.5 by the norm of {by}\n" in text
    assert figures(text)["bubble"] == (bubble, "")


def test_codecs_and_what_they_make_of_each_cut_are_said():
    text = describe(planned("1f1b", 3, 4, 1, "model=mlp", "codec.forward=half", "codec.backward=topk_int8"))
    head, second, *_ = text.splitlines()
    assert "3 stages on 3 ranks" in head
    assert second == "codec forward half, backward topk_int8"
    rows = [re.split(r"  +", line) for line in partition(text)]
    assert rows[0][-3:] == ["bytes", "on the wire", "and back"]
    kept = 21  # 1 % of 16 x 128, and no fewer
    assert [row[-2:] for row in rows[1:]] == [["-", "-"], *[["4,096", str(5 * kept + 4)]] * 2]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "windows of 1 batch in the first 40% of the updates, then of 8 batches"),
        (
            ("correction.hybrid.share=0.25", "correction.hybrid.first=false"),
            "windows of 8 batches, in the last 25% of the updates of 1 batch",
        ),
    ],
)
def test_windows_that_a_correction_shortens_are_shown(words, line):
    text = describe(planned("pipedream_2bw", 2, 4, 8, "model=mlp", "correction=[hybrid,msnag]", *words))
    assert text.splitlines()[1:3] == ["correction hybrid+msnag", line]


# With a profile


def by_profile(*words: str) -> str:
    """Six layers of 1, 1, 1, 1, 1 and 3 s, twice that backward; 4 microbatches; messages for nothing."""
    cfg = options_of(["data=digits", "model=mlp", "partition=profile", "stages=2", *words])
    read = Settings.composed(cfg, "1f1b", None)
    model, same = (make_model(cfg, 0, read.dtype) for _ in range(2))
    measured = profile_of(same, IMAGE.of(Size(16)), [1, 1, 1, 1, 1, 3])
    estimated = estimate_model(read, model, IMAGE, Samples.of([64], [64]))
    return describe(make_plan(Draft.from_settings(read, make_schedule(cfg)), estimated, measured))


def choices(text: str) -> dict[str, tuple[str, ...]]:
    """The table of strategies: name -> (cuts, slowest stage, fullest stage, what is wrong)."""
    rows = re.findall(
        r"^(profile|even|params|flops) +(\[\d\]) +([\d.]+) +([\d.]+) *(.*)$", text, re.MULTILINE
    )
    return {name: tuple(rest) for name, *rest in rows}


def test_a_profile_s_prediction_stands_beside_the_partition():
    text = by_profile()
    rows = [re.split(r"  +", line) for line in text.splitlines() if re.match(r"(stage|\d)  ", line)]
    assert rows[0][-5:] == ["F ms", "B ms", "STEP ms", "messages ms", "batch ms"]
    assert [row[2] for row in rows[1:3]] == ["0-3 hidden1..hidden4", "4-5 hidden5..head"]
    assert [row[-5:] for row in rows[1:3]] == [["4000.00", "8000.00", "0.00", "0.00", "48000.00"]] * 2
    # 1F1B on paper, with B twice F: (m + S - 1) of what one microbatch takes, S - 1 of them idle.
    assert "messages 0.000 ms + 0.000 ms/MiB; the schedule at these times: 60000.00 ms" in text
    assert "bubble 20.0%" in text
    shown = choices(text)
    assert set(shown) == {"profile", "even", "params", "flops"}
    assert (shown["profile"][:2], shown["even"][:2]) == (("[4]", "48000.00"), ("[3]", "60000.00"))
    assert {of[3] for of in shown.values()} == {""}
    held = float(shown["even"][2])
    assert float(shown["params"][2]) < held - 0.2
    limited = choices(by_profile("recompute=never", f"memory_limit={(held - 0.1) / 1024}"))
    assert {name: of[3] for name, of in limited.items() if of[3]} == {
        "even": "does not fit into memory_limit"
    }


# Cuts and replicas, without a schedule


VGG16 = f"costs={Path(__file__).parents[2]}/scripts/published/profiles/vgg16.csv"
OWN = ("out", "span", "compare", "advise", "costs", "bandwidth", "scale", "ranks")


def show(*words: str) -> None:
    """What the command does with these words, beside the defaults of conf/plan.yaml."""
    defaults = [*(f"{key}=null" for key in OWN), "machines=1"]
    show_replicas(config([f"++{word}" for word in (*defaults, *words)]))


def test_plans_stand_beside_data_parallelism_and_a_straight_pipeline_with_the_stages_of_the_chosen():
    """Two machines of two ranks; the last layer's weights take long to reduce between them."""
    planner = Planner(sums_of([3, 3, 1], [0, 0, 12], [1, 1]), Machines(4, 2, 0.25, 1))
    assert describe_replicas(planner, ["a", "b", "c"]).splitlines() == [
        "plan               replicas  cut before layers  ms a microbatch  x data parallel  bound by",
        "data parallel      4                            9000.00          1.00             "
        "all-reduce of stage 0",
        "straight pipeline  -         -                  -                -                "
        "has too few layers, or too little memory",
        "chosen             3-1       2                  2000.00          4.50             "
        "compute of stage 0",
        "",
        "stage  ranks  layers    message ms  compute ms  all-reduce ms",
        "0      0-2    0-1 a..b  0.00        2000.00     0.00",
        "1      3      2-2 c..c  1000.00     1000.00     0.00",
    ]


REFUSED = {
    ("costs=no.csv", "ranks=4", "bandwidth=1"): "costs=no.csv cannot be read: No such file or directory",
    ("ranks=4",): "ranks= chooses cuts and replicas by the times of a file: give costs=FILE.csv",
    (VGG16, "ranks=4"): "ranks= needs bandwidth=GB/s, or [GB/s within a machine,GB/s between two]",
    (VGG16, "ranks=4", "bandwidth=[1,2,3]"): "ranks= needs bandwidth=GB/s, or [GB/s within a",
    (VGG16, "ranks=4", "bandwidth=[1,-2]"): "bandwidth=-2 must be a finite number above 0",
    (VGG16, "ranks=4", "machines=8"): "ranks=4 cannot be shared equally by machines=8: choose a mul",
    (VGG16, "ranks=65"): "ranks=65 must be a whole number of at least 1 and at most 64",
    (VGG16, "ranks=2", "out=plan.csv"): "out= shows a plan with a schedule: leave it out, or ranks=",
    (VGG16, "ranks=1", "bandwidth=1", "memory_limit=1"): (
        "memory_limit=1 is too small for all cuts and replicas on 1 rank: choose a larger one, or more ranks"
    ),
}


@pytest.mark.parametrize(("words", "says"), REFUSED.items(), ids=REFUSED.values())
def test_what_cannot_be_planned_is_one_sentence(words, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        show(*words)
