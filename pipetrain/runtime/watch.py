"""Threads that look after transfers: `Watch` sees that one is finished, `Deadline` that one never will be.

With gloo a receive that has arrived is not complete until a thread waits for it. So one thread per edge waits
for its transfers in order; all transfers are posted from the engine's thread.

With NCCL the device's stream waits for messages and the host goes on, so the host would not notice one that
never comes. A thread does: if the stream passes no message within the deadline, it aborts all transfers. The
stream then goes on, and the host raises an error that names the message. If the host cannot, the thread
prints the error and ends the process.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Lock, Thread

import torch.distributed as dist

from pipetrain.schedule.lower import Link

LONG = timedelta(days=30)  # the engine's thread has the deadline
RAISED_S = 5.0  # in which the host must raise the error; else it waits for the device for ever
_Queue = SimpleQueue[tuple[Sequence[dist.Work], Future[None]] | None]


class Watch:
    """Watches the transfers of some links until `close`."""

    def __init__(self, links: Iterable[Link]) -> None:
        self._queues: dict[Link, _Queue] = {link: SimpleQueue() for link in links}
        for queue in self._queues.values():
            Thread(target=_follow, args=(queue,), daemon=True).start()

    def add(self, link: Link, works: Sequence[dist.Work]) -> Future[None]:
        """Return a future that is done when all these works are, or has the error of one."""
        done: Future[None] = Future()
        self._queues[link].put((works, done))
        return done

    def close(self) -> None:
        """End the threads, after all that was added."""
        for queue in self._queues.values():
            queue.put(None)


def _follow(queue: _Queue) -> None:
    while (one := queue.get()) is not None:
        works, done = one
        try:
            for work in works:
                work.wait(LONG)
            done.set_result(None)
        except BaseException as error:  # raised by the engine's thread
            done.set_exception(error)


class Deadline:
    """The deadline of messages for which the device's stream waits. `abort` ends all transfers.

    `broken`: whether the connection to another rank has failed.
    """

    def __init__(self, timeout: float, abort: Callable[[], None], broken: Callable[[], bool]) -> None:
        self._timeout = timeout
        self._abort = abort
        self._broken = broken
        self._lock = Lock()
        self._open: list[tuple[Callable[[], bool], Callable[[str], Exception]]] = []
        self._moved = 0.0  # when the stream had passed one last
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._raised = Event()
        self._closed = False

    def add(self, passed: Callable[[], bool], error: Callable[[str], Exception]) -> None:
        """Watch a message. `passed`: whether the stream has it; `error` makes the error that names it."""
        with self._lock:
            if not self._open:
                self._moved = time.monotonic()
            self._open.append((passed, error))
        if self._thread is None:
            self._thread = Thread(target=self._run, daemon=True, name="deadline of messages")
            self._thread.start()

    def check(self) -> None:
        """Raise the error of a message that did not come in time."""
        if self._error is not None:
            self._raised.set()
            raise self._error

    def close(self) -> None:
        """End the thread: nobody waits for messages any longer."""
        self._closed = True

    def _run(self) -> None:
        while self._error is None:
            time.sleep(min(1.0, self._timeout / 20))
            if self._closed:
                return
            with self._lock:
                try:
                    self._look(time.monotonic())
                except Exception as error:  # of the device, which ends all that was launched
                    self._error = error
        Thread(target=self._abort, daemon=True, name="end of transfers").start()
        if not self._raised.wait(RAISED_S):
            os.write(2, f"pipetrain: {self._error}\n".encode())
            os._exit(1)

    def _look(self, now: float) -> None:
        left = [one for one in self._open if not one[0]()]
        if len(left) < len(self._open):
            self._moved = now
        self._open = left
        if left and now - self._moved > self._timeout:
            self._error = left[0][1]("")
        elif left and self._broken():
            self._error = left[0][1]("the connection has failed")
