"""The process groups between the ranks: one for each directed link, and those of sums.

Two directions on one communicator deadlock if both ends send first, so each directed link has its own group.
Every rank creates and warms up all groups in the same order. A gloo group over all ranks carries what they
tell each other; another group adds up the gradient norms during a window.
"""

from __future__ import annotations

import atexit
import itertools
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipetrain.runtime.channel import Channel
from pipetrain.runtime.device import shares_gpu
from pipetrain.runtime.meeting import choose_interface, make_group, this_attempt
from pipetrain.runtime.ranks import Ranks, World
from pipetrain.schedule.actions import ALL, Edge, Placement, Tie
from pipetrain.schedule.lower import Link

_meetings = itertools.count()


def _fresh_store(world: World, limit_s: float) -> Store:
    """Return torchrun's store, or the program's, under a new prefix: the keys of closed ones remain."""
    if dist.is_initialized() and not dist.is_torchelastic_launched():
        store: Store = dist.distributed_c10d._get_default_store()
    else:
        store = this_attempt(world).meet(limit_s)
    return PrefixStore(f"links {next(_meetings)}", store)


class Links(Ranks):
    """The ranks of a run and the process groups between them. `placement[stage]`: the ranks of a stage.

    `staged`: whether a GPU's messages go through host memory, over gloo; None: if ranks share it. `store`: of
    these links alone; None: a part of torchrun's.
    """

    def __init__(
        self,
        world: World,
        placement: Placement,
        links: Sequence[Link],
        device: torch.device,
        store: Store | None,
        timeout: float,
        staged: bool | None = None,
    ) -> None:
        super().__init__(world, timeout)
        self.placement = placement
        self.device = device
        self.staged = device.type == "cuda" and (shares_gpu(world, device) if staged is None else staged)
        self.backend = "nccl" if device.type == "cuda" and not self.staged else "gloo"
        self._place = torch.device("cpu") if self.staged else device  # of what is sent
        # Twice the limit, so that the channel's own deadline, which names the message, comes first.
        self._limit = timedelta(seconds=2 * timeout)
        self._groups: dict[Link, Any] = {}
        self._sums: dict[Tie, Any] = {}
        self._opened: set[Link] = set()  # of all ranks
        self._channels: list[Channel] = []
        self.store: Store
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
            self.open(links)
        else:
            self.store = store or _fresh_store(world, timeout)

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

    def open(self, links: Sequence[Link], ties: Sequence[Tie] = ()) -> None:
        """Connect the ends of links and the ranks of ties, if they are not yet. Raises ChannelError.

        All ranks call it.
        """
        new = [link for link in links if link not in self._opened]
        if self.world.size == 1 or not (new or ties):
            return
        self._opened.update(new)
        token = torch.zeros(1, device=self._place)
        with self._trying("connect to the other ranks"):
            for link in new:
                _, ranks = link
                group, (source, target) = self._group(ranks), ranks
                if self.world.rank not in ranks:
                    continue
                self._groups[link] = group  # the first message makes a connection: send one now
                if self.world.rank == source:
                    dist.send(token, target, group=group)
                else:
                    dist.recv(token, source, group=group)
            for tie in ties:
                group = self._group(self.ranks_of(tie))
                if dist.get_rank(group) >= 0:
                    self._sums[tie] = group
                    dist.all_reduce(token, group=group)

    def ranks_of(self, tie: Tie) -> set[int]:
        """Return the ranks that sum something up for a tie, or for ALL."""
        return {rank for stage in tie or range(len(self.placement)) for rank in self.placement[stage]}

    def add_up(self, tie: Tie, numbers: Tensor) -> Tensor:
        """Return the sum of numbers over the ranks of a tie, which all call it. Raises ChannelError."""
        sums = numbers.to(self._place)
        with self._trying("add up with the other ranks"):
            dist.all_reduce(sums, group=self._sums[tie])
        return sums.to(self.device)

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
        """Destroy the groups that are open when the program ends, which other ranks are told if it ends well.

        Their threads drop tensors of past collectives at any time, and one that asks for Python's lock while
        Python ends aborts the process. Groups with an unfinished sum stay, as to destroy them would wait for
        other ranks. A Ctrl-C has nothing left to interrupt.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not hasattr(sys, "last_value"):  # else an error has ended it, and was printed
            self.say_end()
        if not any(channel.adds_up for channel in self._channels):
            self.abandon()

    def _destroy(self) -> None:
        """Destroy the groups and drop all references; a default group of ours takes the others with it."""
        atexit.unregister(self._leave)
        groups: list[Any] = [] if self._all is None else [self._all]  # None: they have been destroyed
        if groups and not self._owned:
            groups += [*self._sums.values(), *self._groups.values()]
        self._groups.clear()
        self._sums.clear()
        self._heads.clear()
        self._announced.clear()
        self._all = None
        for channel in self._channels:
            channel.let_go()
        while groups:
            dist.destroy_process_group(groups.pop(0))
