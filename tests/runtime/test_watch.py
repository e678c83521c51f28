from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import wait
from datetime import timedelta
from threading import Event
from typing import Any

import pytest

from pipetrain.runtime import watch as watching
from pipetrain.runtime.watch import Deadline, Watch


class Work:
    """A transfer's work that ends when it is told to."""

    def __init__(self) -> None:
        self.ended = Event()
        self.error: Exception | None = None

    def wait(self, timeout: timedelta) -> None:
        assert self.ended.wait(20)
        if self.error:
            raise self.error


def ended(*works: Work) -> list[Any]:
    for work in works:
        work.ended.set()
    return [*works]


def test_a_transfer_is_done_when_all_its_works_are_and_edges_do_not_wait_for_each_other():
    watch, works = Watch([(0, 1), (1, 0)]), [Work(), Work()]
    done, second = watch.add((0, 1), works), watch.add((0, 1), ended(Work()))
    other = watch.add((1, 0), ended(Work()))
    other.result(20)
    ended(works[0])
    assert wait([done, second], 0.05).done == set()
    ended(works[1])
    second.result(20)
    assert done.done()
    watch.close()


def test_a_failure_is_handed_on_and_the_thread_goes_on():
    watch, bad = Watch([(0, 1)]), Work()
    bad.error = RuntimeError("connection closed by peer")
    failed, good = watch.add((0, 1), ended(bad)), watch.add((0, 1), ended(Work()))
    good.result(20)
    assert str(failed.exception()) == "connection closed by peer"
    watch.close()


# A deadline


class Time:
    """Stands in for the module `time`: its seconds go by as the test says, and are counted in looks."""

    def __init__(self) -> None:
        self.now = 100.0
        self._looks = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(0.001)
        self._looks += 1

    def go_by(self, seconds: float = 0.0) -> None:
        """Let seconds go by, and the thread look at what there is then."""
        self.now += seconds
        seen = self._looks
        end = time.monotonic() + 20
        while self._looks < seen + 2:
            assert time.monotonic() < end
            time.sleep(0.001)


class Stream:
    """A device's stream that has passed some messages, and the deadline of all of them."""

    TIMEOUT_S = 60.0

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.broken, self.aborted, self.aborts = False, Event(), 0
        self.deadline = Deadline(self.TIMEOUT_S, self._abort, lambda: self.broken)
        STREAMS.append(self)

    def end(self) -> None:
        """End the thread, which would go by the next test's clock, and in the end, end this process."""
        self.deadline._raised.set()
        self.deadline._error = self.deadline._error or OSError("the test is over")
        if thread := self.deadline._thread:
            thread.join(20)
            assert not thread.is_alive()

    def _abort(self) -> None:
        self.aborts += 1
        self.aborted.set()

    def add(self, *names: str) -> None:
        for name in names:
            self.deadline.add(
                lambda name=name: name in self.passed, lambda why, name=name: OSError(name, why)
            )

    def error(self) -> tuple[str, str]:
        """Wait for the end of all transfers; return the message that is named, and why."""
        assert self.aborted.wait(20)
        with pytest.raises(OSError) as raised:  # noqa: PT011
            self.deadline.check()
        return raised.value.args


STREAMS: list[Stream] = []


@pytest.fixture
def clock(monkeypatch) -> Iterator[Time]:
    monkeypatch.setattr(watching, "time", clock := Time())
    yield clock
    while STREAMS:
        STREAMS.pop().end()


def test_the_first_message_that_does_not_come_is_named_and_all_is_ended_once(clock):
    stream = Stream()
    stream.add("a", "b", "c")
    stream.passed = {"a", "c"}
    clock.go_by()
    clock.go_by(stream.TIMEOUT_S - 1)
    stream.deadline.check()
    clock.now += 2
    assert stream.error() == ("b", "")
    stream.passed.add("b")  # what was aborted counts as passed
    stream.add("e")
    assert stream.error() == ("b", "")
    assert stream.aborts == 1


def test_a_stream_that_goes_on_has_time_for_each_message(clock):
    """Its host may have run far ahead: all of them together take longer."""
    stream = Stream()
    names = "abcdef"
    stream.add(*names)
    for name in names:
        clock.go_by(stream.TIMEOUT_S - 1)
        stream.passed.add(name)
        clock.go_by()
    stream.deadline.check()
    assert not stream.aborts


def test_time_without_messages_does_not_count(clock):
    """Such as an evaluation on the host between two windows."""
    stream = Stream()
    stream.add("a")
    stream.passed.add("a")
    clock.go_by()
    clock.now += 10 * stream.TIMEOUT_S
    stream.add("b")
    clock.go_by()
    stream.deadline.check()
    assert not stream.aborts


def test_a_broken_connection_is_said_at_once_if_a_message_waits_for_it(clock):
    stream = Stream()
    stream.add("a", "b")
    stream.passed.add("a")
    clock.go_by()
    stream.broken = True
    assert stream.error() == ("b", "the connection has failed")
    assert stream.aborts == 1


def test_a_connection_that_nobody_waits_for_may_break(clock):
    """As at the end, when another rank has left."""
    stream = Stream()
    stream.add("a")
    stream.passed.add("a")
    clock.go_by()
    stream.broken = True
    clock.go_by(1.0)
    stream.deadline.check()
    assert not stream.aborts


def test_a_host_that_does_not_come_to_raise_the_error_is_ended_with_a_sentence(clock, monkeypatch, capfd):
    ended: list[int] = []
    monkeypatch.setattr(watching.os, "_exit", ended.append)
    monkeypatch.setattr(watching, "RAISED_S", 0.05)
    stream = Stream()
    stream.add("a")
    stream.broken = True
    thread = stream.deadline._thread
    thread.join(20)
    assert ended == [1]
    assert capfd.readouterr().err == "pipetrain: [Errno a] the connection has failed\n"


def test_polling_that_fails_is_an_error_too(clock):
    stream = Stream()
    stream.deadline.add(lambda: bool(1 / 0), lambda why: OSError(why))
    assert stream.aborted.wait(20)
    with pytest.raises(ZeroDivisionError):
        stream.deadline.check()
