"""SIGTERM, Ctrl-C and SIGUSR1: received at once, also while the main thread is in C++.

A signal's handler runs in the main thread between two bytecodes. That thread may compile for a minute, or
wait for another rank in C++, and a stop must not depend on either. So a thread receives the signals and acts,
and the handler does nothing: its exception might land in a finalizer, which cannot pass it on.

Ctrl-C acts like SIGTERM, and a second one ends the rank at once; torchrun forwards that as SIGTERM. A program
that uses `pipe.stopping` gets both as requests; any other program is ended by them.
"""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from types import FrameType
from typing import Any, Literal

from pipetrain.errors import ChannelError
from pipetrain.exit import INTERRUPTED, TERMINATED, leave, terminate

StopRequest = Literal["", "save", "stop", "interrupt"]
ORDER: list[StopRequest] = ["", "save", "stop", "interrupt"]  # by rising priority
STOPS = ("stop", "interrupt")
SIGNALS: dict[int, StopRequest] = {signal.SIGTERM: "stop", signal.SIGINT: "interrupt", signal.SIGUSR1: "save"}
AGAIN = "; Ctrl-C again ends it at once"
STOPPING = "saving when the pipeline is drained, then stopping"
_LEADS_TO: dict[int, str] = {
    signal.SIGTERM: STOPPING,
    signal.SIGINT: f"{STOPPING}{AGAIN}",
    signal.SIGUSR1: "saving at the end of this window, then going on",
}
LIMIT, LIMIT_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30.0  # seconds until torchrun kills, and its default
MARGIN_S = 5.0  # of these, for leaving
DEBOUNCE_S = 1.0  # signals within this time are the same Ctrl-C
HANDLER_LIMIT_S = 5.0  # for actions that a signal has started


class Interrupted:
    """Distinguishes a second Ctrl-C from the first, which may come twice: directly, and by torchrun."""

    def __init__(self) -> None:
        self._first: float | None = None

    def again(self, number: int) -> bool:
        """Record a signal; return whether it follows a Ctrl-C."""
        if self._first is not None:
            return time.monotonic() - self._first > DEBOUNCE_S
        if number == signal.SIGINT:
            self._first = time.monotonic()
        return False


class Signals:
    """The requests of signals to a rank. `saved`: returns the last checkpoint as text; None: no training.

    `updated`: whether an update has been made, which would be lost without saving; before that a signal to
    stop ends the process at once. `drained`: no message between the ranks is in flight any more, so only
    saving, writing and ending remain. `request`: the strongest request. `stopped_by`: the first signal to
    stop, if any.
    """

    def __init__(self, rank: int, saved: Callable[[], str] | None = None) -> None:
        self._rank = rank
        self.saved = saved
        self._interrupted = Interrupted()
        self.request: StopRequest = ""
        self.stopped_by = 0
        self.updated = False
        self._lost = False
        self.drained = Event()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals while the block runs."""
        before = _replace(SIGNALS, _do_nothing)
        try:
            with listening(self.on_signal), self.losing():
                yield
        finally:
            _put_back(before)

    @contextmanager
    def losing(self) -> Iterator[None]:
        """Before the first update, let a Ctrl-C explain the loss of the other ranks: it ends all of them."""
        try:
            yield
        except ChannelError:
            self._lost = True
            if not (self.updated or self.drained.is_set()):
                time.sleep(DEBOUNCE_S)  # it may still arrive at this rank
            raise

    def on_signal(self, number: int) -> None:
        """Act on a signal, in a separate thread."""
        if number not in SIGNALS or (self._lost and number == signal.SIGTERM):  # torchrun's, at a lost rank
            return
        asks, again, drained = SIGNALS[number], self._interrupted.again(number), self.drained.is_set()
        if asks in STOPS and (again or not (self.updated or drained)):
            self._end(number, again)
        elif drained:  # the trackers may take long to close
            pass
        elif self.saved is None:
            say(f"rank {self._rank} got SIGUSR1 with no update to save, so it goes on")
        else:
            if asks in STOPS:  # complete before the main thread sees the request
                limit_s = float(os.environ.get(LIMIT, LIMIT_S))
                self.stopped_by = self.stopped_by or number
                Thread(target=self.outlast, args=(number, max(0.0, limit_s - MARGIN_S)), daemon=True).start()
            if self.request not in STOPS:  # the first signal to stop decides how the run ends
                self.request = max(self.request, asks, key=ORDER.index)
            say(f"rank {self._rank} got {name_of(number)}: {_LEADS_TO[number]}")

    def note_update(self) -> None:
        """Note that an update has been made."""
        self.updated = True

    def take(self) -> StopRequest:
        """Return this rank's request, and clear it."""
        request, self.request = self.request, ""
        return request

    def _end(self, number: int, again: bool) -> None:
        """End the process at once. Rank 0 prints why: if it refuses a run, torchrun ends the others."""
        if number == signal.SIGTERM and not again:
            status, sentence = TERMINATED, "rank 0 got SIGTERM with no update to save, so it ends now"
        else:
            status, sentence = INTERRUPTED, f"interrupted; {self.saved()}" if self.saved else "interrupted"
        if self._rank:
            leave(status)
        terminate(sentence, status)

    def outlast(self, number: int, limit_s: float) -> None:
        """Leave before torchrun kills this process, unless the pipeline has been drained."""
        if not self.drained.wait(limit_s) and self.saved:
            terminate(
                f"rank {self._rank} leaves without saving: what was under way at {name_of(number)}, "
                f"{limit_s:g} s ago, has not ended; {self.saved()}",
                status_after(number),
            )


class Stopping:
    """Records SIGTERM and Ctrl-C for a program of `owner`, from `listen` to `close`.

    The first signal is recorded, and so is another SIGTERM. A second Ctrl-C has its original effect.
    """

    def __init__(self, owner: object, rank: int) -> None:
        self._owner = weakref.ref(owner)
        self._rank = rank
        self._before: dict[int, Any] = {}  # handlers
        self._interrupted = Interrupted()
        self.request = False
        """Whether this rank has been asked to stop."""

    def take(self) -> StopRequest:
        return "stop" if self.request else ""

    def listen(self) -> None:
        if not self._before:
            self._before = _replace((signal.SIGTERM, signal.SIGINT), self._take)

    def close(self) -> None:
        _put_back(self._before)
        self._before = {}

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted.again(number) or self._owner() is None:
            self.close()
            os.kill(os.getpid(), number)
            return
        if not self.request:
            again = AGAIN if number == signal.SIGINT else ""
            say(f"rank {self._rank} got {name_of(number)}: pipe.stopping is true after this window{again}")
        self.request = True


def _do_nothing(number: int, frame: FrameType | None) -> None: ...


def _replace(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Set a handler for signals, except those that the program ignores; return the earlier handlers."""
    before = {number: signal.getsignal(number) for number in numbers}
    before = {
        number: handler_before
        for number, handler_before in before.items()
        if handler_before is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, handler)
    return before


def _put_back(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def listening(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with the number of each signal that has a handler, in a thread, while the block runs."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write)
    thread = Thread(target=_listen, args=(read, act), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)
        thread.join(HANDLER_LIMIT_S)  # a thread that leaves C++ while Python ends would abort the process


def _listen(pipe: int, act: Callable[[int], None]) -> None:
    with open(pipe, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            act(number[0])


def _reset_in_child() -> None:
    """In a forked process, such as a data worker, ignore signals to all processes: the parent needs it.

    A service manager sends SIGTERM to every process. This one ends only when its parent sends it.
    """
    handled = [
        number for number in SIGNALS if getattr(signal.getsignal(number), "__module__", "") == __name__
    ]
    if handled:
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)
    if handled and hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)  # DataLoader sets its workers' handlers later
        Thread(target=_obey, args=(os.getppid(), handled), daemon=True).start()
        return
    for number in handled:  # as on macOS, which does not report the sender of a signal
        signal.signal(number, signal.SIG_DFL)


def _obey(parent: int, numbers: Sequence[int]) -> None:
    """End on SIGTERM from the parent; signals from others are for the parent."""
    while (received := signal.sigwaitinfo(numbers)).si_pid != parent or received.si_signo != signal.SIGTERM:
        pass
    os._exit(0)


os.register_at_fork(after_in_child=_reset_in_child)


def say(sentence: str) -> None:
    """Print a sentence on standard error, from any thread or handler."""
    with suppress(OSError):  # the reader may be gone
        os.write(2, f"pipetrain: {sentence}\n".encode())


def name_of(number: int) -> str:
    """Return a signal's common name."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def status_after(number: int) -> int:
    """Return the exit status of a process that a signal ended before all was saved."""
    return INTERRUPTED if number == signal.SIGINT else TERMINATED
