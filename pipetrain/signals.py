"""SIGTERM, Ctrl-C and SIGUSR1: heard at once, also while the main thread is in C++.

The handler of a signal runs in the main thread between two bytecodes. That thread may compile for a minute,
or wait for another rank in C++, and a stop must not depend on either. So a thread hears the signals and acts,
and the handler does nothing: an exception of it might land in a finalizer, which cannot pass it on.

Ctrl-C is as SIGTERM, and a second one ends the rank at once; torchrun passes that on as SIGTERM. A program
that asks `pipe.stopping` is told of both in place of what they do; one that never asks is ended by them.
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
LIMIT, LIMIT_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30.0  # seconds after which torchrun kills, and its default
MARGIN_S = 5.0  # of these for leaving
DEBOUNCE_S = 1.0  # within which what comes is the same Ctrl-C
HANDLER_LIMIT_S = 5.0  # that what a signal started may take to its end


class Interrupted:
    """Tells a second Ctrl-C from the first, which comes twice where all processes get it and torchrun too."""

    def __init__(self) -> None:
        self._first: float | None = None

    def again(self, number: int) -> bool:
        """Note a signal; return whether it follows a Ctrl-C."""
        if self._first is not None:
            return time.monotonic() - self._first > DEBOUNCE_S
        if number == signal.SIGINT:
            self._first = time.monotonic()
        return False


class Signals:
    """What the signals ask a rank for. `saved`: says which checkpoint there is; None where nothing trains.

    `updated`: whether an update has been made, which is lost if it is not saved; before that a signal to
    stop ends the process at once. `drained`: nothing is under way between the ranks any more, so what is left
    is to save, to write and to end. `request`: the most that was asked for. `stopped_by`: the first signal to
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
        """Before the first update, let a Ctrl-C say why the other ranks are lost: it ends all of them."""
        try:
            yield
        except ChannelError:
            self._lost = True
            if not (self.updated or self.drained.is_set()):
                time.sleep(DEBOUNCE_S)  # it may be on its way to this rank
            raise

    def on_signal(self, number: int) -> None:
        """Act on a signal, in a thread of its own."""
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
            if asks in STOPS:  # all of it is known when the main thread sees what was asked
                limit_s = float(os.environ.get(LIMIT, LIMIT_S))
                self.stopped_by = self.stopped_by or number
                Thread(target=self.outlast, args=(number, max(0.0, limit_s - MARGIN_S)), daemon=True).start()
            if self.request not in STOPS:  # the first signal to stop says how the run ends
                self.request = max(self.request, asks, key=ORDER.index)
            say(f"rank {self._rank} got {name_of(number)}: {_LEADS_TO[number]}")

    def take(self) -> StopRequest:
        """Return, once, what this rank was asked for."""
        request, self.request = self.request, ""
        return request

    def _end(self, number: int, again: bool) -> None:
        """End the process at once. Rank 0 says so: where it refuses a run, torchrun ends the others."""
        if number == signal.SIGTERM and not again:
            status, sentence = TERMINATED, "rank 0 got SIGTERM with no update to save, so it ends now"
        else:
            status, sentence = INTERRUPTED, f"interrupted; {self.saved()}" if self.saved else "interrupted"
        if self._rank:
            leave(status)
        terminate(sentence, status)

    def outlast(self, number: int, limit_s: float) -> None:
        """Leave before torchrun kills, unless the pipeline has been drained."""
        if not self.drained.wait(limit_s) and self.saved:
            terminate(
                f"rank {self._rank} leaves without saving: what was under way at {name_of(number)}, "
                f"{limit_s:g} s ago, has not ended; {self.saved()}",
                status_after(number),
            )


class Stopping:
    """Notes SIGTERM and Ctrl-C for a program of `owner`, from `listen` to `close`.

    The first signal is noted, and so is another SIGTERM. A second Ctrl-C does what it would have done.
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
    """Give signals a handler, those apart that the program ignores; return the ones before."""
    before = {number: signal.getsignal(number) for number in numbers}
    before = {number: theirs for number, theirs in before.items() if theirs is not signal.SIG_IGN}
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
        thread.join(HANDLER_LIMIT_S)  # one that comes out of C++ while Python ends would abort the process


def _listen(heard: int, act: Callable[[int], None]) -> None:
    with open(heard, "rb", buffering=0) as numbers:
        while number := numbers.read(1):
            act(number[0])


def _reset_in_child() -> None:
    """Leave the signals to the parent in a forked process, such as a data worker, which it still needs.

    A service manager sends SIGTERM to every process. This one is ended by its parent's alone.
    """
    ours = [number for number in SIGNALS if getattr(signal.getsignal(number), "__module__", "") == __name__]
    if ours:
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)
    if ours and hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, ours)  # DataLoader gives its workers other handlers later
        Thread(target=_obey, args=(os.getppid(), ours), daemon=True).start()
        return
    for number in ours:  # as on macOS, which does not say who sends a signal
        signal.signal(number, signal.SIG_DFL)


def _obey(parent: int, numbers: Sequence[int]) -> None:
    """End when the parent says so; others mean the parent."""
    while (heard := signal.sigwaitinfo(numbers)).si_pid != parent or heard.si_signo != signal.SIGTERM:
        pass
    os._exit(0)


os.register_at_fork(after_in_child=_reset_in_child)


def say(sentence: str) -> None:
    """Print a sentence on standard error, from any thread or handler."""
    with suppress(OSError):  # whoever reads it may be gone
        os.write(2, f"pipetrain: {sentence}\n".encode())


def name_of(number: int) -> str:
    """Return what people call a signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def status_after(number: int) -> int:
    """Return the status of a process that a signal has ended before all was saved."""
    return INTERRUPTED if number == signal.SIGINT else TERMINATED
