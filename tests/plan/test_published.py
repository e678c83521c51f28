"""The published plans of PipeDream beside those chosen here, and what the command says of a file's."""

from __future__ import annotations

import re
from configparser import ConfigParser
from pathlib import Path

import pytest

from pipetrain.errors import ConfigError
from pipetrain.plan.published import describe_replicas, show_replicas
from pipetrain.plan.replicas import Machines, Planner
from pipetrain.plan.rows import PROFILES, read_rows
from tests.plan.test_replicas import sums_of
from tests.support.cases import config

ROOT = Path(__file__).parents[2]
OWN = ("out", "span", "compare", "advise", "costs", "bandwidth", "scale", "ranks")


def show(*words: str) -> None:
    """What the command does with these words, beside the defaults of conf/plan.yaml."""
    defaults = [*(f"{key}=null" for key in OWN), "machines=1"]
    show_replicas(config([f"++{word}" for word in (*defaults, *words)]))


def test_the_table_of_published_plans_is_what_its_command_prints(capsys):
    show("costs=published")
    table = capsys.readouterr().out
    assert table in (ROOT / "docs" / "results" / "replicas.md").read_text()
    cells = [line.split(" | ") for line in table.splitlines()]
    assert [row[5] for row in cells[2:7]] == ["15-1", "15-1", "15-1", "14-2", "16"]


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
    ("costs=vgg17", "ranks=4", "bandwidth=1"): (
        "costs=vgg17 cannot be read: No such file or directory; published profiles are alexnet, gnmt16, "
    ),
    ("ranks=4",): "ranks= chooses cuts and replicas by the times of a file: give costs=FILE.csv",
    ("costs=vgg16", "ranks=4"): "ranks= needs bandwidth=GB/s, or [GB/s within a machine,GB/s between two]",
    ("costs=vgg16", "ranks=4", "bandwidth=[1,2,3]"): "ranks= needs bandwidth=GB/s, or [GB/s within a",
    ("costs=vgg16", "ranks=4", "bandwidth=[1,-2]"): "bandwidth=-2 must be a finite number above 0",
    ("costs=vgg16", "ranks=4", "machines=8"): "ranks=4 cannot be shared equally by machines=8: choose a mul",
    ("costs=vgg16", "ranks=65"): "ranks=65 must be a whole number of at least 1 and at most 64",
    ("costs=vgg16", "ranks=2", "out=plan.csv"): "out= shows a plan with a schedule: leave it out, or ranks=",
    ("costs=vgg16", "ranks=1", "bandwidth=1", "memory_limit=1"): (
        "memory_limit=1 is too small for all cuts and replicas on 1 rank: choose a larger one, or more ranks"
    ),
}


@pytest.mark.parametrize(("words", "says"), REFUSED.items(), ids=map(" ".join, REFUSED))
def test_what_cannot_be_planned_is_one_sentence(words, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        show(*words)


def test_a_profile_is_read_by_its_name_at_other_samples_and_is_part_of_a_wheel():
    whole, half = (read_rows(Path("vgg16"), scale=scale) for scale in (1, 0.5))
    first = [rows.profile.layers[0] for rows in (whole, half)]
    assert [one.forward_s for one in first] == pytest.approx([0.022307, 0.0111535])
    assert [one.output_bytes for one in first] == [1644167168, 822083584]
    assert [rows.layers[0].params for rows in (whole, half)] == [1792, 1792]
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    shipped, _ = setup["options.package_data"]["pipetrain.plan"].split(", ")
    assert sorted(ROOT.glob(f"pipetrain/plan/{shipped}"))[1:] == [*PROFILES.values()]
