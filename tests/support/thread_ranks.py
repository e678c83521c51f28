"""Messages between threads of one process, with the bounds of a real channel."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from threading import Barrier, Condition, Thread

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from pipetrain.errors import ChannelError
from pipetrain.runtime.comm.message import Message, message_error
from pipetrain.runtime.comm.transfer_watch import Deadline
from pipetrain.schedule.actions import Edge, Placement, Tie
from pipetrain.schedule.lower import Link
from tests.support import DEADLINE_S


class LocalChannel:
    """One rank's Channel; the channels of all ranks share one `Wire`."""

    ordered = False

    def __init__(
        self, wire: Wire, buffer_size: int | Mapping[Edge, int], timeout: float, rank: int = 0
    ) -> None:
        self._wire = wire
        self._rank = rank
        self._bounds = buffer_size.__getitem__ if isinstance(buffer_size, Mapping) else lambda _: buffer_size
        self._timeout = timeout
        self.waited = 0.0
        self.transferred_bytes = 0
        self.deadline = Deadline(timeout)
        self._expected: dict[Link, deque[Message]] = {}
        self._told: Counter[Tie] = Counter()
        self._received: Counter[Tie] = Counter()

    def expect(self, messages: Sequence[Message], watched: bool = False) -> None:
        for message in messages:
            self._expected.setdefault(message.link, deque()).append(message)
        with self._wire.changed:
            for edge, expected in self._expected.items():
                self._wire.posted[edge] = self._wire.taken[edge] + min(self._bounds(edge[0]), len(expected))
            self._wire.changed.notify_all()

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        wire, edge = self._wire, message.link
        with wire.changed:
            self._await(lambda: self.room(message), [], [message])
            wire.queues[edge].append((message, tuple(tensors)))  # copied later, as by a real channel
            wire.sent[edge] += 1
            wire.changed.notify_all()
        self.transferred_bytes += message.nbytes

    def post(self, message: Message) -> None:
        """Receives are posted ahead."""

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        wire, edge = self._wire, message.link
        assert self._expected[edge].popleft() == message, f"{message.name} is not what was expected next"
        with wire.changed:
            self._await(lambda: self.arrived(message), [message], [])
            sent, tensors = wire.queues[edge].popleft()
            assert sent.mb == message.mb, f"{sent.name} came instead of {message.name}"
            wire.taken[edge] += 1
            wire.posted[edge] = wire.taken[edge] + min(self._bounds(edge[0]), len(self._expected[edge]))
            wire.changed.notify_all()
        self.transferred_bytes += message.nbytes
        return tuple(t.clone() for t in tensors)

    def truncate(self, mb: int) -> None:
        wire = self._wire
        with wire.changed:
            for edge, expected in self._expected.items():
                self._expected[edge] = left = deque(message for message in expected if message.mb < mb)
                assert wire.posted[edge] <= wire.taken[edge] + len(left), f"{edge}: posted beyond {mb}"

    def drain(self) -> None:
        left = [m.name for expected in self._expected.values() for m in expected]
        assert not left, f"never received: {left}"

    def arrived(self, message: Message) -> bool:
        return bool(self._wire.queues[message.link])

    def room(self, message: Message) -> bool:
        # Sends without a posted receive: at most the bound, this one included.
        edge = message.link
        return self._wire.sent[edge] - self._wire.posted[edge] < self._bounds(edge[0])

    def wait(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        with self._wire.changed:
            self._await(
                lambda: any(map(self.arrived, receives)) or any(map(self.room, sends)), receives, sends
            )

    def buffers(self) -> list[tuple[Sequence[int], Tensor]]:
        return []  # it keeps references to the tensors of others

    def all_reduce(self, tie: Tie, numbers: Tensor, early: bool = False) -> None:
        with self._wire.changed:
            self._wire.told[tie, self._told[tie]][self._rank] = numbers
            self._told[tie] += 1
            self._wire.changed.notify_all()

    def begin(self, tie: Tie, early: bool = False) -> None:
        """A sum begins when it is told."""

    def reduced(self, tie: Tie) -> Tensor:
        told, start = self._wire.told[tie, self._received[tie]], time.monotonic()
        self._received[tie] += 1
        placement = self._wire.placement
        stages = [stage for stage in tie if stage in range(len(placement))] or range(len(placement))
        ranks = {rank for stage in stages for rank in placement[stage]}
        with self._wire.changed:
            if not self._wire.changed.wait_for(lambda: told.keys() == ranks, self._timeout):
                raise ChannelError(f"a rank waited {self._timeout:g} s for sums of the other ranks")
        self.waited += time.monotonic() - start
        return torch.stack([told[rank] for rank in sorted(told)]).sum(0)

    def _await(
        self, ready: Callable[[], bool], receives: Sequence[Message], sends: Sequence[Message]
    ) -> None:
        start = time.monotonic()
        if not self._wire.changed.wait_for(ready, self._timeout):
            raise message_error(receives, sends, self._timeout, "")
        self.waited += time.monotonic() - start


def in_threads(work: Callable[[int], object], barrier: Barrier) -> None:
    """Call `work` for each rank, in as many threads as meet at a barrier; raise what one of them raises."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [Thread(target=guarded, args=(rank,), daemon=True) for rank in range(barrier.parties)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + DEADLINE_S
    while not errors and any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        threads[-1].join(0.02)
        time.sleep(0.002)
    # Torch notes for all threads together that one has a mode.
    _python_dispatch._is_in_torch_dispatch_mode = False
    if errors:
        raise errors[0]  # the other threads, which wait for this one, end at their deadline
    assert not any(thread.is_alive() for thread in threads), f"it did not end in {DEADLINE_S:g} s"


class Wire:
    """The queues and counts of each edge, shared by the local channels of one process.

    `placement`: the ranks of each stage.
    """

    def __init__(self, placement: Placement | None = None) -> None:
        self.placement = placement or [(0,), (1,)]
        self.changed = Condition()
        self.queues: defaultdict[Link, deque[tuple[Message, tuple[Tensor, ...]]]] = defaultdict(deque)
        self.sent: Counter[Link] = Counter()
        self.posted: Counter[Link] = Counter()
        self.taken: Counter[Link] = Counter()
        self.told: defaultdict[tuple[Tie, int], dict[int, Tensor]] = defaultdict(
            dict
        )  # (tie, sum) -> by rank
