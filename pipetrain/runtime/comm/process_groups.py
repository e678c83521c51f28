"""The process groups between the ranks: one for each directed link, and one for each sum.

Two directions on one communicator deadlock if both ends send first, so each directed link has its own group.
Every rank makes all groups in the same order. A gloo group over all ranks carries everything but the stages'
messages; another group sums the gradient norms during a window.

After an error nothing is destroyed that may be in use: ncclCommDestroy waits for all kernels, and for the
other ranks; gloo's connections stay open as long as an object refers to a message. So `_end_transfers` comes
first.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store, _abort_process_group

from pipetrain.errors import ChannelError, Refused, of_all
from pipetrain.runtime.comm.channel import Channel
from pipetrain.runtime.comm.collectives import ERROR_SEND_S, Ranks, StopListeners, World, came_too_late
from pipetrain.runtime.comm.rendezvous import choose_interface, make_group, this_attempt
from pipetrain.runtime.comm.transfer_watch import Deadline
from pipetrain.runtime.device import gpu_of, nccl_obstacle
from pipetrain.schedule.actions import ALL, Edge, Placement, Tie
from pipetrain.schedule.lower import Link

_NEVER_SENT = 2**30 - 2  # a tag that is never sent
_runs = itertools.count()


def _fresh_store(world: World, limit_s: float) -> Store:
    """Return torchrun's store, or the program's, under a new prefix: keys of closed runs remain."""
    if dist.is_initialized() and not dist.is_torchelastic_launched():
        store: Store = dist.distributed_c10d._get_default_store()
    else:
        store = this_attempt(world).meet(limit_s)
    return PrefixStore(f"links {next(_runs)}", store)


class ProcessGroups(Ranks):
    """The ranks of a run and the process groups between them. `placement[stage]`: the ranks of a stage.

    `staged`: whether a GPU's messages go through host memory, over gloo, even if NCCL could carry them.
    `store`: for this run alone; None: a part of torchrun's.
    """

    def __init__(
        self,
        world: World,
        placement: Placement,
        links: Sequence[Link],
        device: torch.device,
        store: Store | None,
        timeout: float,
        staged: bool = False,
    ) -> None:
        super().__init__(world, timeout)
        self.placement = placement
        self.device = device
        # Twice as long, so that the channel's own deadline, whose error names the message, comes first.
        self._limit = timedelta(seconds=2 * timeout)
        self._groups: dict[Link, Any] = {}
        self._sums: dict[Tie, Any] = {}
        self._opened: set[Link] = set()  # of all ranks
        self._channels: list[Channel] = []
        self.deadline = Deadline(timeout, self._end_transfers, self._broken)
        """For what the device's stream waits for, over NCCL."""
        self._listeners: StopListeners | None = None  # over NCCL
        self._ending = Lock()  # held while transfers are being ended
        self._aborts: list[Thread] | None = None  # set once all transfers are being ended
        self.store: Store
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._owns_default_group = world.size > 1 and not dist.is_initialized()
        if world.size > 1:
            atexit.register(self._leave)
            choose_interface(world)
        with self._naming_errors("connect to the other ranks"):
            self.store = store or _fresh_store(world, timeout)
            if world.size > 1:
                self._meet()
            gpus = self.gather("which GPU each rank has", gpu_of(device))
            if any(gpus) and not all(gpus):
                why = f"rank {gpus.index([])} has no GPU, and others have: give it one, or set device=cpu"
                raise of_all(Refused(why), world.rank)
            self.nccl_obstacle = nccl_obstacle(gpus)
            """Why the ranks' GPUs cannot communicate over NCCL, or ""."""
            self.ranks_on_gpu = sum(gpu[:1] == gpus[world.rank][:1] for gpu in gpus)
            """How many ranks share this rank's GPU, itself included."""
            self.staged = device.type == "cuda" and (staged or bool(self.nccl_obstacle))
            self.backend = "nccl" if device.type == "cuda" and not self.staged else "gloo"
            self._wire_device = torch.device("cpu") if self.staged else device  # of what is sent
            if world.size > 1:
                self._connect()
        self.open(links)

    def _meet(self) -> None:
        limit = timedelta(seconds=self._timeout)
        if self._owns_default_group:
            make_group(self.world, self.store, limit)
            self._gloo = dist.group.WORLD
        else:
            self._gloo = dist.new_group(timeout=limit, backend="gloo")

    def _connect(self) -> None:
        if self.backend == "nccl":
            # NCCL's own watch would not name the message: see Deadline.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            self._listeners = StopListeners(self.for_thread(), self._lost)
        self._sums[ALL] = self._group(range(self.world.size))

    def _group(self, ranks: Collection[int]) -> Any:
        """Make a group of some ranks; all ranks call it, in the same order."""
        return dist.new_group(sorted(ranks), timeout=self._limit, backend=self.backend)

    def open(
        self, links: Sequence[Link], ties: Sequence[Tie] = (), placement: Placement | None = None
    ) -> None:
        """Connect the ends of links and the ranks of ties, if they are not connected. Raises ChannelError.

        `placement`: that of the plan, where it is another one than was known. All ranks call it.
        """
        self.placement = placement or self.placement
        new = [link for link in links if link not in self._opened]
        if self.world.size == 1 or not (new or ties):
            return
        self._opened.update(new)
        token = torch.zeros(1, device=self._wire_device)
        ranks_of = [set(ranks) for _, ranks in new] + [self.ranks_of(tie) for tie in ties]
        with self._naming_errors("connect to the other ranks"):
            groups = [self._group(ranks) for ranks in ranks_of]
            # The first message makes a connection, which takes long: send one now.
            for number in in_disjoint_rounds(ranks_of):
                group, tie_index = groups[number], number - len(new)
                if self.world.rank not in ranks_of[number]:
                    continue
                if tie_index >= 0:
                    self._sums[ties[tie_index]] = group
                    dist.all_reduce(token, group=group)
                else:
                    _, (source, target) = link = new[number]
                    self._groups[link] = group
                    if self.world.rank == source:
                        dist.send(token, target, group=group)
                    else:
                        dist.recv(token, source, group=group)
                self._settle("connect", ranks_of[number])

    def ranks_of(self, tie: Tie) -> set[int]:
        """Return the ranks that sum for a tie, or for ALL."""
        return {rank for stage in tie or range(len(self.placement)) for rank in self.placement[stage]}

    def sum_over_ranks(self, tie: Tie, numbers: Tensor) -> Tensor:
        """Return the sum of numbers over the ranks of a tie, which must all call it. Raises ChannelError."""
        sums = numbers.to(self._wire_device)
        with self._naming_errors("add up with the other ranks"):
            dist.all_reduce(sums, group=self._sums[tie])
            self._settle("add up with it", self.ranks_of(tie))
        return sums.to(self.device)

    def channel(self, buffer_size: int | Mapping[Edge, int], channels_last: bool = False) -> Channel:
        options = buffer_size, self._timeout, self.device, self.staged, channels_last
        self._channels.append(Channel(self._groups, *options, self._sums, self.deadline))
        return self._channels[-1]

    def close(self) -> None:
        """Destroy the process groups, after a successful run; a group that the program made stays."""
        if self._listeners:
            self.deadline.settle()
            torch.cuda.synchronize()  # a rank that leaves breaks what others still receive
            self.gather("the end", None)
            self._listeners.send_stop(self.world.rank, "")
        else:
            self.send_end()
        self._leave_groups()

    def abandon(self, why: str) -> None:
        """Leave the other ranks after an error: what they wait for from this rank fails at once.

        Over NCCL they are sent `why`; over gloo they see a closed connection.
        """
        with suppress(Exception):  # the original error counts
            if self._listeners and not self._listeners.announced:
                self._listeners.send_stop(self.world.rank, why)
            if self._gloo is not None and self._end_transfers():
                for group in self._in_use() if self._listeners else ():
                    _abort_process_group(group)
                self._leave_groups()

    def first_error(self, why: str) -> tuple[int, str]:
        """Return the rank with the first error of the run, and that error; this rank's is `why`."""
        first = self.world.rank, why
        if self.world.size > 1:
            with suppress(Exception):  # the store may have ended with its process
                rank, text = json.loads(self.store.compare_set("error", "", json.dumps(first)))
                first = int(rank), str(text)
        return first

    def check(self) -> None:
        self.deadline.check()

    def _lost(self, rank: int, why: str) -> None:
        self.deadline.fail(ChannelError(f"rank {self.world.rank} lost rank {rank}: {why}"))

    def _settle(self, doing: str, ranks: Collection[int]) -> None:
        """Make the host wait, outside of a window, for what the stream waits for from some ranks."""
        if self.backend == "nccl":
            arguments = self.world.rank, self._timeout, set(ranks) - {self.world.rank}, doing
            self.deadline.add(lambda why: came_too_late(*arguments))
            self.deadline.settle()

    def _in_use(self) -> list[Any]:
        return [*self._sums.values(), *self._groups.values()]

    def _broken(self) -> bool:
        return any(group._get_backend(self.device).get_error().name != "SUCCESS" for group in self._in_use())

    def _end_transfers(self) -> bool:
        """End all transfers, so that waits for them fail; return whether all have ended.

        NCCL's communicators are aborted at the same time: ncclCommAbort may wait for the device, and so for
        a kernel of the next one. Grouped NCCL calls belong to one thread, and torch gives each abort a thread
        of its own, so grouping would not help. A gloo group closes a connection on which a wait times out.
        """
        with self._ending:
            if self._aborts is None:
                of_nccl = self._in_use() if self.backend == "nccl" else []
                of_gloo = [self._gloo] if self.backend == "nccl" else [self._gloo, *self._in_use()]
                backends = [group._get_backend(self.device) for group in of_nccl]
                self._aborts = [Thread(target=backend.abort, daemon=True) for backend in backends]
                for abort in self._aborts:
                    abort.start()
                for group, peer in itertools.product(of_gloo, {*range(self.world.size)} - {self.world.rank}):
                    with suppress(RuntimeError, ValueError):  # it is closed, or the peer is in another group
                        never = dist.irecv(torch.empty(1), peer, group=group, tag=_NEVER_SENT)
                        never.wait(timedelta(milliseconds=1))  # type: ignore[union-attr]
            for abort in self._aborts:
                abort.join(ERROR_SEND_S)
            return not any(abort.is_alive() for abort in self._aborts)

    def _leave(self) -> None:
        """Leave the open groups when the program ends, and send that to the other ranks.

        The groups' threads drop tensors of past collectives at any time, and one that takes Python's lock
        while Python ends aborts the process. A Ctrl-C has nothing left to interrupt.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if not (self._listeners or hasattr(sys, "last_value")):  # else an error has ended it, and was printed
            self.send_end()
        self.abandon("its program has ended")

    def _leave_groups(self) -> None:
        """Destroy the groups and drop all references; our own default group destroys the others with it."""
        atexit.unregister(self._leave)
        groups: list[Any] = [] if self._gloo is None else [self._gloo]  # None: already destroyed
        if groups and not self._owns_default_group:
            groups += self._in_use()
        self._groups.clear()
        self._sums.clear()
        self._heads.clear()
        self._unwaited_sends.clear()
        self._gloo = None
        for channel in self._channels:
            channel.close()
        self.deadline.close()
        if self._listeners:
            self._listeners.join()
            self._listeners = None
        while groups:
            dist.destroy_process_group(groups.pop(0))


def in_disjoint_rounds(groups: Sequence[Collection[int]]) -> list[int]:
    """Return the numbers of groups of ranks, in an order that lets disjoint groups connect at once."""
    rounds: list[list[int]] = []
    for number, ranks in enumerate(groups):
        busy = [{rank for member in members for rank in groups[member]} for members in rounds]
        free = [members for members, ranks_of in zip(rounds, busy, strict=True) if ranks_of.isdisjoint(ranks)]
        if free:
            free[0].append(number)
        else:
            rounds.append([number])
    return [number for members in rounds for number in members]
