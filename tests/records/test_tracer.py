"""Tracing a run: which windows, on whose clock, and that what comes together is what the program says."""

from __future__ import annotations

import json

import pytest

from pipetrain.checkpoint.files import Position
from pipetrain.records import tracer as module
from pipetrain.records.tracer import Trace, Tracer, about_trace
from pipetrain.runtime.ranks import World
from pipetrain.schedule.timeline import Row, Span
from tests.support.cases import Case, Listener, make_run, run_in_threads

PLAIN = "model._target_=tests.support.models.without_norm"


def traced(case: Case) -> list[Trace]:
    listener = Listener()
    run_in_threads(case, listener)
    return listener.traces


@pytest.mark.parametrize(
    "case",
    [
        Case("1f1b", 2, (PLAIN, "microbatches=4", "epochs=2", "trace=true")),
        Case("pipedream", 3, (PLAIN, "microbatches=2", "epochs=2", "trace=true", "window=3")),
        Case("interleaved_1f1b", 2, (PLAIN, "microbatches=4", "epochs=1", "trace=true")),
        Case("1f1b", 1, (PLAIN, "microbatches=2", "epochs=1", "trace=true")),
    ],
    ids=str,
)
def test_every_window_of_training_is_there_with_every_action(case):
    (trace,) = traced(case)
    run = make_run(case)
    batches = run.sampler.epoch(0)
    length = run.settings.window or len(batches)
    sizes = [
        [len(ids) for batch in batches[start : start + length] for ids in batch]
        for start in range(0, len(batches), length)
    ]
    assert trace.cut == ""
    assert [window.samples for window in trace.windows] == run.settings.epochs * sizes
    assert [window.epoch for window in trace.windows] == [
        epoch for epoch in range(run.settings.epochs) for _ in sizes
    ]
    for window in trace.windows:
        program = run.plan.windows[len(window.samples) // run.settings.microbatches].program
        assert [row.actions for row in window.timeline.rows] == program
        for row in window.timeline.rows:
            moments = [row.began, *(t for span in row.spans for t in (span.start, span.end)), row.ended]
            assert moments == sorted(moments)
            assert 0 < row.busy + row.waited <= row.ended - row.began


@pytest.mark.slow
def test_the_first_n_windows_are_traced():
    for windows, epochs in ((1, [0]), (5, [0, 0, 0, 0, 1]), (99, [0] * 4 + [1] * 4)):
        case = Case("gpipe", 2, (PLAIN, "microbatches=2", "epochs=2", f"+trace.windows={windows}"))
        (trace,) = traced(case)
        assert [window.epoch for window in trace.windows] == epochs
        assert trace.cut == ""


def test_without_trace_nothing_is_traced():
    assert traced(Case("gpipe", 2, (PLAIN, "microbatches=2", "epochs=1"))) == []


@pytest.mark.slow
def test_it_stops_before_the_window_that_would_be_too_much(monkeypatch):
    case = Case("1f1b", 2, (PLAIN, "microbatches=2", "epochs=2", "trace=true"))
    longest = max(map(len, make_run(case).plan.windows[1].program))
    for bound, windows in ((1, 1), (longest, 1), (3 * longest, 3), (3 * longest + 1, 3), (5 * longest, 5)):
        monkeypatch.setattr(module, "MOST_ACTIONS", bound)
        (trace,) = traced(case)
        assert (len(trace.windows), trace.cut) == (windows, f"at {bound} actions of a rank")


class Shifted:
    """The mesh of one rank whose clock is behind rank 0's, by more and more."""

    world = World()

    def __init__(self, offsets: list[tuple[float, float]]) -> None:
        self._offsets = iter(offsets)

    def clock_offset(self) -> tuple[float, float]:
        return next(self._offsets)

    def gather(self, what: str, item: object) -> list[object]:
        return [json.loads(json.dumps(item))]


def test_times_are_put_on_rank_0_s_clock_and_drift_is_evened_out(monkeypatch):
    run = make_run(Case("1f1b", 1, (PLAIN, "microbatches=2", "epochs=1", "+trace.windows=1")))
    now = iter([100.0, 200.0])
    monkeypatch.setattr(module, "perf_counter", lambda: next(now))
    tracer = Tracer(run.about, Shifted([(7.0, 0.01), (9.0, 0.002)]), Position())  # type: ignore[arg-type]
    observe = tracer.observer(0, run.sampler.batch_sizes[:1])
    assert observe
    assert tracer.over
    assert tracer.observer(0, run.sampler.batch_sizes[1:2]) is None
    actions = run.plan.windows[1].program[0]
    observe(Row(100.0, 200.0, [Span(action, 150.0, 150.0, 0.5) for action in actions]))
    trace = tracer.collect()
    (window,) = trace.windows
    (row,) = window.timeline.rows
    assert (row.began, row.ended) == pytest.approx((107.0, 209.0))
    assert row.spans == [Span(action, pytest.approx(158.0), pytest.approx(158.0), 0.5) for action in actions]
    assert trace.clock_error_s == 0.01


def test_what_a_trace_says_of_its_run_is_what_a_replay_needs():
    from pipetrain.plan.replay import CONDITIONS

    run = make_run(Case("pipedream", 2, (PLAIN, "microbatches=2", "partition=[3]")))
    said = about_trace(run.about, Trace([], True, 2e-5), "2 x cpu")
    assert said.keys() >= CONDITIONS
    assert (said["partition"], said["epoch_batches"], said["window"]) == ([3], 4, None)
    assert (said["dtype"], said["clock_error_us"], said["device"]) == ("float64", 20.0, "2 x cpu")
