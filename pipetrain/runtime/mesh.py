"""The ranks' devices and memory, and the process groups between them.

There is one process group per directed edge, because two directions on one communicator deadlock when both
ends send first. Every rank creates and warms up all groups in the same order. A separate gloo group over all
ranks carries the collectives (an epoch's figures), and another one the gradient norms, during a window.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipetrain.errors import ConfigError
from pipetrain.runtime.channel import Channel
from pipetrain.runtime.meeting import choose_interface, make_group, this_attempt
from pipetrain.runtime.ranks import Ranks, World
from pipetrain.schedule.actions import ALL, Edge, Tie

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_ALLOCATOR = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def choose_device(world: World, device: str) -> torch.device:
    """Return the device for `device` = auto, cpu or cuda. Raises ConfigError if there is no GPU."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device=cuda needs a GPU that torch can use, and there is none; use device=auto")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def shares_gpu(world: World, device: torch.device) -> bool:
    """Return whether ranks share a GPU, which NCCL refuses but where each has an NCCL_HOSTID of its own."""
    several = device.type == "cuda" and world.local_size > torch.cuda.device_count()
    return several and "NCCL_HOSTID" not in os.environ


def keep_freed_memory() -> str:
    """Let glibc keep freed blocks of up to 32 MiB in this process; return a phrase that says what was done.

    It returns them to the system otherwise, and the next one of the same size is page-faulted in again. Each
    step frees and allocates the same blocks: VGG16 with a batch of 64 has 35,000 to 50,000 page faults a
    step, a tenth of its time. The peak stays as it is. Nothing is done with another C library, or where the
    environment has settings of its own. Call it early.
    """
    if chosen := [name for name in _ALLOCATOR if os.environ.get(name)]:
        return f"allocator as {', '.join(chosen)} says"
    with suppress(OSError, TypeError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_MMAP_THRESHOLD, 32 * 2**20):
            return "glibc's allocator keeps freed blocks of up to 32 MiB"
    return "the system's allocator"


_meetings = itertools.count()


def _fresh_store(world: World, limit_s: float) -> Store:
    """Return torchrun's store, or the program's, under a new prefix: the keys of closed meshes remain."""
    if dist.is_initialized() and not dist.is_torchelastic_launched():
        store: Store | None = dist.distributed_c10d._get_default_store()
    else:
        store = this_attempt(world).meet(limit_s)
    assert store is not None
    return PrefixStore(f"mesh {next(_meetings)}", store)


class Mesh(Ranks):
    """The process groups of one run. `placement[stage]` is the stage's rank.

    `staged`: whether a GPU's messages go through host memory, over gloo; None: if ranks share it. `store`: of
    this mesh alone; None with one rank.
    """

    def __init__(
        self,
        world: World,
        placement: Sequence[int],
        edges: Sequence[Edge],
        device: torch.device,
        store: Store | None,
        timeout: float,
        staged: bool | None = None,
    ) -> None:
        super().__init__(world, timeout)
        self.placement = list(placement)
        self.device = device
        self.staged = device.type == "cuda" and (shares_gpu(world, device) if staged is None else staged)
        self.backend = "nccl" if device.type == "cuda" and not self.staged else "gloo"
        self._place = torch.device("cpu") if self.staged else device  # of what is sent
        # Twice the limit, so that the channel's own deadline, which names the message, comes first.
        self._limit = timedelta(seconds=2 * timeout)
        self._groups: dict[Edge, Any] = {}
        self._sums: dict[Tie, Any] = {}
        self._opened: set[Edge] = set()  # of all ranks
        self._channels: list[Channel] = []
        self.store: Store | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._owned = world.size > 1 and not dist.is_initialized()
        if world.size > 1:
            atexit.register(self._leave)
            choose_interface(world)
            if self.backend == "nccl":  # its own watch would not say which message it was: see Deadline
                os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            with self._trying("connect to the other ranks"):
                self._connect(store)
            self.open(edges)

    def _connect(self, store: Store | None) -> None:
        limit = timedelta(seconds=self._timeout)
        self.store = store or _fresh_store(self.world, self._timeout)
        if self._owned:
            make_group(self.world, self.store, limit)
        self._all = dist.group.WORLD if self._owned else dist.new_group(timeout=limit, backend="gloo")
        self._sums[ALL] = self._group(range(self.world.size))

    def _group(self, ranks: Collection[int]) -> Any:
        """Make a group of some ranks; all ranks call it, in one order."""
        return dist.new_group(sorted(ranks), timeout=self._limit, backend=self.backend)

    def open(self, edges: Sequence[Edge], ties: Sequence[Tie] = ()) -> None:
        """Connect the ends of edges and the ranks of ties, if they are not yet. Raises ChannelError.

        All ranks call it.
        """
        new = [edge for edge in edges if edge not in self._opened]
        if self.world.size == 1 or not (new or ties):
            return
        self._opened.update(new)
        token = torch.zeros(1, device=self._place)
        with self._trying("connect to the other ranks"):
            for edge in new:
                ranks = source, target = tuple(self.placement[stage] for stage in edge)
                group = self._group(ranks)
                if self.world.rank not in ranks:
                    continue
                self._groups[edge] = group  # the first message makes a connection: send one now
                if self.world.rank == source:
                    dist.send(token, target, group=group)
                else:
                    dist.recv(token, source, group=group)
            for tie in ties:
                group = self._group({self.placement[stage] for stage in tie})
                if dist.get_rank(group) >= 0:
                    self._sums[tie] = group
                    dist.all_reduce(token, group=group)

    def channel(self, buffer_size: int | Mapping[Edge, int], channels_last: bool = False) -> Channel:
        how = buffer_size, self._timeout, self.device, self.staged, channels_last
        self._channels.append(Channel(self._groups, *how, self._sums))
        return self._channels[-1]

    def close(self) -> None:
        """Destroy the process groups, after a successful run; one that the program made itself stays."""
        if self.backend == "nccl" and self.world.size > 1:
            torch.cuda.synchronize()  # a rank that goes breaks what others still receive
            self.gather("the end", None)
        self._destroy()

    def abandon(self) -> None:
        """Leave the other ranks after an error: what they wait for from this one fails at once.

        The connections close when no message refers to them any longer.
        """
        with suppress(Exception):  # the error that was the cause counts
            self._destroy()

    def _leave(self) -> None:
        """Destroy the groups of a mesh that is open when the program ends.

        Their threads drop tensors of past collectives at their own time, and asking for Python's lock while
        Python ends aborts the process. Groups stay that still wait for other ranks, as this would too. A
        Ctrl-C that comes by now finds nothing left to interrupt.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not any(channel.adds_up for channel in self._channels):
            self.abandon()

    def _destroy(self) -> None:
        """Destroy the groups, of which all go with the default group if that is ours; nothing keeps one."""
        atexit.unregister(self._leave)
        groups: list[Any] = [] if self._all is None else [self._all]  # None: they have been destroyed
        if groups and not self._owned:
            groups += [*self._sums.values(), *self._groups.values()]
        self._groups.clear()
        self._sums.clear()
        self._all = None
        for channel in self._channels:
            channel.let_go()
        while groups:
            dist.destroy_process_group(groups.pop(0))
