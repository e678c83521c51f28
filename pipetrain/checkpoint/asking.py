"""SIGTERM, Ctrl-C and SIGUSR1: save at the end of a window, then stop or go on.

A signal is acted on by all ranks after the same window: there they tell each other what they were asked for.

torchrun kills its ranks 30 seconds after it has forwarded SIGTERM. A window with more than MOST_LEFT_S left
therefore ends early, at a batch that no rank has begun (see runtime.order). The rank of the first stage
decides that, by the run's store, as it is ahead of the others; once the time of a batch is known, the ranks
look there about every LOOK_S seconds.

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
from threading import Event, Thread
from types import FrameType
from typing import Literal

from torch.distributed.distributed_c10d import Store

from pipetrain.ending import INTERRUPTED, TERMINATED, Interrupted, hearing, leave, name_of, say, terminate
from pipetrain.runtime.ranks import Ranks

Asked = Literal["", "save", "stop"]
ORDER: list[Asked] = ["", "save", "stop"]  # by rising priority
SIGNALS: dict[int, Asked] = {signal.SIGTERM: "stop", signal.SIGINT: "stop", signal.SIGUSR1: "save"}
_SENTENCES: dict[int, str] = {
    signal.SIGTERM: "saving when the pipeline is drained, then stopping",
    signal.SIGINT: "saving when the pipeline is drained, then stopping; Ctrl-C again ends it at once",
    signal.SIGUSR1: "saving at the end of this window, then going on",
}
LOOK_S = 0.5  # between two looks within a window
MOST_LEFT_S = 10.0  # a window with less time left runs to its end before a stop
LIMIT, LIMIT_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30.0  # seconds after which torchrun kills, and its default
MARGIN_S = 5.0  # of these for leaving


class Asking:
    """The signals' requests, agreed on by all ranks. `first`: the rank of the first stage.

    `ended`: whether a window was ended early: the run then saves and stops. `stopped_by`: the signal that
    asked this rank to stop, if one has.
    """

    def __init__(self, ranks: Ranks, store: Store | None, first: int) -> None:
        self._ranks = ranks
        self._rank = ranks.world.rank
        self._store = store
        self._leads = self._rank == first
        self._asked: Asked = ""
        self._windows = 0
        self._every = 1
        self._batches = 0
        self._began = 0.0
        self.ended = False
        self.stopped_by = 0
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
        if not self._updated and number == signal.SIGTERM:
            end_at_once(self._rank)
        if not self._drained.is_set():
            say(f"rank {self._rank} got {name_of(number)}: {_SENTENCES[number]}")
            if SIGNALS[number] == "stop":
                outlasts = Thread(target=self._outlast, args=(number, _limit_s(), saved), daemon=True)
                outlasts.start()

    def _outlast(self, number: int, limit_s: float, saved: Callable[[], str]) -> None:
        if not self._drained.wait(limit_s):
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
        if batches % self._every:
            return False
        store, key, asked = self._store, f"window {self._windows} ends", self._asked == "stop"
        left_s = (time.monotonic() - self._began) / begun * (self._batches - batches)
        if store is None:
            self.ended = asked and left_s > MOST_LEFT_S
            return self.ended
        if asked:
            store.set("a stop is asked for", "")
        if self._leads and left_s > MOST_LEFT_S and store.check(["a stop is asked for"]):
            store.set(key, str(batches))
        # The first stage's rank goes on only when the store has the value, so later looks of others see it.
        self.ended = store.check([key]) and int(store.get(key)) == batches
        return self.ended

    def after_window(self) -> Asked:
        """Return what all ranks do now; every rank must call it after each window."""
        self._windows += 1
        if self.ended:
            return "stop"
        asked, self._asked = self._asked, ""
        return ORDER[self._ranks.most("a signal", ORDER.index(asked))]


trained = Event()  # from the end of a training that went well: what is left is to write and to end
interrupted = Interrupted()


@contextmanager
def idle(rank: int) -> Iterator[None]:
    """Handle the signals of a rank of the command line, before it trains and after."""
    for number in SIGNALS:
        if number != signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)
    with hearing(lambda number: _hear_idle(rank, number)):
        yield


def _hear_idle(rank: int, number: int) -> None:
    """End a rank that does not train, where a signal asks for that. In another thread.

    Rank 0 speaks for all: where it refuses a run, torchrun ends the others so.
    """
    if number != signal.SIGUSR1 and interrupted.again(number):
        end_interrupted(rank)
    elif trained.is_set() or number not in SIGNALS:  # the trackers may take long to close
        pass
    elif number == signal.SIGUSR1:
        say(f"rank {rank} got SIGUSR1 with no update to save, so it goes on")
    elif number == signal.SIGINT:
        end_interrupted(rank)
    elif rank:
        leave(TERMINATED)
    else:
        end_at_once(rank)


def end_at_once(rank: int) -> None:
    """End a process that has no update to save, on SIGTERM."""
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
    return max(0.0, float(os.environ.get(LIMIT, LIMIT_S)) - MARGIN_S)
