"""SIGTERM and SIGUSR1: save at the end of a window, then stop or go on.

All ranks must act at the same window, without waiting for each other. A rank that gets a signal writes it to
the run's store. After each window, the rank of the first stage reads the store and decides for the end of the
next window; the other ranks read its decision after each window. They see it in time, because they cannot
finish a window before the first stage has begun it, and the first stage decides before that.

torchrun kills its ranks 30 seconds after it has forwarded SIGTERM. A window with more than MOST_LEFT_S left
therefore ends early, at a batch that no rank has begun (see Engine). This is decided in the same way, batch
by batch; once the time of a batch is known, the ranks check about every LOOK_S seconds.

A stop must not depend on the main thread, which may compile for a minute, or on the other ranks. Before a
rank's first update there is nothing to save, so SIGTERM ends it at once. Later it leaves, and says what is
saved, MARGIN_S before it would be killed, unless the pipeline has been drained.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import Literal

from pipetrain.ending import TERMINATED, hearing, leave, terminate
from pipetrain.seal import SealedStore

Asked = Literal["", "save", "stop"]
ORDER: list[Asked] = ["", "save", "stop"]  # by rising priority
SIGNALS: dict[int, Asked] = {signal.SIGTERM: "stop", signal.SIGUSR1: "save"}
_SENTENCES = {
    "stop": "saving when the pipeline is drained, then stopping",
    "save": "saving at the end of this window, then going on",
}
LOOK_S = 0.5  # between two checks within a window
MOST_LEFT_S = 10.0  # a window with less time left runs to its end before a stop
LIMIT, LIMIT_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30.0  # seconds after which torchrun kills, and its default
MARGIN_S = 5.0  # of these for leaving
PATIENCE_S = 20.0  # after which a rank says that it is not through


class Asking:
    """The signals' requests, agreed on by all ranks. `first`: the rank of the first stage."""

    def __init__(self, store: SealedStore | None, rank: int, first: int) -> None:
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
        self.stopping = False  # whether this rank got SIGTERM
        self._updated = True
        self._drained = Event()

    @contextmanager
    def listening(self, saved: Callable[[], str]) -> Iterator[None]:
        """Handle the signals while the block trains. `saved`: says which checkpoint there is."""
        self._updated = False
        before = {number: signal.signal(number, self._take) for number in SIGNALS}
        try:
            with hearing(lambda number: self._hear(number, saved)):
                yield
        finally:
            self.drained()
            for number, handler in before.items():
                signal.signal(number, handler)

    def updated(self) -> None:
        """Note that this rank has made an update, which is lost if it is not saved."""
        self._updated = True

    def drained(self) -> None:
        """Note that nothing is under way between the ranks any more: what is left is to save and to end."""
        self._drained.set()

    def _hear(self, number: int, saved: Callable[[], str]) -> None:
        """Say what a signal leads to; after SIGTERM end if the main thread does not. In another thread."""
        if not self._updated:
            end_at_once(self._rank, number)
        if number in SIGNALS and not self._drained.is_set():
            name = signal.Signals(number).name
            _say(f"rank {self._rank} got {name}: {_SENTENCES[SIGNALS[number]]}")
            if SIGNALS[number] == "stop":
                self._outlast(_limit_s(), saved)

    def _outlast(self, limit_s: float, saved: Callable[[], str]) -> None:
        """Wait until the pipeline is drained; end the process where it is not in time."""
        if self._drained.wait(min(PATIENCE_S, limit_s)):
            return
        if limit_s > PATIENCE_S:
            _say(
                f"rank {self._rank} still runs what was under way at SIGTERM, {PATIENCE_S:g} s ago; it "
                f"leaves without saving after {limit_s:g} s"
            )
            if self._drained.wait(limit_s - PATIENCE_S):
                return
        terminate(
            f"rank {self._rank} leaves without saving: what was under way at SIGTERM, {limit_s:g} s ago, has "
            f"not ended; {saved()}"
        )

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._asked = max(self._asked, SIGNALS[number], key=ORDER.index)
        self.stopping |= SIGNALS[number] == "stop"

    def begin_window(self, batches: int, batch_s: float | None = None) -> None:
        """Start a window of `batches` batches of about `batch_s` seconds; the same numbers on all ranks."""
        self._batches, self._began = batches, time.monotonic()
        self._every = 1 if batch_s is None else max(1, int(LOOK_S / max(batch_s, 1e-6)))

    def ends_window(self, batches: int, begun: int) -> bool:
        """Return whether the window ends after `batches` batches; see runtime.engine.Ends."""
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
            return store.check(key) and store.get(key) == str(batches)
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
        elif not self._leads and self._store.check(f"decided/{self._served}"):
            window, word = self._store.get(f"decided/{self._served}").split()
            self._decided = int(window), _asked(word)
        if self._decided is None or self._decided[0] != self._windows:
            return ""
        done, self._decided = self._decided[1], None
        self._served += 1
        if ORDER.index(done) >= ORDER.index(self._asked):
            self._asked = ""  # a higher request made meanwhile is kept, and told again
        return done

    def _request(self, store: SealedStore) -> None:
        if self._asked and self._requested != (self._served, self._asked):
            self._requested = self._served, self._asked
            store.set(f"asked/{self._served}", self._asked)

    def _asked_by_any(self, store: SealedStore) -> Asked:
        key = f"asked/{self._served}"
        return _asked(store.get(key)) if store.check(key) else ""

    def _decide(self, store: SealedStore) -> None:
        if asked := self._asked_by_any(store):
            self._decided = self._windows + 1, asked
            _publish(store, f"decided/{self._served}", f"{self._windows + 1} {asked}")


def end_at_once(rank: int, number: int) -> None:
    """End a process that has no update to save, on SIGTERM."""
    if number == signal.SIGTERM:
        terminate(f"rank {rank} got SIGTERM with no update to save, so it ends now")


def end_in_start(rank: int, number: int) -> None:
    """End a process that does not train yet, on SIGTERM.

    Rank 0 speaks for all: where it refuses a run, torchrun ends the others so.
    """
    if number == signal.SIGTERM and rank:
        leave(TERMINATED)
    end_at_once(rank, number)


def _say(sentence: str) -> None:
    os.write(2, f"pipetrain: {sentence}\n".encode())


def _limit_s() -> float:
    """Return after how many seconds a rank leaves, so that torchrun need not kill it."""
    try:
        limit_s = float(os.environ.get(LIMIT, LIMIT_S))
    except ValueError:
        limit_s = LIMIT_S
    return max(0.0, limit_s - MARGIN_S)


def _asked(word: str) -> Asked:
    return ORDER[ORDER.index(word)]  # type: ignore[arg-type]


def _publish(store: SealedStore, key: str, text: str) -> None:
    store.set(key, text)
    store.get(key)  # returns only when the store has the value, so later checks of other ranks see it
