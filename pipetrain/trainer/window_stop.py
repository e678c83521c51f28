"""The early end of a long window after a signal to stop.

All ranks stop after the same window: there they exchange their stop requests. torchrun kills its ranks 30
seconds after it has forwarded SIGTERM. So a window with more than MOST_LEFT_S left ends early, at a batch
that no rank has begun (see runtime.rank_actions). The first rank of stage 0 decides that, through torchrun's
store, before the others check; once the time of a batch is known, the ranks check about every LOOK_S seconds.
If the store is lost, the process that holds it has ended (torchrun, or the command pipetrain), and nothing
else could stop the run any more: that requests a stop, too.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Thread

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from pipetrain.model.specs import Size
from pipetrain.runtime.window_record import WindowHooks
from pipetrain.signals import ORDER, STOPPING, STOPS, Signals, say
from pipetrain.trainer.window_loop import Listener, Pass

LOOK_S = 0.5  # between two checks within a window
ASKED = "a stop is asked for"  # a key of the store
LOST = "torchrun's store is lost, so whatever started this run is gone"
MOST_LEFT_S = 10.0  # a window with less time left runs to its end before a stop


@dataclass(slots=True)
class WindowStop(Listener):
    """Decides where windows end early, on all ranks. `leads`: whether this rank has the first stage.

    It lets signals know of updates, which are then to be saved, before others show them.
    """

    signals: Signals
    store: Store
    leads: bool
    lost: bool = False
    """Whether the store has been lost."""
    _windows: int = 0
    _every: int = 1
    _batches: int = 0
    _began: float = 0.0
    _watched: bool = True

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Request a stop if the store is lost while the block runs, as a connection to it ends."""
        store, connection = self.store, socket.socket()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        if isinstance(store, TCPStore):  # else it is in this process, or a file
            with suppress(OSError):
                connection = socket.create_connection((store.host, store.port))
            Thread(target=self._watch, args=(connection,), daemon=True).start()
        try:
            yield
        finally:
            self._watched = False
            with suppress(OSError), connection:
                connection.shutdown(socket.SHUT_RDWR)

    def _watch(self, connection: socket.socket) -> None:
        with suppress(OSError):
            connection.recv(1)  # the store never sends first
        if self._watched:
            self.lost = True
            self.signals.request = max(self.signals.request, "stop", key=ORDER.index)
            if self.leads:
                say(f"{LOST}: {STOPPING}")

    def before_window(self, of: Pass, sizes: Sequence[Size]) -> WindowHooks:
        self.begin_window(len(sizes), of.sample_s and of.sample_s * max(sizes).samples)
        return WindowHooks(progress=(self.signals.note_update,), stop_check=self.ends_window)

    def begin_window(self, batches: int, batch_s: float | None = None) -> None:
        """Start a window of `batches` batches of about `batch_s` seconds; the same numbers on all ranks."""
        self._windows += 1
        self._batches, self._began = batches, time.monotonic()
        self._every = 1 if batch_s is None else max(1, int(LOOK_S / max(batch_s, 1e-6)))

    def ends_window(self, batches: int, begun: int) -> bool:
        """Return whether the window ends after `batches` batches, with `begun` batches begun."""
        if self.lost or batches % self._every:
            return False
        store, key = self.store, f"window {self._windows} ends"
        left_s = (time.monotonic() - self._began) / begun * (self._batches - batches)
        try:
            if self.signals.request in STOPS:
                store.set(ASKED, "")
            if self.leads and left_s > MOST_LEFT_S and store.check([ASKED]):
                store.set(key, str(batches))
            # The first stage's rank continues only when the store has the value, so others read it later.
            return store.check([key]) and int(store.get(key)) == batches
        except RuntimeError:  # the store is lost: the window runs to its end
            return False
