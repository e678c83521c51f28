"""The ranks' devices, and the process groups between them.

There is one process group per directed edge, because two directions on one communicator deadlock when both
ends send first. Every rank creates and warms up all groups in the same order. A separate gloo group over all
ranks carries the collectives (an epoch's figures), and another one the gradient norms, during a window.
"""

from __future__ import annotations

import atexit
import fcntl
import itertools
import json
import os
import re
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pipetrain.errors import ConfigError
from pipetrain.network.boundary import TensorSpec
from pipetrain.runtime.channel import ChannelError, DistChannel, LoopbackChannel, cause_of
from pipetrain.schedule.actions import Edge, Tie
from pipetrain.seal import SealedStore

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
LOOPBACK = 127  # first byte of its addresses
ELSEWHERE = "192.0.2.1"  # from RFC 5737, in no network: reached by the default route
ROUNDS = 32  # messages to and fro to compare two clocks
SHORT = 1024  # bytes of a message that `tell` sends at once
_TARGETS = 1  # tag of the targets; gloo keeps messages of different tags apart


@dataclass(frozen=True, slots=True)
class World:
    """The rank of a process among the others, as set by torchrun; a single process without it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls) -> World:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        defaults = (0, 1, 0, 1)
        return cls(*(int(os.environ.get(n, d)) for n, d in zip(names, defaults, strict=True)))

    @classmethod
    def current(cls) -> World:
        """Return the world of the process group, if there is one, else that of torchrun."""
        if not dist.is_initialized():
            return cls.from_environment()
        rank, size = dist.get_rank(), dist.get_world_size()
        local = (int(os.environ.get(n, d)) for n, d in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size)))
        return cls(rank, size, *local)


def choose_device(world: World, device: str) -> torch.device:
    """Return the device for `device` = auto, cpu or cuda. Raises ConfigError if there is no GPU."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device=cuda needs a GPU that torch can use, and there is none; use device=auto")
    return torch.device("cuda", world.local_rank % torch.cuda.device_count())


def shares_gpu(world: World, device: torch.device) -> bool:
    """Return whether ranks of this machine share a GPU: NCCL refuses that, so they use gloo.

    With an NCCL_HOSTID of its own for each rank it does not.
    """
    several = device.type == "cuda" and world.local_size > torch.cuda.device_count()
    return several and "NCCL_HOSTID" not in os.environ


def choose_interface(world: World) -> None:
    """Let gloo and NCCL listen only on the network of torchrun's address.

    That is the loopback if all ranks are on this machine. The default is the network of this machine's host
    name, which may be an unneeded one, or a loopback that other machines cannot reach. Existing settings are
    kept.
    """
    master = os.environ.get("MASTER_ADDR", "")
    if world.size == world.local_size or master == "localhost" or master.startswith("127."):
        name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    else:
        name = _interface_towards(master) if master else None
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # = for an exact match


def _interface_towards(host: str) -> str | None:
    """Return the name of the interface that leads to a host, None if unknown."""
    if sys.platform != "linux":
        return None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        mine = _own_address(host)
        if mine[0] == LOOPBACK:  # a machine's own name often stands for it
            mine = _own_address(ELSEWHERE)
        for _, name in socket.if_nameindex() if mine[0] != LOOPBACK else ():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                if fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24] == mine:
                    return name
    return None


def _own_address(host: str) -> bytes:
    """Return this machine's address on the route to a host, without sending anything. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return socket.inet_aton(probe.getsockname()[0])


_meetings = itertools.count()


def _fresh_store(limit: timedelta) -> Any:
    """Return torchrun's store under a new prefix: the keys of groups that were closed remain in it."""
    store, _, _ = next(rendezvous("env://", timeout=limit))
    return PrefixStore(f"pipetrain/{next(_meetings)}", store)


class Mesh:
    """The process groups of one run. `placement[stage]` is the stage's rank. `ties`: see `open`.

    `staged`: whether messages go through host memory, over gloo; None: if ranks share a GPU. What `gather`
    and `tell` exchange is sealed as the store is; messages are not.
    """

    def __init__(
        self,
        world: World,
        placement: Sequence[int],
        edges: Sequence[Edge],
        device: torch.device,
        store: SealedStore | None,
        timeout: float,
        staged: bool | None = None,
        ties: Sequence[Tie] = (),
    ) -> None:
        self.world = world
        self.placement = list(placement)
        self.device = device
        self.staged = shares_gpu(world, device) if staged is None else staged
        self.backend = "nccl" if device.type == "cuda" and not self.staged else "gloo"
        self._timeout = timeout
        self._seal = store.seal if store else None
        self._groups: dict[Edge, dist.ProcessGroup] = {}
        self._opened: set[Edge] = set()  # of all ranks
        self._channels: list[DistChannel] = []
        self._norms: dist.ProcessGroup | None = None
        self._ties: dict[Tie, dist.ProcessGroup] = {}
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._owned = world.size > 1 and not dist.is_initialized()
        if world.size > 1:
            atexit.register(self._leave)
            choose_interface(world)
            if self.backend == "nccl":  # its own watch would not say which message it was: see Deadline
                os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            try:
                self._connect(store)
            except RuntimeError as error:
                raise self._lost("connect to the other ranks", error) from error
            self.open(edges, ties)

    def _connect(self, store: SealedStore | None) -> None:
        limit = timedelta(seconds=self._timeout)
        raw = store.raw if store else None
        if self._owned:
            hook = sys.excepthook
            dist.init_process_group(
                "gloo",
                store=raw or _fresh_store(limit),
                rank=self.world.rank,
                world_size=self.world.size,
                timeout=limit,
            )
            if getattr(hook, "__name__", "") == "_distributed_excepthook":  # of torch: it names the rank
                sys.excepthook = hook
        self._all: Any = dist.group.WORLD if self._owned else dist.new_group(timeout=limit, backend="gloo")
        norms = dist.new_group(timeout=2 * limit, backend=self.backend)
        assert isinstance(norms, dist.ProcessGroup)
        self._norms = norms

    def open(self, edges: Sequence[Edge], ties: Sequence[Tie] = ()) -> None:
        """Connect the ends of edges and the ranks of ties, if they are not yet. Raises ChannelError.

        All ranks call it.
        """
        if self.world.size == 1:
            return
        try:
            self._open(edges)
            for tie in ties:
                self._tie(tie)
        except RuntimeError as error:
            raise self._lost("connect to the other ranks", error) from error

    def _open(self, edges: Sequence[Edge]) -> None:
        limit = timedelta(seconds=self._timeout)
        edges = [edge for edge in edges if edge not in self._opened]
        self._opened.update(edges)
        for edge in edges:
            ends = [self.placement[stage] for stage in edge]
            # Twice the limit, so that the channel's own deadline, which names the message, comes first.
            group = dist.new_group(ends, timeout=2 * limit, backend=self.backend)
            if self.world.rank in ends:
                assert isinstance(group, dist.ProcessGroup)
                self._groups[edge] = group
        place = torch.device("cpu") if self.staged else self.device
        for edge in edges:  # the first message makes a connection: send one now, edge by edge
            src, dst = (self.placement[stage] for stage in edge)
            token = torch.zeros(1, device=place)
            if self.world.rank == src:
                dist.send(token, dst, group=self._groups[edge])
            elif self.world.rank == dst:
                dist.recv(token, src, group=self._groups[edge])

    def _tie(self, tie: Tie) -> None:
        ranks = sorted({self.placement[stage] for stage in tie})
        group = dist.new_group(ranks, timedelta(seconds=2 * self._timeout), backend=self.backend)
        if self.world.rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            self._ties[tie] = group
            dist.all_reduce(torch.zeros(1, device="cpu" if self.staged else self.device), group=group)

    def channel(self, buffer_size: int | Mapping[Edge, int], channels_last: bool = False) -> DistChannel:
        made = DistChannel(
            self._groups,
            buffer_size,
            self._timeout,
            self.device,
            self.staged,
            channels_last,
            self._norms,
            self._ties,
        )
        self._channels.append(made)
        return made

    def loopback(
        self,
        edges: Sequence[Edge],
        ties: Sequence[Tie],
        buffer_size: int | Mapping[Edge, int],
        channels_last: bool = False,
    ) -> LoopbackChannel:
        """Return a channel for a rehearsal: like `channel`, to nobody."""
        nobody: Any = None
        return LoopbackChannel(
            dict.fromkeys(edges, nobody),
            buffer_size,
            self._timeout,
            self.device,
            self.staged,
            channels_last,
            ties=dict.fromkeys(ties, nobody),
        )

    def meet(self) -> None:
        """Wait for all ranks to call it. Raises ChannelError."""
        self.gather("the rehearsal", None)

    def tell(self, what: str, item: Any = None, source: int = 0) -> Any:
        """Return on every rank what rank `source` gives as `item`: JSON, as nothing else is safe to read.

        Raises ChannelError.
        """
        if self.world.size == 1:
            return item
        text = json.dumps([what, item]).encode() if self.world.rank == source else b""
        if self._seal and text:
            text = self._seal.close(f"from rank {source}", text)
        first = bytearray((len(text).to_bytes(8, "little") + text[: SHORT - 8]).ljust(SHORT))
        try:
            dist.broadcast(torch.frombuffer(first, dtype=torch.uint8), source, group=self._all)
            size = int.from_bytes(first[:8], "little")
            content = bytes(first[8 : 8 + size])
            if size > SHORT - 8:
                rest = bytearray(text[SHORT - 8 :].ljust(size - len(content)))
                dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), source, group=self._all)
                content += rest
        except RuntimeError as error:
            doing = f"tell {what}" if source == self.world.rank else f"hear {what} from rank {source}"
            raise self._lost(doing, error) from error
        if self._seal:
            content = self._seal.open(f"from rank {source}", content)
        theirs, told = json.loads(content)
        if theirs != what:
            raise ChannelError(
                f"rank {self.world.rank} waits for {what}, and rank {source} is at {theirs}: let all ranks "
                f"call the same methods in the same order"
            )
        return told

    def gather(self, what: str, item: Any) -> list[Any]:
        """Return each rank's `item` as JSON has it: lists for tuples, keys that are strings.

        Raises ChannelError.
        """
        item = json.loads(json.dumps(item))
        return [
            self.tell(f"{what} of rank {rank}", item if rank == self.world.rank else None, rank)
            for rank in range(self.world.size)
        ]

    def any(self, what: str, mine: bool) -> bool:
        """Return whether it is true on any rank. Raises ChannelError."""
        if self.world.size == 1:
            return mine
        ranks = torch.tensor([int(mine)])
        try:
            dist.all_reduce(ranks, group=self._all)
        except RuntimeError as error:
            raise self._lost(f"hear {what} of all ranks", error) from error
        return bool(ranks.item())

    def copy_from_first(self, what: str, tensor: Tensor) -> None:
        """Overwrite a tensor in host memory with that of rank 0. Raises ChannelError."""
        try:
            values = tensor.contiguous()
            dist.broadcast(values.flatten().view(torch.uint8), 0, group=self._all)
            tensor.copy_(values)
        except RuntimeError as error:
            raise self._lost(f"receive {what}", error) from error

    def post_tensor(self, tensor: Tensor, rank: int) -> dist.Work | None:
        """Start to send a tensor in host memory to a rank, beside the messages of the stages."""
        return dist.isend(tensor.contiguous(), rank, group=self._all, tag=_TARGETS)

    def take_tensor(self, what: str, spec: TensorSpec, rank: int) -> Tensor:
        """Receive a tensor that a rank has posted. Raises ChannelError."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        try:
            dist.recv(tensor, rank, group=self._all, tag=_TARGETS)
        except RuntimeError as error:
            raise self._lost(f"receive {what} from rank {rank}", error) from error
        return tensor

    def clock_offset(self, now: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
        """Return what to add to this rank's `now()` to get rank 0's, and the bound of its error, in seconds.

        All ranks must call it. As in NTP, rank 0's answer is assumed to be midway between question and
        answer; the round with the shortest round trip counts, and half of that is the error.
        """
        offset, error = 0.0, 0.0
        try:
            for rank in range(1, self.world.size):
                if self.world.rank == rank:
                    offset, error = self._ask_time(now)
                elif self.world.rank == 0:
                    self._tell_time(rank, now)
        except RuntimeError as failure:
            raise self._lost("compare its clock with rank 0's", failure) from failure
        return offset, error

    def _ask_time(self, now: Callable[[], float]) -> tuple[float, float]:
        rounds = []
        answer = torch.zeros(1, dtype=torch.float64)
        for _ in range(ROUNDS):
            asked = now()
            dist.send(answer, 0, group=self._all)
            dist.recv(answer, 0, group=self._all)
            answered = now()
            rounds.append(((answered - asked) / 2, answer.item() - (asked + answered) / 2))
        error, offset = min(rounds)
        return offset, error

    def _tell_time(self, rank: int, now: Callable[[], float]) -> None:
        token = torch.zeros(1, dtype=torch.float64)
        for _ in range(ROUNDS):
            dist.recv(token, rank, group=self._all)
            dist.send(torch.tensor([now()], dtype=torch.float64), rank, group=self._all)

    def _lost(self, doing: str, error: RuntimeError) -> ChannelError:
        cause = cause_of(error)
        if not re.search("timed? ?out", cause, re.IGNORECASE):
            return ChannelError(
                f"rank {self.world.rank} could not {doing}: {cause}; a rank has ended, look at what it says"
            )
        return ChannelError(
            f"rank {self.world.rank} could not {doing} within {self._timeout:g} s: {cause}; look at what the "
            f"other ranks say, or give it longer with timeout="
        )

    def close(self) -> None:
        """Destroy the process groups, after a successful run; one that the program made itself stays."""
        if self.backend == "nccl" and self.world.size > 1:
            torch.cuda.synchronize()  # a rank that goes breaks what others still receive
            self.gather("the end", None)
        for group in self._let_go():
            dist.destroy_process_group(group)

    def abandon(self) -> None:
        """Leave the other ranks after an error: what they wait for from this one fails at once.

        The connections close when no message refers to them any longer.
        """
        with suppress(Exception):  # the error that was the cause counts
            for group in self._let_go():
                dist.destroy_process_group(group)

    def _leave(self) -> None:
        """Destroy the groups of a mesh that is open when the program ends.

        Their threads drop the tensors of past collectives at their own time, with Python's lock, and asking
        for it while Python ends aborts the process. What still waits for other ranks would wait for them
        here: those groups stay.
        """
        if not any(channel.adds_up for channel in self._channels):
            self.abandon()

    def _let_go(self) -> list[Any]:
        """Return the groups to destroy, which nothing here refers to any longer."""
        atexit.unregister(self._leave)
        groups = self._made()
        self._groups.clear()
        self._ties.clear()
        self._all = self._norms = None
        for channel in self._channels:
            channel.let_go()
        return groups

    def _made(self) -> list[Any]:
        """Return the groups to destroy; all others go with the default group, if that is ours."""
        if self.world.size == 1 or self._all is None:  # or they have been destroyed
            return []
        if self._owned:
            return [self._all]
        return [self._all, self._norms, *self._groups.values(), *self._ties.values()]
