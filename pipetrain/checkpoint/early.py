"""The early end of a long window, where a signal asks for a stop.

All ranks stop after the same window: there they tell each other what signals asked them for. torchrun kills
its ranks 30 seconds after it has forwarded SIGTERM. A window with more than MOST_LEFT_S left therefore ends
early, at a batch that no rank has begun (see runtime.order). The first rank of stage 0 decides that, by the
run's store, before the others look; once the time of a batch is known, the ranks look there about every
LOOK_S seconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

from pipetrain.signals import STOPS, Signals

LOOK_S = 0.5  # between two looks within a window
MOST_LEFT_S = 10.0  # a window with less time left runs to its end before a stop


@dataclass(slots=True)
class EarlyEnd:
    """Decides where windows end early, on all ranks alike. `leads`: whether this rank has the first stage."""

    signals: Signals
    store: Store | None
    leads: bool
    _windows: int = 0
    _every: int = 1
    _batches: int = 0
    _began: float = 0.0

    def begin_window(self, batches: int, batch_s: float | None = None) -> None:
        """Start a window of `batches` batches of about `batch_s` seconds; the same numbers on all ranks."""
        self._windows += 1
        self._batches, self._began = batches, time.monotonic()
        self._every = 1 if batch_s is None else max(1, int(LOOK_S / max(batch_s, 1e-6)))

    def ends_window(self, batches: int, begun: int) -> bool:
        """Return whether the window ends after `batches` batches; see runtime.order.Ends."""
        if batches % self._every:
            return False
        store, key, asked = self.store, f"window {self._windows} ends", self.signals.asked in STOPS
        left_s = (time.monotonic() - self._began) / begun * (self._batches - batches)
        if store is None:
            return asked and left_s > MOST_LEFT_S
        if asked:
            store.set("a stop is asked for", "")
        if self.leads and left_s > MOST_LEFT_S and store.check(["a stop is asked for"]):
            store.set(key, str(batches))
        # The first stage's rank goes on only when the store has the value, so later looks of others see it.
        return store.check([key]) and int(store.get(key)) == batches
