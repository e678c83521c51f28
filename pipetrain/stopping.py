"""SIGTERM and Ctrl-C for a Python program: noted in place of what they do, from when it first asks for them.

A program that never asks is ended by them as any other. The first signal is noted, and so is another SIGTERM.
A second Ctrl-C does what it would have done; torchrun passes that on as SIGTERM.
"""

from __future__ import annotations

import os
import signal
import weakref
from types import FrameType
from typing import Any

from pipetrain.ending import Interrupted, alone_in_children, name_of, say

_NOTED = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """Notes signals of a rank for `owner`, until `close` or as long as there is that."""

    def __init__(self, owner: object, rank: int) -> None:
        self._owner = weakref.ref(owner)
        self._rank = rank
        self._before: dict[int, Any] = {}  # handlers
        self._interrupted = Interrupted()
        self.asked = False
        """Whether this rank has been asked to stop."""

    def listen(self) -> None:
        """Note the signals from now on, those apart that the program ignores."""
        if not self._before:
            alone_in_children()
            handlers = {number: signal.getsignal(number) for number in _NOTED}
            self._before = {
                number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN
            }
            for number in self._before:
                signal.signal(number, self._take)

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted.again(number) or self._owner() is None:
            self.close()
            os.kill(os.getpid(), number)
            return
        if not self.asked:
            again = "; Ctrl-C again ends it at once" if number == signal.SIGINT else ""
            say(f"rank {self._rank} got {name_of(number)}: pipe.stopping is true after this window{again}")
        self.asked = True
