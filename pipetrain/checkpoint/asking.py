"""What signals ask for, agreed on by all ranks: save at the end of a window, then stop or go on.

A signal is acted on by all ranks after the same window: there they tell each other what they were asked for.

torchrun kills its ranks 30 seconds after it has forwarded SIGTERM. A window with more than MOST_LEFT_S left
therefore ends early, at a batch that no rank has begun (see runtime.order). The rank of the first stage
decides that, by the run's store, as it is ahead of the others; once the time of a batch is known, the ranks
look there about every LOOK_S seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from signal import SIGINT

from torch.distributed.distributed_c10d import Store

from pipetrain.runtime.ranks import Ranks
from pipetrain.signals import ORDER, Asked, Signals

LOOK_S = 0.5  # between two looks within a window
MOST_LEFT_S = 10.0  # a window with less time left runs to its end before a stop


class Asking(Signals):
    """The signals to all ranks. `first`: the rank of the first stage; `saved`: see Signals.

    `ended`: whether a window was ended early: the run then saves and stops.
    """

    saved: Callable[[], str]

    def __init__(self, ranks: Ranks, store: Store | None, first: int, saved: Callable[[], str]) -> None:
        super().__init__(ranks.world.rank, saved)
        self._ranks = ranks
        self._store = store
        self._leads = ranks.world.rank == first
        self._windows = 0
        self._every = 1
        self._batches = 0
        self._began = 0.0
        self.ended = False

    def begin_window(self, batches: int, batch_s: float | None = None) -> None:
        """Start a window of `batches` batches of about `batch_s` seconds; the same numbers on all ranks."""
        self._batches, self._began = batches, time.monotonic()
        self._every = 1 if batch_s is None else max(1, int(LOOK_S / max(batch_s, 1e-6)))

    def ends_window(self, batches: int, begun: int) -> bool:
        """Return whether the window ends after `batches` batches; see runtime.order.Ends."""
        if batches % self._every:
            return False
        store, key, asked = self._store, f"window {self._windows} ends", self.asked == "stop"
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
        asked, self.asked = self.asked, ""
        return ORDER[self._ranks.most("a signal", ORDER.index(asked))]

    def interrupted(self) -> bool:
        """Return whether Ctrl-C was what stopped a rank; every rank must call it after a stop."""
        return self._ranks.most("Ctrl-C", int(self.stopped_by == SIGINT)) == 1
