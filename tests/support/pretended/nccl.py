"""NCCL between threads: a send is over when its receive is posted, and nothing is there before its wait.

Kernels of two streams are ordered by waits alone. So each rank's stream has a vector clock, and what is
written while a send of it may still read it is an error, also where this run would have gone well. With
`exclusive` a kernel waits for all transfers that its rank has posted, as one may that is loaded or allocates.
All waits are in one place, so that ranks that wait for each other are noticed at once.

`staged` makes it gloo: between host memories, and waited for by threads that are no ranks.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.support.deadlines import DEADLINE_S
from tests.support.pretended.device import here, is_tagged, storages

NCCL_DTYPES = {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
NCCL_DTYPES |= {torch.float16, torch.bfloat16, torch.float32, torch.float64}
NCCL_DTYPES |= {torch.float8_e4m3fn, torch.float8_e5m2}  # of messages alone
Clock = Counter[int]  # by rank the events of its stream that are known to be over


class Hang(AssertionError):
    """All ranks wait, and none for what another one has done."""


class Group:
    """A process group: transfers between two ranks, or sums over several."""

    def __init__(self, name: str, ranks: Collection[int]) -> None:
        self.name, self.ranks = name, frozenset(ranks)
        self.sends: list[_Send] = []
        self.receives: list[int] = []  # how many events its rank's stream had when each was posted
        self.sums: defaultdict[int, dict[int, tuple[Tensor, Clock]]] = defaultdict(dict)
        self.told: Counter[int] = Counter()  # by rank

    def __repr__(self) -> str:
        return self.name

    def _get_backend(self, device: Any) -> Any:
        return SimpleNamespace(get_error=lambda: SimpleNamespace(name="SUCCESS"), abort=lambda: None)


@dataclass(eq=False)
class _Send:
    values: Tensor
    clock: Clock
    storages: set[int]


@dataclass(eq=False)
class _Open:
    """What a rank has posted, and of whose end its stream does not know."""

    matched: Callable[[], bool]
    known: Callable[[Clock], bool]
    reads: set[int] = field(default_factory=set)  # storages


class Work(dist.Work):
    def __init__(self, wait: Callable[[], None], matched: Callable[[], bool]) -> None:
        super().__init__()
        self._wait, self._matched, self._over = wait, matched, False

    def wait(self, timeout: Any = None) -> bool:
        if not self._over:
            self._wait()
            self._over = True
        return True

    def is_completed(self) -> bool:
        return self._over or (self._matched() and self.wait())


class Nccl:
    """What travels between `ranks` threads."""

    def __init__(self, ranks: int, exclusive: bool = False, staged: bool = False) -> None:
        self._changed, self._staged = threading.Condition(), staged
        self._running, self._exclusive = ranks, exclusive
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        self._hang = ""
        self._clocks: list[Clock] = [Counter() for _ in range(ranks)]
        self._open: list[list[_Open]] = [[] for _ in range(ranks)]
        self._board: dict[int, dict[int, Any]] = defaultdict(dict)
        self._met: Counter[int] = Counter()

    # Waits

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        """Let a rank wait. Raises Hang where nobody goes on."""
        rank = here("rank")
        if self._staged:
            with self._changed:
                assert self._changed.wait_for(ready, DEADLINE_S), what
            return
        with self._changed:
            self._waiting[rank] = ready, what
            while not ready():
                if len(self._waiting) == self._running and not any(
                    one() for one, _ in self._waiting.values()
                ):
                    self._hang = "; ".join(f"rank {r} waits for {w}" for r, (_, w) in self._waiting.items())
                    self._changed.notify_all()
                if self._hang:
                    raise Hang(self._hang)
                if not self._changed.wait(DEADLINE_S):
                    raise Hang(f"rank {rank} waited for {what}")
            del self._waiting[rank]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Be one of the ranks. Who has gone is waited for in vain, and not at all after an error."""
        try:
            yield
        except BaseException as error:
            self._hang = self._hang or f"rank {here('rank')} has ended: {error!r}"
            raise
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def join(self) -> None:
        """Wait until no rank runs, as the GPU is pretended no longer afterwards."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._running, DEADLINE_S)

    def gather(self, item: Any) -> list[Any]:
        """Return what all ranks bring to their meeting of one number."""
        rank = here("rank")
        board = self._board[self._met[rank]]
        self._met[rank] += 1
        with self._changed:
            board[rank] = item
            self._changed.notify_all()
        self._wait(lambda: len(board) == len(self._clocks), "the others at a meeting")
        return [board[rank] for rank in sorted(board)]

    # What kernels wait for, and must not write

    def before_kernel(self) -> None:
        rank = here("rank")
        if self._exclusive and rank is not None:
            self._wait(lambda: all(one.matched() for one in self._open[rank]), "its transfers at a kernel")

    def on_write(self, tensors: list[Tensor]) -> None:
        """Refuse to write what a send still reads, as far as this rank's stream can know."""
        rank = here("rank")
        if rank is None or here("graph") is not None or not self._open[rank]:
            return
        with self._changed:
            self._open[rank] = [one for one in self._open[rank] if not one.known(self._clocks[rank])]
            reads = {storage for one in self._open[rank] for storage in one.reads}
        assert not reads & storages(tensors), "written while it is sent"

    def _tick(self, rank: int) -> int:
        self._clocks[rank][rank] += 1
        return self._clocks[rank][rank]

    # torch.distributed

    def isend(self, tensor: Tensor, dst: int, group: Group, tag: int = 0) -> Work:
        self._refuse(tensor)
        rank, number = here("rank"), len(group.sends)
        with self._changed, _disable_current_modes():
            self._tick(rank)
            group.sends.append(_Send(tensor.clone(), self._clocks[rank].copy(), storages(tensor)))
            self._changed.notify_all()
        return self._post(
            lambda: len(group.receives) > number,
            lambda clock: len(group.receives) > number and clock[dst] >= group.receives[number] > 0,
            lambda: None,
            f"rank {dst} to take {number} on {group}",
            storages(tensor),
        )

    def irecv(self, tensor: Tensor, src: int, group: Group, tag: int = 0) -> Work:
        self._refuse(tensor)
        rank, number = here("rank"), len(group.receives)

        def take() -> None:
            send = group.sends[number]
            assert (send.values.shape, send.values.dtype) == (tensor.shape, tensor.dtype), group
            self._clocks[rank] |= send.clock
            group.receives[number] = self._tick(rank)
            tensor.copy_(send.values)

        with self._changed, _disable_current_modes():
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            group.receives.append(0)
            self._changed.notify_all()
        return self._post(
            lambda: len(group.sends) > number, lambda _: False, take, f"{number} on {group} from rank {src}"
        )

    def all_reduce(self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Work:
        self._refuse(tensor)
        assert isinstance(group, Group)
        rank = here("rank")
        told, ranks = group.sums[group.told[rank]], group.ranks
        group.told[rank] += 1

        def take() -> None:
            shares = [told[rank] for rank in sorted(told)]
            for _, clock in shares:
                self._clocks[rank] |= clock
            tensor.copy_(torch.stack([values for values, _ in shares]).sum(0))

        with self._changed, _disable_current_modes():
            self._tick(rank)
            told[rank] = tensor.clone(), self._clocks[rank].copy()
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)
            self._changed.notify_all()
        return self._post(lambda: told.keys() == ranks, lambda _: False, take, f"the sum over {group}")

    def _post(
        self,
        matched: Callable[[], bool],
        known: Callable[[Clock], bool],
        take: Callable[[], None],
        what: str,
        reads: Collection[int] = (),
    ) -> Work:
        """Return the work of a transfer; `take`: what its end does, in the order of its rank's stream."""
        rank = here("rank")
        one = _Open(matched, known, set(reads))
        self._open[rank].append(one)

        def end() -> None:
            self._wait(matched, what)
            with self._changed, _disable_current_modes():
                take()
                self._open[rank] = [other for other in self._open[rank] if other is not one]

        return Work(end, matched)

    @contextmanager
    def patched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in ("isend", "irecv", "all_reduce"):
                stack.enter_context(patch.object(dist, name, getattr(self, name)))
            yield

    def _refuse(self, tensor: Tensor) -> None:
        assert is_tagged(tensor) != self._staged, f"No backend type associated with {tensor.device}"
        assert tensor.is_contiguous(), "Tensors must be contiguous"
        if not self._staged and tensor.dtype not in NCCL_DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
