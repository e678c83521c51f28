"""SIGTERM and SIGUSR1: save at the end of this window, and stop or go on.

All ranks have to act at the same window, and none may wait for another to find out. A rank that was asked
says so in the run's store. The rank of the first stage looks there after each window, and decides for the end
of the next one; every other rank looks for its decision after each window, too. It finds it in time: it
cannot finish a window that the first stage has not begun, and that begins only after it has decided.

torchrun kills its ranks 30 seconds after it has passed SIGTERM on. A window that would go on for longer ends
early, then, with a batch that no rank has begun: see Engine. Its end is decided in the same way, batch by
batch; once it is known how long a batch takes, they look about twice a second.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from pipetrain.seal import SealedStore

Asked = Literal["", "save", "stop"]
ORDER: list[Asked] = ["", "save", "stop"]  # each is more than those before it
SIGNALS: dict[int, Asked] = {signal.SIGTERM: "stop", signal.SIGUSR1: "save"}
_SENTENCES = {
    "stop": "saving when the pipeline is drained, then stopping",
    "save": "saving at the end of this window, then going on",
}
LOOK_S = 0.5  # between two looks within a window
MOST_LEFT_S = 10.0  # of a window that is still run to its end before a stop


class Asking:
    """What signals ask of a run, agreed on by all of its ranks. `first`: the rank of the first stage."""

    def __init__(self, store: SealedStore | None, rank: int, first: int) -> None:
        self._store = store
        self._leads = rank == first
        self._rank = rank
        self._asked: Asked = ""
        self._told: tuple[int, Asked] | None = None
        self._windows = 0
        self._served = 0
        self._decided: tuple[int, Asked] | None = None
        self._every = 1
        self._batches = 0
        self._began = 0.0
        self.ended = False
        """Whether a window was ended early: nothing but the save comes after it."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals while the block runs."""
        before = {number: signal.signal(number, self._take) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._asked = max(self._asked, SIGNALS[number], key=ORDER.index)
        said = f"pipetrain: rank {self._rank} got {signal.Signals(number).name}: {_SENTENCES[self._asked]}\n"
        os.write(2, said.encode())

    def begin_window(self, batches: int, batch_s: float | None = None) -> None:
        """Start a window of so many batches, which take about `batch_s` seconds each, if that is known.

        All ranks must give the same numbers.
        """
        self._batches, self._began = batches, time.monotonic()
        self._every = 1 if batch_s is None else max(1, int(LOOK_S / max(batch_s, 1e-6)))

    def ends_window(self, batches: int, begun: int) -> bool:
        """Say whether the window ends after so many batches; see runtime.engine.Ends."""
        if batches % self._every or not self._decides_end(batches, begun):
            return False
        self.ended = True
        return True

    def _decides_end(self, batches: int, begun: int) -> bool:
        store, key = self._store, f"ended/{self._windows}"
        if store is None:
            return self._asked == "stop" and self._goes_on_for_long(batches, begun)
        self._tell(store)
        if not self._leads:
            return store.check(key) and store.get(key) == str(batches)
        if self._asked_by_any(store) != "stop" or not self._goes_on_for_long(batches, begun):
            return False
        _say(store, key, str(batches))
        return True

    def _goes_on_for_long(self, batches: int, begun: int) -> bool:
        """Whether a window of which `begun` batches have begun lasts for long after so many batches."""
        batch_s = (time.monotonic() - self._began) / begun
        return batch_s * (self._batches - batches) > MOST_LEFT_S

    def after_window(self) -> Asked:
        """Say what all ranks do now. To be called by every rank after each window."""
        self._windows += 1
        if self.ended:
            return "stop"
        if self._store is None:
            asked, self._asked = self._asked, ""
            return asked
        self._tell(self._store)
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
            self._asked = ""  # otherwise what was asked meanwhile is asked again
        return done

    def _tell(self, store: SealedStore) -> None:
        if self._asked and self._told != (self._served, self._asked):
            self._told = self._served, self._asked
            store.set(f"asked/{self._served}", self._asked)

    def _asked_by_any(self, store: SealedStore) -> Asked:
        key = f"asked/{self._served}"
        return _asked(store.get(key)) if store.check(key) else ""

    def _decide(self, store: SealedStore) -> None:
        if asked := self._asked_by_any(store):
            self._decided = self._windows + 1, asked
            _say(store, f"decided/{self._served}", f"{self._windows + 1} {asked}")


def _asked(word: str) -> Asked:
    return ORDER[ORDER.index(word)]  # type: ignore[arg-type]


def _say(store: SealedStore, key: str, text: str) -> None:
    store.set(key, text)
    store.get(key)  # answered only when it is there, for whoever looks after us
