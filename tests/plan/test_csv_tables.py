"""Costs of one's own: what a file says is what the plan has, and what cannot be said is one sentence."""

from __future__ import annotations

import csv
import re
from io import StringIO
from itertools import accumulate
from pathlib import Path

import pytest

from pipetrain.errors import ConfigError
from pipetrain.model.network import INPUT, ValueId
from pipetrain.plan.csv_tables import read_rows, write_rows
from pipetrain.plan.memory_fit import peaks_by_rank
from pipetrain.plan.paper_plan import planned
from pipetrain.plan.partition import balance, best_cuts
from pipetrain.plan.plan import Plan
from tests.support.cases import options_of

HEAD = "name,forward_ms,backward_ms\n"
# Two data, a skip over the third layer, and a state that nothing makes.
GRAPH = """node,inputs,operator,forward_ms,backward_ms,activation_bytes,parameter_bytes
node1,,Input,500.0,0,4000,0
node2,,Input1,0,0,800,0
node3,node1,"Conv2d(3, 64)",1,3,1000000,400
node4,,hidden,0,0,0,0
node5,node3 node4,ReLU,1,1,500000,0
node6,node5 node3 node2,LSTM,2,6,8000,4000
"""


def plan_of(
    tmp_path: Path,
    text: str,
    *words: str,
    schedule: str = "1f1b",
    batches: int = 1,
    bandwidth: float | None = None,
) -> Plan:
    """The plan that the command makes of a file."""
    (tmp_path / "costs.csv").write_text(text)
    own = (
        f"+costs={tmp_path}/costs.csv",
        f"+bandwidth={bandwidth or 'null'}",
        "+scale=null",
        "stages=2",
        "microbatches=4",
    )
    cfg = options_of([*own, f"schedule={schedule}", *words])
    return planned(cfg, schedule, batches)


def rows_of(plan: Plan) -> list[dict[str, str]]:
    file = StringIO()
    write_rows(plan, file)
    return list(csv.DictReader(StringIO(file.getvalue())))


def columns(rows: list[dict[str, str]], *names: str) -> list[list[float]]:
    return [[float(row[name]) for row in rows] for name in names]


def test_a_chain_of_equal_layers_has_the_times_and_the_bubble_of_the_formula(tmp_path):
    """F = 2 and B = 4 a stage: (m + S - 1) (F + B) = 30 ms, of which one in five is a bubble."""
    head = "name,forward_ms,backward_ms,activation_bytes,parameter_bytes\n"
    rows = rows_of(plan_of(tmp_path, head + "".join(f"l{i},1,2,1048576,4194304\n" for i in range(4))))
    assert columns(rows, "stage", "rank", "first_layer", "last_layer") == [[0, 1], [0, 1], [0, 2], [1, 3]]
    assert columns(rows, "forward_ms", "backward_ms", "messages_ms") == [[2, 2], [4, 4], [0, 0]]
    assert columns(rows, "busy_ms", "batch_ms", "bubble", "rank_bubble") == [
        [24] * 2,
        [30] * 2,
        [0.2] * 2,
        [0.2] * 2,
    ]
    assert columns(rows, "activations", "versions", "staleness") == [[2, 1], [1, 1], [0, 0]]
    mib = 2**20
    assert columns(rows, "weights_bytes", "gradients_bytes", "optimizer_bytes") == [[8 * mib] * 2] * 3
    assert columns(rows, "activations_bytes") == [[2 * 2 * mib, 3 * mib]]  # what enters the second, too
    late = rows_of(plan_of(tmp_path, (tmp_path / "costs.csv").read_text(), schedule="pipedream", batches=16))
    assert columns(late, "versions", "staleness", "versions_bytes") == [[2, 1], [1, 0], [8 * mib, 0]]


def test_of_a_stage_with_replicas_a_row_has_the_means_and_the_fullest(tmp_path):
    """Three microbatches, of which the first replica has two; 1 ms forward, 2 backward."""
    head = "name,forward_ms,backward_ms,activation_bytes,parameter_bytes\n"
    words = ("stages=null", "replicas=[2,1]", "microbatches=3", "partition=[1]")
    plan = plan_of(tmp_path, head + "a,1,2,1000,400\nb,1,2,1000,400\n", *words)
    rows = rows_of(plan)
    assert [row["rank"] for row in rows] == ["0-1", "2"]
    assert columns(rows, "busy_ms", "batch_ms") == [[4.5, 9], [12, 12]]
    assert columns(rows, "rank_bubble") == [pytest.approx([1 - 4.5 / 12, 0.25])]
    first, second, last = peaks_by_rank(plan.memory())
    assert columns(rows, "rank_bytes") == [[first, last]]
    assert second < first


def test_a_published_profile_is_read_as_it_is(tmp_path):
    (tmp_path / "graph.csv").write_text(GRAPH)
    rows = read_rows(tmp_path / "graph.csv", 1e-9)
    assert [spec.nbytes for spec in rows.data.specs] == [4000, 800]  # and the loader's time is no layer's
    assert [layer.name for layer in rows.layers] == ["node3", "node4", "node5", "node6"]
    assert [layer.takes for layer in rows.layers] == [
        (ValueId(INPUT, 0),),
        (),
        (ValueId(0, 0), ValueId(1, 0)),
        (ValueId(2, 0), ValueId(0, 0), ValueId(INPUT, 1)),
    ]
    assert [layer.params for layer in rows.layers] == [100, 0, 0, 1000]
    plan = plan_of(tmp_path, GRAPH, "partition=[3]", bandwidth=0.1)
    (route,) = plan.cut.routes  # with the data for the last layer, of which no gradient comes back
    assert (route.values, route.needs_grad) == (
        (ValueId(INPUT, 1), ValueId(0, 0), ValueId(2, 0)),
        (False, True, True),
    )
    rows = rows_of(plan)
    assert columns(rows, "forward_ms", "backward_ms", "messages_ms") == [[2, 2], [4, 6], [15.008, 15]]


def test_a_cut_keeps_the_messages_small_where_they_take_time(tmp_path):
    text = "name,forward_ms,backward_ms,activation_bytes\na,1,2,8\nb,1,2,8000000\nc,1,2,8\nd,1,2,8\n"
    assert plan_of(tmp_path, text).cuts == [2]
    assert plan_of(tmp_path, text, bandwidth=1).cuts in ([1], [3])
    assert plan_of(tmp_path, text, "partition=even", bandwidth=1).cuts == [2]


def test_the_halves_of_a_backward_are_those_of_the_file_or_alike_where_there_are_weights(tmp_path):
    text = "name,forward_ms,backward_ms,parameter_bytes\na,1,4,8\nb,1,4,0\n"
    (tmp_path / "x.csv").write_text(text)
    assert [(one.input_s, one.weight_s) for one in read_rows(tmp_path / "x.csv").profile.layers] == [
        (0.002, 0.002),
        (0.004, 0.0),
    ]
    halved = "name,forward_ms,backward_ms,input_ms,weight_ms\na,1,4,3,1.5\nb,1,4,3,1.5\n"
    rows = rows_of(plan_of(tmp_path, halved, schedule="zb_h1"))
    assert columns(rows, "backward_ms") == [[4, 4.5]]  # the first stage returns no gradient


REFUSED = {
    "": "it has no column name, and needs name, forward_ms, backward_ms",
    "name,forward_ms\na,1\n": "it has no column backward_ms, and needs name, forward_ms, backward_ms",
    "name,forward_ms,backward_ms,weight_ms\na,1,2,1\n": "it has no column input_ms, and needs name, ",
    "name,forward_ms,backward_ms,bytes\na,1,2,3\n": "nothing reads its column bytes; there may be name, ",
    HEAD: "it has no layers",
    f"{HEAD}a,1,2\nb,1,-2\n": "line 3 has backward_ms=-2, and must have a number of at least 0",
    f"{HEAD}a,fast,2\n": "line 2 has forward_ms=fast, and must have a number of at least 0",
    f"{HEAD}a,,2\n": "line 2 has forward_ms=, and must have a number of at least 0",
    f"{HEAD}a,nan,2\n": "line 2 has forward_ms=nan, and must have a number of at least 0",
    f"{HEAD}a,1\n": "line 2 has 2 cells, and there are 3 columns",
    f"{HEAD}a,1,2\na,1,2\n": "line 3 needs a name of its own, and has 'a'",
    "name,inputs,forward_ms,backward_ms\na,b,1,2\nb,,1,2\n": "line 2 takes b, which no line above it makes",
}


@pytest.mark.parametrize(("text", "says"), REFUSED.items(), ids=REFUSED.values())
def test_what_is_no_table_of_costs_is_refused_with_its_line(tmp_path, text, says):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"costs={tmp_path}/x.csv cannot be read: {says}")):
        read_rows(tmp_path / "x.csv")


def test_more_stages_than_rows_are_refused_and_a_file_that_is_not_there(tmp_path):
    with pytest.raises(
        ConfigError, match="stages=3 needs at least as many layers, but the model has 2: 0 a, 1"
    ):
        plan_of(tmp_path, f"{HEAD}a,1,2\nb,1,2\n", "stages=3")
    with pytest.raises(ConfigError, match=r"no.csv cannot be read: No such file or directory"):
        read_rows(tmp_path / "no.csv")
    (tmp_path / "excel.csv").write_text("\ufeffname, forward_ms, backward_ms\n\na, 1, 2\n")
    assert [one.forward_s for one in read_rows(tmp_path / "excel.csv").profile.layers] == [0.001]


def test_many_stages_of_many_layers_try_few_cuts_and_find_the_best():
    """Of 350 layers and 64 stages there are 3.9 million pairs of a stage and a slice."""
    weights = [1 + (7 * n % 10) / 10 for n in range(350)]
    until, tried = [0.0, *accumulate(weights)], 0

    def cost(stage: int, start: int, end: int) -> float:
        nonlocal tried
        tried += 1
        return until[end] - until[start] + 0.1 * (start % 3)

    even = [0, *balance(weights, [(rank,) for rank in range(64)]), 350]
    reached = max(cost(stage, even[stage], even[stage + 1]) for stage in range(64))
    best, slowest = best_cuts(350, 64, cost, until, reached)
    assert tried < 100_000
    assert slowest == max(
        cost(stage, *span) for stage, span in enumerate(zip([0, *best], [*best, 350], strict=True))
    )
    few = best_cuts(40, 8, cost, until[:41], 40.0)
    assert few == best_cuts(40, 8, cost)
