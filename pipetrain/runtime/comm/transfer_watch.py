"""Threads that watch transfers: for those that finish, and for those that never will.

With gloo a receive that has arrived is not complete until a thread waits for it. So a `TransferWatch` has one
thread per edge, which waits for its transfers in order; all transfers are posted from the engine's thread.

With NCCL the device's stream waits for messages and the host goes on, until it waits for the device: forever,
if a message never comes. `Deadline` has a thread that measures how long the host has been at one action or
one wait, and ends all transfers. The stream then continues, and the host raises the error. If it cannot, a
thread prints the error and ends the process.

None of these threads calls CUDA: a thread without a device would make a context on the first one, and
querying an event takes Python's lock and may wait for the context's lock, which a synchronising host may
hold. So the host queries the events, and records what it is doing.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist

from pipetrain.runtime.comm.message import ErrorOf
from pipetrain.schedule.lower import Link

UNLIMITED = timedelta(days=30)  # the engine's thread has the deadline
RAISE_LIMIT_S = 5.0  # for the host to raise the error; else it waits for the device forever
_Queue = SimpleQueue[tuple[Sequence[dist.Work], Future[None]] | None]


class TransferWatch:
    """Waits for the transfers of some links until `close`."""

    def __init__(self, links: Iterable[Link]) -> None:
        self._queues: dict[Link, _Queue] = {link: SimpleQueue() for link in links}
        for queue in self._queues.values():
            Thread(target=_wait_in_order, args=(queue,), daemon=True).start()

    def add(self, link: Link, works: Sequence[dist.Work]) -> Future[None]:
        """Return a future that is done when all these works are, or has the error of one."""
        finished: Future[None] = Future()
        self._queues[link].put((works, finished))
        return finished

    def close(self) -> None:
        """End the threads, after everything that was added."""
        for queue in self._queues.values():
            queue.put(None)


def _wait_in_order(queue: _Queue) -> None:
    while (added := queue.get()) is not None:
        works, finished = added
        try:
            for work in works:
                work.wait(UNLIMITED)
            finished.set_result(None)
        except BaseException as error:  # raised by the engine's thread
            finished.set_exception(error)


class Deadline:
    """The deadline for what the device's stream waits for, as recorded by the host.

    `end`: ends all transfers; `broken`: whether the connection to another rank has failed.
    """

    def __init__(
        self,
        timeout: float,
        end: Callable[[], object] = lambda: None,
        broken: Callable[[], bool] = lambda: False,
    ) -> None:
        self._timeout, self._end, self._broken = timeout, end, broken
        self._awaited: list[ErrorOf] = []  # since the last event
        # Events after what the stream waits for, as far as it may not have passed them.
        self._marked: deque[tuple[Any, ErrorOf]] = deque()
        self._action_start: float | None = None  # when the host began its action; None: no wait for a device
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._raised = Event()
        self._closed = False

    # Called by the host

    def begin(self) -> None:
        """Begin an action in which the host may wait for the device, until the next mark."""
        self._action_start = time.monotonic()

    def add(self, error_of: ErrorOf) -> None:
        """Record that the stream waits for something; `error_of` makes the error that names it."""
        self._awaited.append(error_of)

    def mark(self, event: Any) -> None:
        """End an action: once the stream passes this torch.cuda.Event, its waits are over."""
        self._marked.extend((event, error_of) for error_of in self._awaited)
        self._awaited.clear()
        while self._marked and self._marked[0][0].query():
            self._marked.popleft()
        self._action_start = None
        if self._thread is None and self._marked:
            self._thread = Thread(target=self._run, daemon=True, name="deadline of messages")
            self._thread.start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let the host wait for the device outside of actions. Raises the error of a late message."""
        self.begin()
        try:
            yield
        finally:
            self._action_start = None
        self.check()

    def settle(self) -> None:
        """Wait until the stream has passed all its waits. Raises the error of a late message."""
        if self._awaited:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self.mark(event)
        while self._marked:
            with self.waiting():
                self._marked[0][0].synchronize()
            self._marked.popleft()
        self.check()

    def check(self) -> None:
        """Raise the error that has ended the transfers, if any."""
        if self._error is not None:
            self._raised.set()
            raise self._error

    def close(self) -> None:
        """End the thread: no message is awaited any longer."""
        self._closed = True

    # The threads

    def fail(self, error: Exception) -> None:
        """End all transfers with an error; only the first one counts."""
        if self._error is None and not self._closed:
            self._error = error
            for target in (self._end, self._exit_if_blocked):
                Thread(target=target, daemon=True, name="end of transfers").start()

    def _exit_if_blocked(self) -> None:
        """End the process if the host waits for a device, so that it cannot raise the error."""
        while not (self._raised.wait(RAISE_LIMIT_S) or self._closed):
            if self._action_start is not None:
                os.write(2, f"pipetrain: {self._error}\n".encode())
                os._exit(1)

    def _run(self) -> None:
        while self._error is None and not self._closed:
            time.sleep(min(1.0, self._timeout / 20))
            self._check_time(time.monotonic())

    def _check_time(self, time_now: float) -> None:
        since = self._action_start
        for _, error_of in [*self._marked][:1]:
            if since is not None and time_now - since > self._timeout:
                self.fail(error_of(""))
            elif self._broken():
                self.fail(error_of("the connection has failed"))
