"""What looks after transfers that never end. Those that do: whole/test_worlds.py."""

from __future__ import annotations

import time
from threading import Event
from types import SimpleNamespace

import pytest

from pipetrain.runtime import watch as watching
from pipetrain.runtime.watch import Deadline

TIMEOUT_S = 60.0


class Stream:
    """A device's stream that has passed some messages, and the deadline of all of them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.passed: set[str] = set()
        self.broken, self.aborted = False, Event()
        self.deadline = Deadline(TIMEOUT_S, self.aborted.set, lambda: self.broken)

    def add(self, *names: str) -> None:
        for name in names:
            self.deadline.add(
                lambda name=name: name in self.passed, lambda why, name=name: OSError(name, why)
            )

    def after(self, seconds: float, *passed: str) -> tuple[str, ...]:
        """Return the message that is named, and why, after so many seconds, when the stream passed some."""
        self.now += seconds
        self.passed.update(passed)
        self.deadline._look(self.now)
        try:
            self.deadline.check()
        except OSError as error:
            return error.args
        return ()


@pytest.fixture
def stream(monkeypatch) -> Stream:
    """A stream at which nobody looks by itself."""
    stream = Stream()
    monkeypatch.setattr(watching, "Thread", lambda **what: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: stream.now))
    return stream


def test_the_first_message_that_does_not_come_is_named_and_each_has_its_time(stream):
    """The host may have run far ahead; and time without messages, as between two windows, does not count."""
    stream.add("0")
    assert stream.after(0, "0") == ()
    stream.now += 10 * TIMEOUT_S
    stream.add(*"abcdef")
    assert [stream.after(TIMEOUT_S - 1, *names) for names in ("a", "c", "de", "f", "")] == [()] * 5
    assert stream.after(2) == ("b", "")


def test_a_broken_connection_is_said_at_once_if_a_message_waits_for_it(stream):
    """At the end, when another rank has left, none does."""
    stream.add("a", "b")
    stream.broken = True
    assert stream.after(0, "a", "b") == ()
    stream.add("c")
    assert stream.after(0) == ("c", "the connection has failed")


@pytest.fixture
def seen(monkeypatch) -> Stream:
    """A stream at which a thread looks, at short intervals."""
    stream = Stream()
    clock = SimpleNamespace(monotonic=lambda: stream.now, sleep=lambda seconds: time.sleep(0.001))
    monkeypatch.setattr(watching, "time", clock)
    return stream


def test_all_is_ended_and_the_host_says_why(seen):
    seen.deadline.add(lambda: bool(1 / 0), lambda why: OSError(why))  # polling may fail too
    assert seen.aborted.wait(20)
    with pytest.raises(ZeroDivisionError):
        seen.deadline.check()


def test_a_host_that_does_not_come_to_raise_the_error_is_ended_with_a_sentence(monkeypatch, capfd, seen):
    ended: list[int] = []
    monkeypatch.setattr(watching.os, "_exit", ended.append)
    monkeypatch.setattr(watching, "RAISED_S", 0.05)
    seen.broken = True
    seen.add("a")
    seen.deadline._thread.join(20)
    assert ended == [1]
    assert capfd.readouterr().err == "pipetrain: [Errno a] the connection has failed\n"


def test_the_thread_ends_with_its_channel(seen):
    seen.add("a")
    seen.deadline.close()
    seen.deadline._thread.join(20)
    assert not seen.deadline._thread.is_alive()
    assert not seen.aborted.is_set()
