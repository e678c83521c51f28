"""What looks after transfers that never end. Those that do: whole/test_worlds.py."""

from __future__ import annotations

import time
from threading import Event, current_thread, main_thread
from types import SimpleNamespace

import pytest

from pipetrain.runtime.comm import transfer_watch as watching
from pipetrain.runtime.comm.transfer_watch import Deadline

TIMEOUT_S = 60.0


class Mark:
    """An event of a device, which the host alone asks. `wait`: what passes while the host waits for it."""

    def __init__(self, stream: Stream, name: str) -> None:
        self.stream, self.name = stream, name

    def query(self) -> bool:
        assert current_thread() is main_thread()
        return self.name in self.stream.passed

    def synchronize(self) -> None:
        assert current_thread() is main_thread()
        self.stream.waited.append(self.name)
        self.stream.wait()


class Stream:
    """A device's stream that has passed some messages, and the deadline of all of them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.passed: set[str] = set()
        self.waited: list[str] = []
        self.wait = lambda: None  # what happens while the host waits for the device
        self.broken, self.ended = False, Event()
        self.deadline = Deadline(TIMEOUT_S, self.ended.set, lambda: self.broken)

    def act(self, *names: str) -> None:
        """Let the host launch an action that waits for messages."""
        self.deadline.begin()
        for name in names:
            self.deadline.add(lambda why, name=name: OSError(name, why))
            self.deadline.mark(Mark(self, name))

    def after(self, seconds: float, *passed: str) -> tuple[str, ...]:
        """Return the message that is named, and why, after so many seconds, when the stream passed some."""
        self.now += seconds
        self.passed.update(passed)
        self.deadline._check_time(self.now)
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


def test_a_host_that_is_held_up_in_an_action_names_the_first_message_that_has_not_come(stream):
    """The host may have run far ahead; and what it does between two actions does not count."""
    stream.act("0")
    assert stream.after(10 * TIMEOUT_S) == ()
    stream.passed.add("0")
    stream.act(*"abc")
    assert stream.after(10 * TIMEOUT_S, "a") == ()
    stream.act("d")
    stream.deadline.begin()
    assert [stream.after(TIMEOUT_S, *names) for names in ("", "c")] == [(), ("b", "")]


def test_each_message_has_its_time_where_the_host_waits_for_all(stream):
    stream.act(*"abc")
    seen = list[object]()
    stream.wait = lambda: seen.append(stream.after(TIMEOUT_S - 1))
    stream.deadline.settle()
    assert (stream.waited, seen) == (["a", "b", "c"], [(), (), ()])
    assert stream.after(10 * TIMEOUT_S) == ()  # nothing is waited for
    stream.act("d", "e")
    stream.wait = lambda: stream.after(TIMEOUT_S + 1)
    with pytest.raises(OSError, match="d"):
        stream.deadline.settle()


def test_what_the_host_waits_for_between_actions_has_a_deadline_too(stream):
    """Such as a loss that somebody reads, or the times of a window."""
    stream.act("a")
    with pytest.raises(OSError, match="a"), stream.deadline.waiting():
        assert stream.after(TIMEOUT_S + 1) == ("a", "")


def test_a_broken_connection_is_said_at_once_if_a_message_waits_for_it(stream):
    """At the end, when another rank has left, none does."""
    stream.act("a", "b")
    stream.broken = True
    stream.wait = lambda: None
    stream.passed |= {"a", "b"}
    stream.act()
    stream.deadline.mark(Mark(stream, "an action without messages"))
    assert stream.after(0) == ()
    stream.act("c")
    assert stream.after(0) == ("c", "the connection has failed")


@pytest.fixture
def seen(monkeypatch) -> Stream:
    """A stream at which a thread looks, at short intervals."""
    stream = Stream()
    clock = SimpleNamespace(monotonic=lambda: stream.now, sleep=lambda seconds: time.sleep(0.001))
    monkeypatch.setattr(watching, "time", clock)
    return stream


def test_all_is_ended_and_the_host_says_why_and_no_thread_asks_the_device(seen):
    seen.act("a")
    seen.deadline.begin()
    seen.now += 2 * TIMEOUT_S
    assert seen.ended.wait(20)
    seen.deadline.fail(OSError("what follows from it"))
    with pytest.raises(OSError, match="a"):
        seen.deadline.check()


@pytest.mark.parametrize("waits", [True, False])
def test_a_host_that_a_device_holds_up_is_ended_with_a_sentence_and_no_other(monkeypatch, capfd, seen, waits):
    ended = Event()
    monkeypatch.setattr(watching.os, "_exit", lambda status: (ended.set(), seen.deadline.close()))
    monkeypatch.setattr(watching, "RAISE_LIMIT_S", 0.05)
    if waits:
        seen.deadline.begin()
    seen.deadline.fail(OSError("rank 0 lost rank 1"))
    assert ended.wait(20 if waits else 0.3) == waits
    assert capfd.readouterr().err == "pipetrain: rank 0 lost rank 1\n" * waits
    seen.deadline.close()


def test_the_thread_ends_with_its_links(seen):
    seen.act("a")
    seen.deadline.close()
    seen.deadline._thread.join(20)
    assert not seen.deadline._thread.is_alive()
    assert not seen.ended.is_set()
