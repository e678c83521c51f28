"""Cuts and replicas chosen by the times of a file: what the command says, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipetrain.commands.plan import show_replicas
from pipetrain.errors import ConfigError
from pipetrain.plan.replica_choice import describe_replicas
from pipetrain.plan.replica_partition import Machines, Planner
from tests.plan.test_replica_partition import sums_of
from tests.support.cases import config

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
