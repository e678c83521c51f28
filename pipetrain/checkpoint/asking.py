"""SIGTERM and SIGUSR1: save at the end of this window, and stop or go on.

All ranks have to act at the same window, and none may wait for another to find out. A rank that was asked
says so in the run's store. The rank of the first stage looks there after each window, and decides for the end
of the next one; every other rank looks for its decision after each window, too. It finds it in time: it
cannot finish a window that the first stage has not begun, and that begins only after it has decided.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal

from torch.distributed.distributed_c10d import Store

Asked = Literal["", "save", "stop"]
SIGNALS: dict[int, Asked] = {signal.SIGTERM: "stop", signal.SIGUSR1: "save"}
_BY_NAME: dict[str, Asked] = {name: name for name in SIGNALS.values()}
_SENTENCES = {
    "stop": "saving at the end of this window, then stopping",
    "save": "saving at the end of this window, then going on",
}


class Asking:
    """What signals ask of a run, agreed on by all of its ranks. `first`: the rank of the first stage."""

    def __init__(self, store: Store | None, rank: int, first: int) -> None:
        self._store = store
        self._leads = rank == first
        self._rank = rank
        self._asked: Asked = ""
        self._told: tuple[int, Asked] | None = None
        self._windows = 0
        self._served = 0
        self._decided: tuple[int, Asked] | None = None

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
        if SIGNALS[number] > self._asked:  # "stop" is more than "save", and both than nothing
            self._asked = SIGNALS[number]
        said = f"pipetrain: rank {self._rank} got {signal.Signals(number).name}: {_SENTENCES[self._asked]}\n"
        os.write(2, said.encode())

    def after_window(self) -> Asked:
        """Say what all ranks do now. To be called by every rank after each window."""
        self._windows += 1
        if self._store is None:
            asked, self._asked = self._asked, ""
            return asked
        if self._asked and self._told != (self._served, self._asked):
            self._told = self._served, self._asked
            self._store.set(f"asked/{self._served}", self._asked)
        if self._leads and self._decided is None:
            self._decide(self._store)
        elif not self._leads and self._store.check([f"decided/{self._served}"]):
            window, word = self._store.get(f"decided/{self._served}").decode().split()
            self._decided = int(window), _BY_NAME[word]
        if self._decided is None or self._decided[0] != self._windows:
            return ""
        done, self._decided = self._decided[1], None
        self._served += 1
        if done >= self._asked:
            self._asked = ""  # otherwise what was asked meanwhile is asked again
        return done

    def _decide(self, store: Store) -> None:
        if store.check([f"asked/{self._served}"]):
            asked = _BY_NAME[store.get(f"asked/{self._served}").decode()]
            self._decided = self._windows + 1, asked
            key = f"decided/{self._served}"
            store.set(key, f"{self._windows + 1} {asked}")
            store.get(key)  # answered only when it is there, for whoever looks after us
