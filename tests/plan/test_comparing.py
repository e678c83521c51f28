"""Several schedules in one table, in one unit of time."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.cases import SCHEDULES
from tests.support.plans import ALONE, planned

pytestmark = pytest.mark.slow


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
        (
            ["compare=[1f1b,foo]"],
            "compare=['1f1b', 'foo'] names a schedule that there is not, or none: write",
        ),
        (
            ["compare=[]"],
            "compare=[] names a schedule that there is not, or none: write compare=all, or some",
        ),
        (["compare=[1f1b]", "stages=0"], "stages=0 must be a whole number of at least 1"),
        (
            ["compare=[pipedream_2bw]", "stages=4", "microbatches=2"],
            "compare= has no schedule that can be planned with these settings; pipedream_2bw: schedule ",
        ),
        (["compare=all", "out=x.svg"], "compare= prints a table, which takes no out="),
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
