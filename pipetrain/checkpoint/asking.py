"""SIGTERM, Ctrl-C and SIGUSR1: save at the end of a window, then stop or go on.

All ranks must act at the same window, without waiting for each other. A rank that gets a signal writes it to
the run's store. After each window, the rank of the first stage reads the store and decides for the end of the
next window; the other ranks read its decision after each window. They see it in time, because they cannot
finish a window before the first stage has begun it, and the first stage decides before that.

torchrun kills its ranks 30 seconds after it has forwarded SIGTERM. A window with more than MOST_LEFT_S left
therefore ends early, at a batch that no rank has begun (see runtime.order). This is decided in the same way,
batch by batch; once the time of a batch is known, the ranks check about every LOOK_S seconds.

A stop must not depend on the main thread, which may compile for a minute, or on the other ranks. Before a
rank's first update there is nothing to save, so SIGTERM ends it at once. Later it leaves, and says what is
saved, MARGIN_S before it would be killed, unless the pipeline has been drained.

Ctrl-C is as SIGTERM, and a second one ends the rank at once; torchrun passes that on as SIGTERM. No handler
raises an exception while a run trains, as it might land in a finalizer, which cannot pass it on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread, Timer
from types import FrameType
from typing import Literal

from torch.distributed.distributed_c10d import Store

from pipetrain.ending import (
    ACT_S,
    INTERRUPTED,
    TERMINATED,
    Interrupted,
    hearing,
    leave,
    name_of,
    say,
    terminate,
)

Asked = Literal["", "save", "stop"]
ORDER: list[Asked] = ["", "save", "stop"]  # by rising priority
SIGNALS: dict[int, Asked] = {signal.SIGTERM: "stop", signal.SIGINT: "stop", signal.SIGUSR1: "save"}
_SENTENCES: dict[int, str] = {
    signal.SIGTERM: "saving when the pipeline is drained, then stopping",
    signal.SIGINT: "saving when the pipeline is drained, then stopping; Ctrl-C again ends it at once",
    signal.SIGUSR1: "saving at the end of this window, then going on",
}
LOOK_S = 0.5  # between two checks within a window
MOST_LEFT_S = 10.0  # a window with less time left runs to its end before a stop
LIMIT, LIMIT_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30.0  # seconds after which torchrun kills, and its default
MARGIN_S = 5.0  # of these for leaving
PATIENCE_S = 20.0  # after which a rank says that it is not through


class Asking:
    """The signals' requests, agreed on by all ranks. `first`: the rank of the first stage."""

    def __init__(self, store: Store | None, rank: int, first: int) -> None:
        self._store = store
        self._leads = rank == first
        self._rank = rank
        self._asked: Asked = ""
        self._requested: tuple[int, Asked] | None = None
        self._windows = 0
        self._served = 0
        self._decided: tuple[int, Asked] | None = None
        self._every = 1
        self._batches = 0
        self._began = 0.0
        self.ended = False  # whether a window was ended early: the run then saves and stops
        self.stopped_by = 0  # the signal that asked this rank to stop, if one has
        self._updated = True
        self._drained = Event()

    @contextmanager
    def listening(self, saved: Callable[[], str]) -> Iterator[None]:
        """Handle the signals while the block trains. `saved`: says which checkpoint there is."""
        self._updated = False
        before = {number: signal.getsignal(number) for number in SIGNALS}
        handled = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in handled:
            signal.signal(number, self._take)
        try:
            with hearing(lambda number: self._hear(number, saved)):
                try:
                    yield
                finally:
                    self.drained()
            trained.set()
        finally:
            for number in handled:
                signal.signal(number, before[number])

    def updated(self) -> None:
        """Note that this rank has made an update, which is lost if it is not saved."""
        self._updated = True

    def drained(self) -> None:
        """Note that nothing is under way between the ranks any more: what is left is to save and to end."""
        self._drained.set()

    def _hear(self, number: int, saved: Callable[[], str]) -> None:
        """Say what a signal leads to; end the process where nothing is to be saved. In another thread."""
        if number not in SIGNALS:
            return
        again = interrupted.again(number)
        if (again and SIGNALS[number] == "stop") or (number == signal.SIGINT and not self._updated):
            end_interrupted(self._rank, f"; {saved()}")
        if not self._updated:
            end_at_once(self._rank, number)
        if not self._drained.is_set():
            say(f"rank {self._rank} got {name_of(number)}: {_SENTENCES[number]}")
            if SIGNALS[number] == "stop":
                outlasts = Thread(target=self._outlast, args=(number, _limit_s(), saved), daemon=True)
                outlasts.start()

    def _outlast(self, number: int, limit_s: float, saved: Callable[[], str]) -> None:
        """Wait until the pipeline is drained; end the process where it is not in time."""
        if self._drained.wait(min(PATIENCE_S, limit_s)):
            return
        if limit_s > PATIENCE_S:
            say(
                f"rank {self._rank} still runs what was under way at {name_of(number)}, {PATIENCE_S:g} s "
                f"ago; it leaves without saving after {limit_s:g} s"
            )
            if self._drained.wait(limit_s - PATIENCE_S):
                return
        terminate(
            f"rank {self._rank} leaves without saving: what was under way at {name_of(number)}, "
            f"{limit_s:g} s ago, has not ended; {saved()}",
            status_after(number),
        )

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._asked = max(self._asked, SIGNALS[number], key=ORDER.index)
        if SIGNALS[number] == "stop":
            self.stopped_by = self.stopped_by or number

    def begin_window(self, batches: int, batch_s: float | None = None) -> None:
        """Start a window of `batches` batches of about `batch_s` seconds; the same numbers on all ranks."""
        self._batches, self._began = batches, time.monotonic()
        self._every = 1 if batch_s is None else max(1, int(LOOK_S / max(batch_s, 1e-6)))

    def ends_window(self, batches: int, begun: int) -> bool:
        """Return whether the window ends after `batches` batches; see runtime.order.Ends."""
        if batches % self._every or not self._decides_end(batches, begun):
            return False
        self.ended = True
        return True

    def _decides_end(self, batches: int, begun: int) -> bool:
        store, key = self._store, f"ended/{self._windows}"
        if store is None:
            return self._asked == "stop" and self._goes_on_for_long(batches, begun)
        self._request(store)
        if not self._leads:
            return store.check([key]) and int(store.get(key)) == batches
        if self._asked_by_any(store) != "stop" or not self._goes_on_for_long(batches, begun):
            return False
        _publish(store, key, str(batches))
        return True

    def _goes_on_for_long(self, batches: int, begun: int) -> bool:
        """Return whether over MOST_LEFT_S remain after `batches` batches, `begun` of which have begun."""
        batch_s = (time.monotonic() - self._began) / begun
        return batch_s * (self._batches - batches) > MOST_LEFT_S

    def after_window(self) -> Asked:
        """Return what all ranks do now; every rank must call it after each window."""
        self._windows += 1
        if self.ended:
            return "stop"
        if self._store is None:
            asked, self._asked = self._asked, ""
            return asked
        self._request(self._store)
        if self._leads and self._decided is None:
            self._decide(self._store)
        elif not self._leads and self._store.check([f"decided/{self._served}"]):
            window, word = self._store.get(f"decided/{self._served}").decode().split()
            self._decided = int(window), _asked(word)
        if self._decided is None or self._decided[0] != self._windows:
            return ""
        done, self._decided = self._decided[1], None
        self._served += 1
        if ORDER.index(done) >= ORDER.index(self._asked):
            self._asked = ""  # a higher request made meanwhile is kept, and told again
        return done

    def _request(self, store: Store) -> None:
        if self._asked and self._requested != (self._served, self._asked):
            self._requested = self._served, self._asked
            store.set(f"asked/{self._served}", self._asked)

    def _asked_by_any(self, store: Store) -> Asked:
        key = f"asked/{self._served}"
        return _asked(store.get(key).decode()) if store.check([key]) else ""

    def _decide(self, store: Store) -> None:
        if asked := self._asked_by_any(store):
            self._decided = self._windows + 1, asked
            _publish(store, f"decided/{self._served}", f"{self._windows + 1} {asked}")


trained = Event()  # from the end of a training that went well: what is left is to write and to end
interrupted = Interrupted()


@contextmanager
def idle(rank: int) -> Iterator[None]:
    """Handle the signals of a rank of the command line, before it trains and after."""
    handlers: dict[int, Callable[[int, FrameType | None], None]] = {
        signal.SIGTERM: lambda number, frame: None,
        signal.SIGUSR1: lambda number, frame: None,
    }
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        handlers[signal.SIGINT] = _interrupt
    for number, handler in handlers.items():
        signal.signal(number, handler)
    with hearing(lambda number: _hear_idle(rank, number)):
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not trained.is_set():
        raise KeyboardInterrupt


def _hear_idle(rank: int, number: int) -> None:
    """End a rank that does not train, where a signal asks for that. In another thread.

    Rank 0 speaks for all: where it refuses a run, torchrun ends the others so.
    """
    if number == signal.SIGUSR1:
        if not trained.is_set():
            say(f"rank {rank} got SIGUSR1 with no update to save, so it goes on")
    elif interrupted.again(number):
        end_interrupted(rank)
    elif number == signal.SIGINT:
        if not trained.is_set():  # where the main thread is in C++, or the exception landed in a finalizer
            late = Timer(ACT_S, end_interrupted, (rank,))
            late.daemon = True
            late.start()
    elif number == signal.SIGTERM and not trained.is_set():
        if rank:
            leave(TERMINATED)
        end_at_once(rank, number)


def end_at_once(rank: int, number: int) -> None:
    """End a process that has no update to save, on SIGTERM."""
    if number == signal.SIGTERM:
        terminate(f"rank {rank} got SIGTERM with no update to save, so it ends now")


def end_interrupted(rank: int, more: str = "") -> None:
    """End a process at once after Ctrl-C; rank 0 says so, and `more`."""
    if rank:
        leave(INTERRUPTED)
    terminate(f"interrupted{more}", INTERRUPTED)


def status_after(number: int) -> int:
    """Return the status of a process that a signal has ended before all was saved."""
    return INTERRUPTED if number == signal.SIGINT else TERMINATED


def _limit_s() -> float:
    """Return after how many seconds a rank leaves, so that torchrun need not kill it."""
    try:
        limit_s = float(os.environ.get(LIMIT, LIMIT_S))
    except ValueError:
        limit_s = LIMIT_S
    return max(0.0, limit_s - MARGIN_S)


def _asked(word: str) -> Asked:
    return ORDER[ORDER.index(word)]  # type: ignore[arg-type]


def _publish(store: Store, key: str, text: str) -> None:
    store.set(key, text)
    store.get(key)  # returns only when the store has the value, so later checks of other ranks see it
