"""Streams and events of a pretended device, with clocks of their own.

What runs, runs at once. But each stream counts what is launched on it, and knows how much of other streams is
over before what it does next: by events alone, as on a GPU, or because the host had waited. A tensor that a
stream reads before it knows that its numbers are there is an error, and so is one that it overwrites before
it knows that others have read them. The host knows what it has waited for. So it is refused the numbers of a
copy to pinned memory that may not have come, and the pinned memory from which one may not have been made.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import pipetrain

PACKAGE = pipetrain.__file__.removesuffix("__init__.py")
_here = threading.local()
"""Of a rank's thread: its `rank`; `watched`: whether its host must not wait; the `graph` that it captures;
its current `stream`, None for the rank's default one; `sync_debug`: whether waits are refused."""


class Refused(RuntimeError):
    """What a GPU refuses, or what would be wrong on one."""


def here(name: str) -> Any:
    return getattr(_here, name, None)


@contextmanager
def being(**attributes: Any) -> Iterator[None]:
    """Set attributes of this thread."""
    before = {name: here(name) for name in attributes}
    vars(_here).update(attributes)
    try:
        yield
    finally:
        vars(_here).update(before)


Moments = Counter["Stream"]
"""By stream how many of its launches are over."""


class Stream:
    """A stream of one rank. `known`: what is over before its next launch begins."""

    def __init__(self, host: Host) -> None:
        self.host, self.known = host, host.known.copy()
        self.device = None

    def launch(self) -> int:
        """Return the number of the next launch."""
        if self.host.streams:
            self.known |= self.host.known
        self.known[self] += 1
        return self.known[self]

    def record_event(self, event: Event | None = None) -> Event:
        event = event or torch.cuda.Event()  # type: ignore[assignment, no-untyped-call]
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.known |= event.known

    def wait_stream(self, other: Stream) -> None:
        self.known |= other.known

    def synchronize(self) -> None:
        self.host.gpu.wait("Stream.synchronize")
        self.host.learns(self.known)


class Host:
    """What the host of one rank knows of its device, and what is copied between their memories."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.known = gpu, Moments()
        self.default = Stream(self)
        self.streams: list[Stream] = []  # others that were made
        self.capturing: Stream | None = None  # the one on which graphs are captured
        self.alone = 0  # the launches of the default stream before there was another
        self.graphs = WeakSet[Any]()
        self._copies: list[_Copy] = []

    @property
    def stream(self) -> Stream:
        return here("stream") or self.default

    def learns(self, known: Moments) -> None:
        """Know that launches are over: copies have been made."""
        self.known |= known
        for copy in [copy for copy in self._copies if self.known[copy.stream] >= copy.number]:
            copy.land()
            self._copies.remove(copy)

    def copies(self, pinned: Tensor, values: Tensor | None) -> None:
        """Note a copy to pinned memory of these values, or from it to the device."""
        self._copies.append(_Copy(pinned, values, self.stream, self.stream.known[self.stream]))

    @property
    def copies_open(self) -> bool:
        """Whether there are copies of which the host does not know that they are over."""
        return bool(self._copies)

    def refuse_pinned(self, read: set[int], written: set[int]) -> None:
        """Refuse the host's use of pinned memory that copies may still read or write."""
        for copy in self._copies:
            if copy.storage in written or (copy.values is not None and copy.storage in read):
                raise Refused("pinned memory is used before the event of its copy has passed")


class _Copy:
    """A copy to pinned host memory (of `values`) or from it: over when the host knows of its launch."""

    def __init__(self, pinned: Tensor, values: Tensor | None, stream: Stream, number: int) -> None:
        self.stream, self.number, self.values = stream, number, values
        self.storage, self._pinned = pinned.untyped_storage()._cdata, pinned

    def land(self) -> None:
        if self.values is not None:
            with _disable_current_modes():
                self._pinned.copy_(self.values)


class Event:
    """torch.cuda.Event. It has passed when it is asked for the second time, or when the host knows."""

    gpu: Gpu  # of the device that is pretended

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._at, self._asked = 0.0, 0
        self._host: Host | None = None
        self.known = Moments()

    def record(self, stream: Stream | None = None) -> None:
        self._host = self.gpu.host
        self._at, self._asked = time.perf_counter(), 0
        self.known = (stream or self._host.stream).known.copy()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.gpu.host.stream).wait_event(self)

    def query(self) -> bool:
        self.gpu.touch("Event.query")
        self._asked += 1
        if self._has_passed():
            self._learn()
        return self._has_passed()

    def synchronize(self) -> None:
        if not self._has_passed():
            self.gpu.wait("Event.synchronize")
        self._learn()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._at - self._at)

    def _has_passed(self) -> bool:
        return self._host is None or self._asked > 1 or self.known <= self._host.known

    def _learn(self) -> None:
        self._asked = 2
        if self._host is not None:
            self._host.learns(self.known)


class _Uses:
    """The last launches that wrote and read a storage."""

    def __init__(self, host: Host) -> None:
        self._written = host.default, host.alone
        self._reads: dict[Stream, int] = {}

    def are_known(self, stream: Stream, writes: bool) -> bool:
        """Return whether a launch reads after what wrote, and writes after all."""
        earlier = [self._written, *(self._reads.items() if writes else ())]
        return all(stream.known[other] >= number for other, number in earlier)

    def add(self, stream: Stream, number: int, writes: bool) -> None:
        if writes:
            self._written, self._reads = (stream, number), {}
        else:
            self._reads[stream] = number


class Gpu:
    """What was seen on the device by all ranks.

    `waits`: where the host waited for the device while its rank was watched, as `what, file:line`;
    `kernels`: by rank and by what the rank was at, see `counting`. `before_kernel` and `on_write` are called
    before each operation, and with the tensors that it writes.
    """

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.kernels: Counter[tuple[Any, Any, str]] = Counter()
        self.before_kernel: Callable[[], None] = lambda: None
        self.on_write: Callable[[list[Tensor]], None] = lambda tensors: None
        self.captures: list[Any] = []  # graphs that are captured now
        self._hosts: defaultdict[Any, Host] = defaultdict(lambda: Host(self))  # by rank

    @property
    def host(self) -> Host:
        return self._hosts[here("rank")]

    def stream(self) -> Stream:
        """Return a new stream."""
        host = self.host
        if not host.streams:
            host.alone = host.default.known[host.default]
        host.streams.append(Stream(host))
        return host.streams[-1]

    def touch(self, what: str) -> None:
        """Call what spoils captures: one of this thread, or of any thread, as their mode says."""
        for graph in [graph for graph in self.captures if graph.host is self.host]:
            if graph.mode != "relaxed" and (graph.mode == "global" or graph is here("graph")):
                graph.spoilt = True
                raise Refused(f"operation not permitted when stream is capturing: {what}")

    def wait(self, what: str, debugged: bool = True) -> None:
        """Note that the host waits for the device. `debugged`: torch.cuda.set_sync_debug_mode refuses it."""
        if debugged and here("sync_debug") == "error":
            raise Refused(f"called a synchronizing CUDA operation: {what}")
        self.touch(what)
        if here("watched"):
            ours = [frame for frame in traceback.extract_stack() if frame.filename.startswith(PACKAGE)]
            at = f"{ours[-1].filename.removeprefix(PACKAGE)}:{ours[-1].lineno}" if ours else "a caller"
            self.waits[f"{what}, {at}"] += 1
        self.host.learns(self.host.stream.known)

    def synchronize(self, *_: Any) -> None:
        """Wait for all streams of this rank."""
        self.wait("cuda.synchronize", debugged=False)
        for stream in self.host.streams:
            self.host.learns(stream.known)
        self.host.learns(self.host.default.known)

    def launch(self, used: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Note a launch on the current stream. Raises Refused for a race with another stream."""
        host, stream = self.host, self.host.stream
        number = stream.launch()
        if not host.streams:
            return
        writes = {t.untyped_storage()._cdata for t in written}
        for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in used}.values():
            if not hasattr(storage, "uses"):
                storage.uses = _Uses(host)  # type: ignore[attr-defined]
            uses: _Uses = storage.uses  # type: ignore[attr-defined]
            if not uses.are_known(stream, storage._cdata in writes):
                raise Refused("a stream uses a tensor of another one, for which it has not waited")
            uses.add(stream, number, storage._cdata in writes)
