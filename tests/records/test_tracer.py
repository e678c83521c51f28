"""Tracing a run: which windows, on whose clock, and that what comes together is what the program says."""

from __future__ import annotations

import json

import pytest

from pipetrain.model.specs import Size
from pipetrain.records import tracer as module
from pipetrain.records.tracer import Trace, Tracer, about_trace
from pipetrain.runtime.comm.collectives import World
from pipetrain.schedule.timeline import Row, Span
from tests.support.cases import Case, Listener, make_run
from tests.support.thread_ranks import run_in_threads

PLAIN = "model._target_=tests.support.models.without_norm"


def test_every_window_of_training_is_there_with_every_action():
    words = (PLAIN, "microbatches=2", "epochs=2", "trace=true", "window=3")
    case, listener = Case("pipedream", 3, words), Listener()
    run_in_threads(case, listener)
    (trace,) = listener.traces
    run = make_run(case)
    batches = run.sampler.epoch(0)
    sizes = [
        (epoch, [len(ids) for batch in batches[start : start + 3] for ids in batch])
        for epoch in (0, 1)
        for start in range(0, len(batches), 3)
    ]
    assert trace.cut == ""
    assert [(window.epoch, window.samples) for window in trace.windows] == sizes
    for window in trace.windows:
        program = run.plan.windows[len(window.samples) // 2].program
        assert [row.actions for row in window.timeline.rows] == program
        for row in window.timeline.rows:
            moments = [row.began, *(t for span in row.spans for t in (span.start, span.end)), row.ended]
            assert moments == sorted(moments)
            assert 0 < row.busy + row.waited <= row.ended - row.began


class Shifted:
    """The links of one rank whose clock is behind rank 0's, by more and more."""

    world = World()

    def __init__(self, offsets: list[tuple[float, float]]) -> None:
        self._offsets = iter(offsets)

    def clock_offset(self) -> tuple[float, float]:
        return next(self._offsets)

    def gather(self, what: str, item: object) -> list[object]:
        return [json.loads(json.dumps(item))]


STOPPED = "where the run was stopped"


@pytest.mark.parametrize(
    ("windows", "most", "traced", "cut"),
    [
        *[(None, 10**6, 8, ""), (5, 10**6, 5, ""), (99, 10**6, 8, STOPPED)],
        (None, 18, 3, "at 18 actions of a rank"),
        (None, 1, 1, "at 1 actions of a rank"),
    ],
)
def test_the_first_n_windows_are_traced_unless_they_would_be_too_much(
    windows, most, traced, cut, monkeypatch
):
    monkeypatch.setattr(module, "MOST_ACTIONS", most)
    words = ["trace=true"] if windows is None else [f"+trace.windows={windows}"]
    run = make_run(Case("gpipe", 1, (PLAIN, "microbatches=2", "epochs=2", "window=1", *words)))
    actions = run.plan.windows[1].program[0]
    assert len(actions) == 6
    tracer = Tracer(run.about, Shifted([(0.0, 0.0)] * 2))  # type: ignore[arg-type]
    epochs = []
    for epoch in (0, 1):
        for size in map(Size, run.sampler.batch_sizes):
            if tracer.traces(1):
                tracer.add(epoch, [size], Row(1.0, 2.0, [Span(action, 1.0, 2.0) for action in actions]))
                epochs.append(epoch)
    assert epochs == [0, 0, 0, 0, 1, 1, 1, 1][:traced]
    trace = tracer.collect(stopped=windows == 99)
    assert ([window.epoch for window in trace.windows], trace.cut) == (epochs, cut)


def test_times_are_put_on_rank_0_s_clock_and_drift_is_evened_out(monkeypatch):
    run = make_run(Case("1f1b", 1, (PLAIN, "microbatches=2", "epochs=1", "+trace.windows=1")))
    now = iter([100.0, 200.0])
    monkeypatch.setattr(module, "perf_counter", lambda: next(now))
    tracer = Tracer(run.about, Shifted([(7.0, 0.01), (9.0, 0.002)]))  # type: ignore[arg-type]
    assert tracer.traces(1)
    actions = run.plan.windows[1].program[0]
    size = Size(run.sampler.batch_sizes[0])
    tracer.add(0, [size], Row(100.0, 200.0, [Span(action, 150.0, 150.0, 0.5) for action in actions]))
    trace = tracer.collect(stopped=False)
    (window,) = trace.windows
    (row,) = window.timeline.rows
    assert (row.began, row.ended) == pytest.approx((107.0, 209.0))
    assert row.spans == [Span(action, pytest.approx(158.0), pytest.approx(158.0), 0.5) for action in actions]
    assert trace.clock_error_s == 0.01


def test_what_a_trace_says_of_its_run():
    run = make_run(Case("pipedream", 2, (PLAIN, "microbatches=2", "partition=[3]")))
    said = about_trace(run.about, Trace([], "", 2e-5))
    assert said.keys() >= {"model", "ranks", "placement", "batch_size", "microbatches"}  # of a drawing
    assert (said["schedule"], said["partition"], said["window"]) == ("pipedream", [3], None)
    assert (said["dtype"], said["clock_error_us"], said["device"]) == ("float64", 20.0, "cpu")
