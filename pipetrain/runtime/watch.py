"""Detects that a transfer is finished, without blocking.

With gloo a receive that has arrived is not complete until a thread waits for it. So one thread per edge waits
for its transfers in order, and records any exception; all transfers are posted from the engine's thread. NCCL
can be polled and needs no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from datetime import timedelta
from queue import SimpleQueue
from threading import Condition, Thread
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist

LONG = timedelta(days=30)  # the engine's thread keeps the deadline


class Watched(Protocol):
    """A transfer: its works, and the outcome of waiting for them."""

    works: list[dist.Work]
    finished: bool
    failure: BaseException | None


E_ = TypeVar("E_", bound=Hashable)


class Watch(Generic[E_]):
    """Watches the transfers of some edges until `close`."""

    def __init__(self, edges: Iterable[E_]) -> None:
        self._changed = Condition()
        self._queues: dict[E_, SimpleQueue[Watched | None]] = {edge: SimpleQueue() for edge in edges}
        self._threads = [
            Thread(target=self._run, args=(queue,), daemon=True, name=f"watch of {edge}")
            for edge, queue in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    def add(self, edge: E_, transfer: Watched) -> None:
        self._queues[edge].put(transfer)

    def wait(self, ready: Callable[[], bool], timeout: float) -> bool:
        """Wait until `ready()`, for at most `timeout` seconds; return whether it is."""
        with self._changed:
            return self._changed.wait_for(ready, timeout)

    def close(self) -> None:
        """End the threads. All added transfers must be finished."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, queue: SimpleQueue[Watched | None]) -> None:
        while (transfer := queue.get()) is not None:
            failure: BaseException | None = None
            try:
                for work in transfer.works:
                    work.wait(LONG)
            except BaseException as error:  # raised by the engine's thread
                failure = error
            with self._changed:
                transfer.finished, transfer.failure = True, failure
                self._changed.notify_all()
