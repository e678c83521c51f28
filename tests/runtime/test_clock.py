"""The clock of a device without a stream of its own: the host's."""

from __future__ import annotations

import time

import torch

from pipetrain.runtime.clock import Clock

CPU = torch.device("cpu")


def test_marks_rise_with_time():
    clock = Clock(CPU)
    start = clock.mark()
    time.sleep(0.02)
    end = clock.mark()
    ((key, seconds),) = clock.durations([(3, start, end)])
    assert key == 3
    assert 0.02 <= seconds < 5


def test_durations_are_each_span_s_own_in_order():
    spans = [(1, 10.0, 10.5), (0, 10.5, 12.5), (1, 20.0, 20.0)]
    assert list(Clock(CPU).durations(spans)) == [(1, 0.5), (0, 2.0), (1, 0.0)]
    assert list(Clock(CPU).durations([])) == []


def test_on_a_cpu_nothing_asks_for_a_gpu(monkeypatch):
    def refuse(*arguments: object) -> None:
        raise AssertionError("a GPU was asked for")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(torch.cuda, "Event", refuse)
    clock = Clock(CPU)
    ((key, seconds),) = clock.durations([(0, clock.mark(), clock.mark())])
    assert key == 0
    assert seconds >= 0
