"""A trace replayed: its costs are what was measured, and simulating by them gives its own times again."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from pipetrain.errors import ConfigError
from pipetrain.plan.replay import read_trace, replay, typical
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import Op
from pipetrain.schedule.bounds import edge_bounds
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import gpipe, layer_dist, one_f_one_b, pipedream
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Costs, Row, Timeline
from tests.support.traces import about, as_measured

STAGES = range(2)
COSTS = Costs(
    {
        (0, Op.F): 1.0,
        (0, Op.B): 2.5,
        (0, Op.STEP): 0.25,
        (0, Op.REDUCE): 0.0,
        (1, Op.F): 1.25,
        (1, Op.B): 2.0,
        (1, Op.STEP): 0.5,
        (1, Op.REDUCE): 0.0,
        (0, Op.SEND_F, 1): 0.125,
        (1, Op.SEND_B, 0): 0.0625,
    }
)
TRACED = lower(one_f_one_b(2, 1, 4))


def traced(program=TRACED, m=4, **more):
    return replay(about(program, m), as_measured(program, COSTS, m, **more))


@pytest.mark.parametrize(
    ("program", "m"), [(one_f_one_b(2, 1, 4), 4), (gpipe(2, 1, 3), 3), (layer_dist(2, 2, 1), 1)]
)
def test_a_replay_gives_exactly_the_durations_of_its_trace(program, m):
    lowered = lower(program)
    made = traced(lowered, m, windows=3)
    assert made.costs.seconds == pytest.approx(dict(COSTS.seconds))
    makespan = simulate(lowered, m, cost=COSTS).makespan
    batches = sum(a.op is Op.STEP for a in program[0])
    assert made.measured.batch_s == pytest.approx(makespan / batches)
    waits = [seconds / makespan for seconds in simulate(lowered, m, cost=COSTS).waits(repeated=True)]
    for figures in (made.measured, made.again):
        assert figures.batch_s == pytest.approx(makespan / batches)
        assert figures.wait == pytest.approx(waits)


def test_a_skip_is_replayed_with_the_bounds_that_it_had():
    routes = [*pairwise(range(8)), (0, 7)]
    program = lower(gpipe(8, 1, 32), routes)
    costs = Costs({(stage, op): 1.0 for stage in range(8) for op in (Op.F, Op.B)})
    bounds = edge_bounds(program, routes, 2)
    said = about(program, 32, bounds=[[*edge, bound] for edge, bound in bounds.items()])
    made = replay(said, as_measured(program, costs, 32, buffer_size=bounds))
    assert made.again.batch_s == pytest.approx(made.measured.batch_s)
    assert made.again.batch_s < simulate(program, 32, cost=costs, routes=routes).makespan


def test_another_schedule_takes_what_it_takes_by_these_costs():
    other = lower(pipedream(2, 5, 4))
    figures = traced().figures(other, [4] * 20, batch_size=16, buffer_size=2, repeated=False)
    simulation = simulate(other, 4, cost=COSTS)
    assert figures.batch_s == pytest.approx(simulation.makespan / 5)
    assert figures.wait == pytest.approx(
        [seconds / simulation.makespan for seconds in simulation.waits(False)]
    )


def test_a_rank_s_own_time_is_spread_over_what_it_computes():
    made = traced(windows=3, own=0.8)  # of 4 forwards and 4 backwards
    assert made.costs.seconds[0, Op.F] == pytest.approx(1.1)
    assert made.costs.seconds[1, Op.B] == pytest.approx(2.1)
    assert made.costs.seconds[1, Op.STEP] == pytest.approx(0.5)
    assert made.again.batch_s == pytest.approx(made.measured.batch_s, rel=0.05)


def test_short_microbatches_set_no_durations_and_cost_their_share():
    whole, short = as_measured(TRACED, COSTS, windows=2)
    half = Costs({key: seconds / 2 for key, seconds in COSTS.seconds.items()})
    (late,) = as_measured(TRACED, half)
    short = replace(short, samples=[2] * 4, timeline=late.timeline, epoch=1)
    made = replay(about(TRACED, 4), [whole, short])
    assert made.costs.seconds[0, Op.F] == pytest.approx(1.0)
    figures = made.figures(TRACED, [2] * 4, batch_size=8, buffer_size=2, repeated=True)
    assert figures.batch_s == pytest.approx(simulate(TRACED, 4, cost=half).makespan, rel=0.1)


def test_messages_that_nobody_waited_for_say_nothing_of_their_travel():
    """By pipedream rank 1 is always busy here: only its first message is waited for."""
    slow = Costs({**COSTS.seconds, (1, Op.F): 4.0, (1, Op.B): 8.0})
    program = lower(pipedream(2, 6, 1))
    made = replay(about(program, 1), as_measured(program, slow))
    assert made.costs.seconds[0, Op.SEND_F, 1] == pytest.approx(0.125)
    assert made.costs.seconds[1, Op.SEND_B, 0] == pytest.approx(0.0625)


def a_bit_later(row: Row) -> Row:
    spans = [span._replace(start=span.start + 100, end=span.end + 100) for span in row.spans]
    return Row(row.began + 100, row.ended + 100, spans)


def test_an_evaluation_between_epochs_is_nobody_s_time():
    first, second = as_measured(TRACED, COSTS), as_measured(TRACED, COSTS)
    late = [
        replace(window, epoch=1, timeline=Timeline([a_bit_later(row) for row in window.timeline.rows], 4))
        for window in second
    ]
    made = replay(about(TRACED, 4), [*first, *late])
    assert made.costs.seconds == pytest.approx(dict(COSTS.seconds))
    assert made.measured.batch_s == pytest.approx(simulate(TRACED, 4, cost=COSTS).makespan)


def test_typical_is_the_mean_with_hiccups_cut():
    assert typical([1.0, 1.0, 1.3]) == pytest.approx(1.1)
    assert typical([1.0, 1.0, 1.0, 1000.0]) == pytest.approx(1.5)


# The file


def test_a_file_gives_what_its_windows_gave(tmp_path):
    windows = as_measured(TRACED, COSTS, windows=2)
    chrome.write(tmp_path / "trace.json", about(TRACED, 4), windows)
    made = read_trace(tmp_path / "trace.json")
    assert made.costs.seconds == pytest.approx(dict(COSTS.seconds))
    assert made.again.batch_s == pytest.approx(made.measured.batch_s)


def refusal(path) -> str:
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    said = str(error.value)
    assert said.startswith(f"cost={path} ")
    assert "\n" not in said
    return said


def test_a_file_that_is_none_of_ours_is_refused(tmp_path):
    assert "cannot be read: No such file" in refusal(tmp_path / "nothing.json")
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    path = tmp_path / "trace.json"
    for text in ("", "[]", "3", "{}", '{"traceEvents": []}', '{"otherData": 3}', "[1, 2", "\ufffe"):
        path.write_text(text)
        assert "is not a whole trace.json of this version" in refusal(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not a whole trace.json" in refusal(path)


def test_a_damaged_trace_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    chrome.write(path, about(TRACED, 4), as_measured(TRACED, COSTS))
    whole = json.loads(path.read_text())
    path.write_text(path.read_text()[:5000])
    refusal(path)
    damages = [
        lambda t: t["traceEvents"].clear(),
        lambda t: t["otherData"]["windows"].clear(),
        lambda t: t["otherData"].pop("batch_size"),
        lambda t: t["otherData"].update(batch_size="many"),
        lambda t: t["otherData"].update(microbatches=0),
        lambda t: t["traceEvents"].extend([{"ph": "X", "pid": 9, "args": {"window": 0}, "ts": 0, "dur": 0}]),
        lambda t: t["traceEvents"].append(3),
    ]
    for damage in damages:
        content = json.loads(json.dumps(whole))
        damage(content)
        path.write_text(json.dumps(content))
        refusal(path)
