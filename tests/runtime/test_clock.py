"""The clock: the host's own, and that of a device which runs behind it, told in the host's seconds."""

from __future__ import annotations

import time

import pytest
import torch

from pipetrain.runtime.clock import Clock
from pipetrain.schedule.actions import parse_program
from pipetrain.schedule.measured import RankWindow

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
FORWARD, RECEIVE, BACKWARD, SEND = parse_program("1F0@0 1RECV_B0 1B0@0 1SEND_B0")[0]


def test_marks_rise_with_time():
    clock = Clock(CPU)
    began = clock.begin()
    start = clock.mark()
    time.sleep(0.02)
    assert began <= start
    assert 0.02 <= clock.mark() - start < 5


def test_on_a_cpu_a_window_is_what_was_marked():
    window = RankWindow(9.0, [(FORWARD, 10.0, 10.5, 0.0), (RECEIVE, 10.5, 12.5, 2.0)], (12.5, 13.0), 13.0)
    assert Clock(CPU).resolve(window) is window


def test_on_a_cpu_nothing_asks_for_a_gpu(monkeypatch):
    def refuse(*arguments: object) -> None:
        raise AssertionError("a GPU was asked for")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    monkeypatch.setattr(torch.cuda, "Event", refuse)
    clock = Clock(CPU)
    began = clock.begin()
    clock.resolve(RankWindow(began, [(FORWARD, clock.mark(), clock.mark(), 0.0)], (began, began), began))


# A device of its own


class Device:
    """A host and a stream, each with its time in seconds; the stream's events are a thousand seconds off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.stream = 50.0, 50.0
        self.synchronised = 0
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(time, "perf_counter", lambda: self.host)

    def synchronize(self) -> None:
        self.synchronised += 1
        self.host = max(self.host, self.stream)

    def compute(self, seconds: float) -> None:
        self.stream = max(self.host, self.stream) + seconds
        self.host += 0.001  # to launch it


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at = 1000.0 + max(self.device.host, self.device.stream)

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at - 1000.0)

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.at - self.at)


@pytest.fixture
def device(monkeypatch) -> Device:
    return Device(monkeypatch)


def test_events_are_told_in_the_host_s_seconds_and_only_read_at_the_end(device):
    clock = Clock(GPU)
    began = clock.begin()
    start = clock.mark()
    device.compute(2.0)
    end = clock.mark()
    assert device.host == pytest.approx(50.001)  # the host did not wait
    window = clock.resolve(RankWindow(began, [(FORWARD, start, end, 0.0)], (50.001, 50.001), 50.001))
    assert device.synchronised == 1
    ((_, *times),) = window.timed
    assert times == pytest.approx([50.0, 52.0, 0.0])
    assert (window.began, *window.drain, window.ended) == pytest.approx((50.0, 52.0, 52.0, 52.0))


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
    window = clock.resolve(
        RankWindow(
            began,
            [
                (FORWARD, marks[0], marks[1], 0.0),
                (RECEIVE, waiting, 53.0, 53.0 - waiting),
                (BACKWARD, marks[2], marks[3], 0.0),
                (SEND, sent, sent + 0.5, 0.5),  # in the shadow of B: no wait at all
            ],
            (sent + 0.5, sent + 0.5),
            sent + 0.5,
        )
    )
    assert [times for _, *times in window.timed] == [
        pytest.approx(times)
        for times in ([50.0, 52.0, 0.0], [52.0, 53.0, 1.0], [53.0, 54.0, 0.0], [54.0, 54.0, 0.0])
    ]
    assert window.waited == pytest.approx(1.0)
    assert window.drain == pytest.approx((54.0, 54.0))
