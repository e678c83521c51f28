"""The clock: the host's own, and that of a device which runs behind it, told in the host's seconds."""

from __future__ import annotations

import time

import pytest
import torch

from pipetrain.runtime.clock import Clock, Stopwatch
from pipetrain.schedule.actions import parse_program
from pipetrain.schedule.timeline import Row, Span

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FORWARD, RECEIVE, BACKWARD, SEND = parse_program("1F0@0 1RECV_B0 1B0@0 1SEND_B0")[0]


# A device of its own


class Device:
    """A host and a stream, each with its time in seconds; the stream's events are a thousand seconds off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.stream = 50.0, 50.0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream")
        monkeypatch.setattr(time, "perf_counter", lambda: self.host)

    def compute(self, seconds: float) -> None:
        self.stream = max(self.host, self.stream) + seconds
        self.host += 0.001  # to launch it


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: str) -> None:
        assert stream == "the stream"
        self.at = 1000.0 + max(self.device.host, self.device.stream)

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at - 1000.0)

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)


def times(row: Row) -> list[tuple[float, float, float]]:
    return [(span.start, span.end, span.waited) for span in row.spans]


@pytest.fixture
def device(monkeypatch) -> Device:
    return Device(monkeypatch)


def test_events_are_told_in_the_host_s_seconds_and_windows_follow_each_other_without_a_wait(device):
    """The second one begins on the stream, two seconds after the host has begun it."""
    clock = Clock(GPU)
    unread = []
    for seconds in (2.0, 1.0):
        began, start = clock.begin(), clock.mark()
        device.compute(seconds)
        unread.append(Row(began, clock.mark(), [Span(FORWARD, start, clock.mark())]))
    assert device.host == pytest.approx(50.002)  # the host did not wait
    rows = [clock.resolve(row) for row in unread]
    assert device.host == pytest.approx(53.0)
    assert [(row.began, row.ended, *times(row)[0]) for row in rows] == [
        pytest.approx((50.0, 52.0, 50.0, 52.0, 0.0)),
        pytest.approx((52.0, 53.0, 52.0, 53.0, 0.0)),
    ]


def test_a_message_for_which_the_stream_waits_is_marked_on_it(device):
    """All of such a span is a wait; the host's own time between launches counts nowhere."""
    channel = Channel()
    channel.ordered = True
    watch = Stopwatch(clock := Clock(GPU), channel)
    for action, seconds in ((FORWARD, 2.0), (RECEIVE, 3.0), (BACKWARD, 1.0)):
        watch.start(action)
        device.compute(seconds)
        channel.carried += 100 * (action is RECEIVE)
        watch.stop()
    watch.start(None)
    unread = watch.row()
    assert device.host == pytest.approx(50.003)
    row = clock.resolve(unread)
    assert times(row)[:3] == [
        pytest.approx(moments) for moments in ([50.0, 52.0, 0.0], [52.0, 55.0, 3.0], [55.0, 56.0, 0.0])
    ]
    assert [span.nbytes for span in row.spans[:3]] == [0, 100, 0]
    assert row.waited == pytest.approx(3.0)


def test_a_wait_counts_from_when_the_device_has_nothing_left_to_do(device):
    """F takes the device until 52; the host waits for the gradient from 50.001 on, which comes at 53."""
    clock = Clock(GPU)
    began = clock.begin()
    marks = [clock.mark()]
    device.compute(2.0)
    marks.append(clock.mark())
    waiting = device.host
    device.host = 53.0
    marks.append(clock.mark())
    device.compute(1.0)
    marks.append(clock.mark())
    sent = device.host
    spans = [
        Span(FORWARD, marks[0], marks[1]),
        Span(RECEIVE, waiting, 53.0, 53.0 - waiting),
        Span(BACKWARD, marks[2], marks[3]),
        Span(SEND, sent, sent + 0.5, 0.5),  # in the shadow of B: no wait at all
        Span(None, sent + 0.5, sent + 0.5),
    ]
    row = clock.resolve(Row(began, clock.mark(), spans))
    expected = [(50.0, 52.0, 0.0), (52.0, 53.0, 1.0), (53.0, 54.0, 0.0), (54.0, 54.0, 0.0), (54.0, 54.0, 0.0)]
    assert times(row) == [pytest.approx(moments) for moments in expected]
    assert row.waited == pytest.approx(1.0)


# The stopwatch


class Channel:
    ordered = False
    waited, coded, carried = 0.0, 0.0, 0


def test_a_policy_s_wait_is_a_span_of_its_own_and_lasts_until_the_next_start():
    channel = Channel()
    watch = Stopwatch(Clock(CPU), channel, lambda: channel.coded)
    watch.start(None)
    channel.waited = 1.0
    watch.start(RECEIVE)
    channel.waited, channel.coded, channel.carried = 1.5, 0.25, 100
    watch.stop()
    watch.start(FORWARD)
    watch.stop()
    watch.start(None)
    channel.waited = 3.5
    row = watch.row()
    assert [(span.action, *span[3:]) for span in row.spans] == [
        (None, 1.0, 0, 0.0),
        (RECEIVE, 0.5, 100, 0.25),
        (FORWARD, 0.0, 0, 0.0),
        (None, 2.0, 0, 0.0),
    ]
    assert row.waited == 3.5
