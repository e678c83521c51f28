"""NCCL between threads: a send is over when its receive is posted, and nothing is there before its wait.

Kernels of two streams are ordered by waits alone. So each rank's stream has a vector clock, and what is
written while a send of it may still read it is an error, also where this run would have gone well. With
`exclusive` a kernel waits for all transfers that its rank has posted, as one may that is loaded or allocates.
A group's first use connects it, for which the host waits; to destroy it waits for all kernels and for the
other ranks; to abort it, for the kernels of groups that are not. All waits are in one place, so that ranks
that wait for each other are noticed at once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support import DEADLINE_S
from tests.support.pretended_gpu.streams import being, here
from tests.support.pretended_gpu.tensors import is_tagged, storages

NCCL_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
NCCL_DTYPES |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
NCCL_DTYPES |= {torch.float8_e4m3fn, torch.float8_e5m2}  # of messages alone
Clock = Counter[int]  # by rank the events of its stream that are known to be over


class Hang(AssertionError):
    """All ranks wait, and none for what another one has done."""


class Waits:
    """Where threads of ranks wait for each other. Raises Hang where nobody goes on."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._running: Counter[bool] = Counter()  # threads, by whether they are the ranks' own
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}  # by thread
        self.hang = ""  # who waits for whom
        self._over = ""  # why nobody is to wait

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Let a thread of a rank wait."""
        rank, thread = here("rank"), threading.get_ident()
        with self.changed:
            self._waiting[thread] = ready, f"rank {rank} waits for {what}"
            while not ready():
                if len(self._waiting) == self._running.total() and self._running[True]:
                    every = [*self._waiting.values()]
                    if not any(one() for one, _ in every):
                        self.hang = self.hang or "; ".join(text for _, text in every)
                        self.changed.notify_all()
                if self.hang or self._over:
                    raise Hang(self.hang or self._over)
                if not self.changed.wait(DEADLINE_S):
                    raise Hang(f"rank {rank} waited for {what}")
            del self._waiting[thread]

    @contextmanager
    def running(self, told: bool = False) -> Iterator[None]:
        """Be one of the ranks, which have begun. Who has gone is waited for in vain.

        And not at all after an error, unless the others are `told` of it.
        """
        try:
            yield
        except BaseException as error:
            if not told:
                self._over = self._over or f"rank {here('rank')} has ended: {error!r}"
            raise
        finally:
            self.end(True)

    def begin(self, own: bool, ranks: int = 1) -> None:
        with self.changed:
            self._running[own] += ranks

    def end(self, own: bool) -> None:
        with self.changed:
            self._running[own] -= 1
            self._waiting.pop(threading.get_ident(), None)
            self.changed.notify_all()

    def join(self) -> None:
        """Wait until no rank runs, as the GPU is pretended no longer afterwards."""
        with self.changed:
            self._over = self._over or "the ranks have ended"
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: not self._running.total(), DEADLINE_S)

    def until_all_others_do(self) -> None:
        """Do not go on before all other threads of ranks wait."""
        while len(self._waiting) < self._running.total() - 1:
            time.sleep(0.001)

    def thread(self) -> type[threading.Thread]:
        """Return threading.Thread for what ranks start: their threads are the ranks', too."""
        waits = self

        class RankThread(threading.Thread):
            def start(self) -> None:
                self.rank = here("rank")
                waits.begin(False)
                super().start()

            def run(self) -> None:
                try:
                    with being(rank=self.rank):
                        super().run()
                except Hang:
                    pass
                finally:
                    waits.end(False)

        return RankThread


class Group:
    """A process group of NCCL: transfers between two ranks, or sums over several."""

    def __init__(self, name: str, ranks: Collection[int], nccl: Nccl) -> None:
        self.name, self.ranks, self._nccl = name, frozenset(ranks), nccl
        self.most = 0  # sends that a rank may leave unfinished; 0: any number
        self.begun: set[int] = set()  # the ranks that have used it
        self.left: set[int] = set()  # that have begun to destroy it, or to abort it
        self.aborted: set[int] = set()
        self.sends: list[_Send] = []
        self.receives: list[int] = []  # how many events its rank's stream had when each was posted
        self.sums: defaultdict[int, dict[int, tuple[Tensor, Clock]]] = defaultdict(dict)
        self.told: Counter[int] = Counter()  # by rank

    def __repr__(self) -> str:
        return self.name

    def _get_backend(self, device: Any) -> Any:
        error = SimpleNamespace(name="SUCCESS")
        return SimpleNamespace(get_error=lambda: error, abort=lambda: self._nccl.abort(self))


@dataclass(eq=False)
class _Send:
    values: Tensor
    clock: Clock
    storages: set[int]


@dataclass(eq=False)
class _Open:
    """What a rank has posted, and of whose end its stream does not know."""

    group: Group
    matched: Callable[[], bool]
    known: Callable[[Clock], bool]
    reads: set[int] = field(default_factory=set)  # storages


class Work(dist.Work):
    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait, self._over = wait, False

    def wait(self, timeout: Any = None) -> bool:
        if not self._over:
            self._wait()
            self._over = True
        return True


class Nccl:
    """What travels between `ranks` threads."""

    def __init__(self, ranks: int, waits: Waits, exclusive: bool = False) -> None:
        self._waits, self._exclusive = waits, exclusive
        self._clocks: list[Clock] = [Counter() for _ in range(ranks)]
        self._open: list[list[_Open]] = [[] for _ in range(ranks)]
        self.rehearsed: list[Clock] = [Counter() for _ in range(ranks)]
        """By rank how many windows each rank has rehearsed, as far as it knows."""

    # What kernels wait for, and must not write

    def before_kernel(self) -> None:
        rank = here("rank")
        if self._exclusive and rank is not None:
            self._waits.wait(lambda: self._passed(rank), "its transfers at a kernel")

    def _passed(self, rank: int) -> bool:
        return all(one.matched() or rank in one.group.aborted for one in self._open[rank])

    def on_write(self, tensors: list[Tensor]) -> None:
        """Refuse to write what a send still reads, as far as this rank's stream can know."""
        rank = here("rank")
        if rank is None or here("graph") is not None or not self._open[rank]:
            return
        with self._waits.changed:
            self._open[rank] = [one for one in self._open[rank] if not one.known(self._clocks[rank])]
            reads = {storage for one in self._open[rank] for storage in one.reads}
        assert not reads & storages(tensors), "written while it is sent"

    def _tick(self, rank: int) -> int:
        self._clocks[rank][rank] += 1
        return self._clocks[rank][rank]

    # torch.distributed

    def isend(self, tensor: Tensor, dst: int, group: Group) -> Work:
        rank, number = self._begin(tensor, group), len(group.sends)
        unfinished = sum(bool(one.reads) for one in self._open[rank] if one.group is group)
        assert unfinished < group.most or not group.most, f"{group}: {unfinished} sends are unfinished"
        with self._waits.changed, _disable_current_modes():
            self._tick(rank)
            group.sends.append(_Send(tensor.clone(), self._clocks[rank].copy(), storages(tensor)))
            self._waits.changed.notify_all()
        return self._post(
            group,
            lambda: len(group.receives) > number,
            lambda clock: len(group.receives) > number and clock[dst] >= group.receives[number] > 0,
            lambda: None,
            f"rank {dst} to take {number} on {group}",
            storages(tensor),
        )

    def irecv(self, tensor: Tensor, src: int, group: Group) -> Work:
        rank, number = self._begin(tensor, group), len(group.receives)

        def take() -> None:
            send = group.sends[number]
            assert (send.values.shape, send.values.dtype) == (tensor.shape, tensor.dtype), group
            self._clocks[rank] |= send.clock
            group.receives[number] = self._tick(rank)
            tensor.copy_(send.values)

        with self._waits.changed, _disable_current_modes():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            group.receives.append(0)
            self._waits.changed.notify_all()
        what = f"{number} on {group} from rank {src}"
        return self._post(group, lambda: len(group.sends) > number, lambda _: False, take, what)

    def all_reduce(self, tensor: Tensor, group: Group) -> Work:
        rank = self._begin(tensor, group)
        told, ranks = group.sums[group.told[rank]], group.ranks
        group.told[rank] += 1

        def take() -> None:
            shares = [told[rank] for rank in sorted(told)]
            for _, clock in shares:
                self._clocks[rank] |= clock
            tensor.copy_(torch.stack([values for values, _ in shares]).sum(0))

        with self._waits.changed, _disable_current_modes():
            self._tick(rank)
            told[rank] = tensor.clone(), self._clocks[rank].copy()
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            self._waits.changed.notify_all()
        return self._post(group, lambda: told.keys() == ranks, lambda _: False, take, f"the sum over {group}")

    def _begin(self, tensor: Tensor, group: Group) -> int:
        """Refuse what NCCL does, and what must not be in a window; connect the group at its first use."""
        assert is_tagged(tensor), f"No backend type associated with {tensor.device}"
        assert tensor.is_contiguous(), "Tensors must be contiguous"
        if tensor.dtype not in NCCL_DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        rank: int = here("rank")
        if rank in group.aborted:
            raise RuntimeError(f"NCCL communicator was aborted on rank {rank}.")
        if here("watched"):
            assert group.begun == group.ranks, f"{group} is connected within a window"
            mine = self.rehearsed[rank]
            late = [other for other in group.ranks if mine[other] < mine[rank]]
            assert not late, f"rank {rank} begins on {group}, and ranks {late} may still rehearse"
        with self._waits.changed:
            group.begun.add(rank)
            self._waits.changed.notify_all()
        self._waits.wait(lambda: group.begun == group.ranks or rank in group.aborted, f"{group} to connect")
        return rank

    def _post(
        self,
        group: Group,
        matched: Callable[[], bool],
        known: Callable[[Clock], bool],
        take: Callable[[], None],
        what: str,
        reads: Collection[int] = (),
    ) -> Work:
        """Return the work of a transfer; `take`: what its end does, in the order of its rank's stream."""
        rank = here("rank")
        one = _Open(group, matched, known, set(reads))
        self._open[rank].append(one)

        def end() -> None:
            self._waits.wait(lambda: matched() or rank in group.aborted, what)
            with self._waits.changed, _disable_current_modes():
                if rank not in group.aborted:
                    take()
                self._open[rank] = [other for other in self._open[rank] if other is not one]

        return Work(end)

    # Its ends

    def abort(self, group: Group) -> None:
        """End the kernels of a group; then wait for the device, as ncclCommAbort frees memory of it."""
        rank = here("rank")
        with self._waits.changed:
            group.aborted.add(rank)
            group.left.add(rank)
            self._waits.changed.notify_all()
        self._waits.wait(lambda: self._passed(rank), f"the device, to abort {group}")

    def destroy(self, group: Group) -> None:
        """Wait for all kernels, and for the other ranks, as ncclCommDestroy does."""
        rank = here("rank")
        with self._waits.changed:
            group.left.add(rank)
            self._waits.changed.notify_all()
        if rank not in group.aborted:
            what = f"its kernels and for the others, to destroy {group}"
            self._waits.wait(lambda: self._passed(rank) and group.left >= group.begun, what)
