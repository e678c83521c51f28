"""A trace replayed: its costs are what was measured, and simulating by them gives its own times again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from pipetrain.plan.replay import read_trace, replay, typical
from pipetrain.schedule import chrome
from pipetrain.schedule.actions import Op
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import layer_dist, one_f_one_b, pipedream
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.timeline import Costs, Row, Timeline
from tests.support.refusals import refusal
from tests.support.traces import about, as_measured

STAGES = {0: (1.0, 2.5, 0.25, 0.0), 1: (1.25, 2.0, 0.5, 0.0)}
OPS = (Op.F, Op.B, Op.STEP, Op.REDUCE)
TIMES = {(stage, op): s for stage, of in STAGES.items() for op, s in zip(OPS, of, strict=True)}
COSTS = Costs(TIMES | {(0, Op.SEND_F, 1): 0.125, (1, Op.SEND_B, 0): 0.0625})
TRACED = lower(one_f_one_b(2, 1, 4))


def traced(program=TRACED, m=4, **more):
    return replay(about(program, m), as_measured(program, COSTS, m, **more))


@pytest.mark.parametrize(("program", "m"), [(one_f_one_b(2, 1, 4), 4), (layer_dist(2, 2, 1), 1)])
def test_a_replay_gives_exactly_the_durations_of_its_trace(program, m):
    lowered = lower(program)
    made = traced(lowered, m, windows=3)
    assert made.costs.seconds == pytest.approx(dict(COSTS.seconds))
    makespan = simulate(lowered, m, cost=COSTS).makespan
    assert simulate(lowered, m, cost=made.costs).makespan == pytest.approx(makespan)
    assert made.batch_s == pytest.approx(makespan / sum(a.op is Op.STEP for a in program[0]))


def test_a_rank_s_own_time_is_spread_over_what_it_computes():
    made = traced(windows=3, own=0.8)  # of 4 forwards and 4 backwards
    assert made.costs.seconds[0, Op.F] == pytest.approx(1.1)
    assert made.costs.seconds[1, Op.B] == pytest.approx(2.1)
    assert made.costs.seconds[1, Op.STEP] == pytest.approx(0.5)
    assert simulate(TRACED, 4, cost=made.costs).makespan == pytest.approx(made.batch_s, rel=0.05)


def test_short_microbatches_set_no_durations_and_batches_count_by_their_samples():
    whole, short = as_measured(TRACED, COSTS, windows=2)
    (late,) = as_measured(TRACED, Costs({key: seconds / 2 for key, seconds in COSTS.seconds.items()}))
    short = replace(short, samples=[2] * 4, timeline=late.timeline, epoch=1)
    made = replay(about(TRACED, 4), [whole, short])
    assert made.costs.seconds[0, Op.F] == pytest.approx(1.0)
    assert made.batch_s == pytest.approx(simulate(TRACED, 4, cost=COSTS).makespan)


def test_messages_that_nobody_waited_for_say_nothing_of_their_travel():
    """By pipedream rank 1 is always busy here: only its first message is waited for."""
    slow = Costs({**COSTS.seconds, (1, Op.F): 4.0, (1, Op.B): 8.0})
    program = lower(pipedream(2, 6, 1))
    made = replay(about(program, 1), as_measured(program, slow))
    assert made.costs.seconds[0, Op.SEND_F, 1] == pytest.approx(0.125)
    assert made.costs.seconds[1, Op.SEND_B, 0] == pytest.approx(0.0625)


def test_an_evaluation_between_epochs_is_nobody_s_time():
    def later(row: Row) -> Row:
        spans = [span._replace(start=span.start + 100, end=span.end + 100) for span in row.spans]
        return Row(row.began + 100, row.ended + 100, spans)

    (first,), (second,) = as_measured(TRACED, COSTS), as_measured(TRACED, COSTS)
    second = replace(second, epoch=1, timeline=Timeline(list(map(later, second.timeline.rows)), 4))
    made = replay(about(TRACED, 4), [first, second])
    assert made.costs.seconds == pytest.approx(dict(COSTS.seconds))
    assert made.batch_s == pytest.approx(simulate(TRACED, 4, cost=COSTS).makespan)


def test_typical_is_the_mean_with_hiccups_cut():
    assert typical([1.0, 1.0, 1.3]) == pytest.approx(1.1)
    assert typical([1.0, 1.0, 1.0, 1000.0]) == pytest.approx(1.5)


# The file


def test_a_file_gives_what_its_windows_gave(tmp_path):
    path = tmp_path / "trace.json"
    chrome.write(path, about(TRACED, 4), as_measured(TRACED, COSTS, windows=2))
    made = read_trace(path)
    assert made.costs.seconds == pytest.approx(dict(COSTS.seconds))
    assert made.batch_s == pytest.approx(traced(windows=2).batch_s)


def test_a_file_that_is_none_of_ours_or_damaged_is_refused(tmp_path):
    path = tmp_path / "trace.json"
    chrome.write(path, about(TRACED, 4), as_measured(TRACED, COSTS))
    content = json.loads(path.read_text())
    without = {key: value for key, value in content["otherData"].items() if key != "batch_size"}
    for text in (
        *("[]", "{}", "[1, 2", "\xff"),
        json.dumps({**content, "traceEvents": []}),
        json.dumps({**content, "traceEvents": [*content["traceEvents"], 3]}),
        json.dumps({**content, "otherData": {**content["otherData"], "windows": []}}),
        json.dumps({**content, "otherData": {**content["otherData"], "microbatches": 0}}),
        json.dumps({**content, "otherData": without}),
    ):
        path.write_text(text, encoding="latin-1")
        assert f"cost={path} cannot be read as a trace.json of this version" in refusal(
            lambda: read_trace(path)
        )
    assert "(FileNotFoundError: " in refusal(lambda: read_trace(tmp_path / "none"))
