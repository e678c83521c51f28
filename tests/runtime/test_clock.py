"""The clock of a device which runs behind the host, told in the host's seconds; and the stopwatch."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from pipetrain.runtime.clock import Clock, Stopwatch
from pipetrain.runtime.comm.transfer_watch import Deadline
from pipetrain.schedule.actions import parse_program
from pipetrain.schedule.timeline import Row

FORWARD, RECEIVE, BACKWARD, SEND = parse_program("1F0@0 1RECV_B0 1B0@0 1SEND_B0")[0]


class Device:
    """A host and a stream, each with its time in seconds; the stream's events are a thousand seconds off."""

    def __init__(self) -> None:
        self.host, self.stream = 50.0, 50.0
        self.clock = Clock(torch.device("cuda", 0))
        self.marked = 0  # events
        self.told: list[object] = []  # to the deadline
        deadline = SimpleNamespace(begin=partial(self.told.append, "begun"), mark=self.told.append)
        self.channel = SimpleNamespace(ordered=True, waited=0.0, transferred_bytes=0, deadline=deadline)

    def compute(self, seconds: float) -> None:
        self.stream = max(self.host, self.stream) + seconds
        self.host += 0.001  # to launch it


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: str) -> None:
        assert stream == "the stream"
        self.device.marked += 1
        self.at = 1000.0 + max(self.device.host, self.device.stream)

    def query(self) -> bool:
        return self.at - 1000.0 <= self.device.host

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at - 1000.0)

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)


@pytest.fixture
def device(monkeypatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream")
    monkeypatch.setattr(time, "perf_counter", lambda: device.host)
    return device


def times(row: Row) -> list[object]:
    return [pytest.approx((span.start, span.end, span.waited)) for span in row.spans]


def measured(watch: Stopwatch, action: object, run: Callable[[], object]) -> None:
    watch.start(action)
    run()
    watch.stop()


def test_windows_follow_each_other_without_a_wait_of_the_host_and_messages_of_the_stream_are_waits(device):
    """The second one begins on the stream, six seconds after the host has begun it."""
    unread = []
    for works in ([(FORWARD, 2.0), (RECEIVE, 3.0), (BACKWARD, 1.0)], [(FORWARD, 1.0)]):
        watch = Stopwatch(device.clock, device.channel)
        for action, seconds in works:
            device.channel.transferred_bytes += 100 * (action is RECEIVE)
            measured(watch, action, lambda seconds=seconds: device.compute(seconds))
        unread.append(watch.row())
    assert device.host == pytest.approx(50.004)  # the host did not wait
    assert device.marked == 1 + (3 + 2) + (1 + 2)  # one an action, beside the ends of windows and the anchor
    assert [one == "begun" for one in device.told] == [True, False] * 3 + [False] + [True, False, False]
    first, second = (device.clock.resolve(row) for row in unread)
    assert device.host == pytest.approx(57.0)
    assert times(first) == [(50.0, 52.0, 0.0), (52.0, 55.0, 3.0), (55.0, 56.0, 0.0)]
    assert times(second) == [(56.0, 57.0, 0.0)]
    assert [(row.began, row.ended) for row in (first, second)] == [
        pytest.approx(ends) for ends in ((50.0, 56.0), (56.0, 57.0))
    ]


def test_a_wait_of_the_host_counts_from_when_the_device_has_nothing_left_to_do(device):
    """F takes the device until 52; the host waits for the gradient from 50.001 on, which comes at 53."""
    device.channel.ordered = False
    watch = Stopwatch(device.clock, device.channel)

    def wait(until: float) -> None:
        device.channel.waited += until - device.host
        device.host = until

    measured(watch, FORWARD, lambda: device.compute(2.0))
    measured(watch, RECEIVE, lambda: wait(53.0))
    measured(watch, BACKWARD, lambda: device.compute(1.0))
    measured(watch, SEND, lambda: wait(53.5))  # in the shadow of B: no wait at all
    watch.start(None)
    row = device.clock.resolve(watch.row())
    expected = [(50.0, 52.0, 0.0), (52.0, 53.0, 1.0), (53.0, 54.0, 0.0), (54.0, 54.0, 0.0), (54.0, 54.0, 0.0)]
    assert times(row) == expected
    assert row.waited == pytest.approx(1.0)


def test_a_policy_s_wait_is_a_span_of_its_own_and_lasts_until_the_next_start():
    channel = SimpleNamespace(
        ordered=False, waited=0.0, coded=0.0, transferred_bytes=0, deadline=Deadline(60)
    )
    watch = Stopwatch(Clock(torch.device("cpu")), channel, lambda: channel.coded)
    watch.start(None)
    channel.waited = 1.0
    watch.start(RECEIVE)
    channel.waited, channel.coded, channel.transferred_bytes = 1.5, 0.25, 100
    watch.stop()
    measured(watch, FORWARD, lambda: None)
    watch.start(None)
    channel.waited = 3.5
    row = watch.row()
    assert [(span.action, *span[3:]) for span in row.spans] == [
        (None, 1.0, 0, 0.0),
        (RECEIVE, 0.5, 100, 0.25),
        (FORWARD, 0.0, 0, 0.0),
        (None, 2.0, 0, 0.0),
    ]
