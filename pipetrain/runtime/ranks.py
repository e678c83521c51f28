"""The ranks of a run: how they find each other, and what they tell each other beside the stages' messages.

They find each other in torchrun's store. It outlives the ranks that torchrun restarts, and each of its agents
counts its own restarts: a node that was replaced begins with 0 again. So the ranks agree on an attempt. Each
one counts its starts in the store, and rank 0 answers the newest start of every other with its own number,
under which all of them meet: no key of an earlier attempt is read.

What they tell is JSON and tensors: nothing that is received is unpickled or run. Every wait has a deadline.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipetrain.errors import ChannelError, Refused
from pipetrain.network.values import TensorSpec, bytes_of
from pipetrain.runtime.channel import cause_of

log = logging.getLogger("pipetrain")

START_S = 300.0  # that the ranks' imports may take
SILENCE_S = 10.0  # between two lines about what takes long
POLL_S = 0.02
AT_ONCE = 504  # bytes of a rank's text in the first collective
ROUNDS = 32  # messages to and fro to compare two clocks
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
LOOPBACK = 127  # first byte of its addresses
ELSEWHERE = "192.0.2.1"  # of RFC 5737, in no network: the default route leads there
_TARGETS = 1  # tag of the targets; gloo keeps messages of different tags apart


@dataclass(frozen=True, slots=True)
class World:
    """The rank of a process among the others, as set by torchrun; a single process without it."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def current(cls) -> World:
        """Return the world of the process group, if there is one, else that of torchrun."""
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
        return cls(rank, size, *local)


def choose_interface(world: World) -> None:
    """Let gloo and NCCL listen only on the network of torchrun's address; existing settings are kept.

    That is the loopback if all ranks are on this machine. The default is the network of this machine's host
    name, which may be an unneeded one, or a loopback that other machines cannot reach.
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
    """Return the name of the interface that leads to a host, as Linux tells it; None if unknown."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        mine = _own_address(host)
        if mine[0] == LOOPBACK:  # a machine's own name often stands for it
            mine = _own_address(ELSEWHERE)
        for _, name in socket.if_nameindex():
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


class Attempt:
    """A start of all ranks by torchrun, whose `store` outlives it."""

    def __init__(self, world: World, store: Store) -> None:
        self._world = world
        self._store = PrefixStore("pipetrain", store)
        self._start = self._store.add(f"starts of rank {world.rank}", 1)
        self._met: Store | None = None

    @property
    def restarted(self) -> bool:
        """Whether torchrun has started this rank before."""
        return self._start > 1

    def remember(self, key: str, text: str) -> None:
        """Keep a text for later attempts."""
        self._store.set(key, text)

    def recall(self, key: str) -> str | None:
        """Return what an earlier attempt has kept, None if nothing."""
        return self._store.get(key).decode() if self._store.check([key]) else None

    def meet(self, limit_s: float) -> Store | None:
        """Return this attempt's store once all ranks have come; None without others. Raises ChannelError."""
        store, rank = self._store, self._world.rank
        if self._met is None and self._world.size > 1:
            number = self._start
            if rank == 0:
                self._lead(store, limit_s)
            else:
                key = f"attempt of rank {rank}, start {self._start}"
                self._until(lambda: store.check([key]), limit_s, "rank 0")
                number = int(store.get(key))
                store.set(f"attempt {number}/rank {rank}", "")
                self._until(lambda: store.check([f"attempt {number}/all"]), limit_s, "all ranks")
            self._met = PrefixStore(f"attempt {number}", store)
        return self._met

    def _lead(self, store: Store, limit_s: float) -> None:
        missing, answered = set(range(1, self._world.size)), Counter[int]()

        def all_came() -> bool:
            for rank in sorted(missing):
                start = store.add(f"starts of rank {rank}", 0)
                if start > answered[rank]:  # it may be one of an earlier attempt, which nobody waits for
                    store.set(f"attempt of rank {rank}, start {start}", str(self._start))
                    answered[rank] = start
                if store.check([f"attempt {self._start}/rank {rank}"]):
                    missing.discard(rank)
            return not missing

        self._until(all_came, limit_s, missing)
        store.set(f"attempt {self._start}/all", "")

    def _until(self, come: Callable[[], bool], limit_s: float, whom: Collection[int] | str) -> None:
        """Poll the store, not within C++, so that a signal is handled."""
        end = time.monotonic() + limit_s
        try:
            while not come():
                if time.monotonic() > end:
                    raise _waited(self._world.rank, limit_s, whom, "start")
                time.sleep(POLL_S)
        except ChannelError:
            raise
        except RuntimeError as error:
            raise ChannelError(
                f"rank {self._world.rank} lost torchrun's store in its start: {cause_of(error)}; look at "
                f"what rank 0 says"
            ) from error


@cache
def this_attempt(world: World) -> Attempt:
    """Return the attempt that this process belongs to."""
    return Attempt(world, _torchrun_store(world))


def _torchrun_store(world: World) -> Store:
    """Connect to torchrun's store, without the prefix of its agent's count; alone, one of this process."""
    if world.size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return dist.HashStore()  # type: ignore[attr-defined]
    store = _connected(world)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _connected(world: World) -> Store:
    """Connect to the store of the environment; without torchrun rank 0 keeps it. Raises ChannelError."""
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    come = Event()

    def remind() -> None:
        while not come.wait(SILENCE_S):
            log.warning("pipetrain: rank %d still waits to meet the others at %s", world.rank, where)

    Thread(target=remind, daemon=True).start()
    try:
        store: Store = next(rendezvous("env://", timeout=timedelta(seconds=START_S)))[0]
    except RuntimeError as error:
        raise ChannelError(
            f"rank {world.rank} could not meet the others at {where}: {cause_of(error)}; look at what rank 0 "
            f"says"
        ) from error
    finally:
        come.set()
    return store


def make_group(world: World, store: Store, limit: timedelta) -> None:
    """Make the process group of all ranks, over gloo. Raises RuntimeError."""
    choose_interface(world)
    hook = sys.excepthook
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)
    sys.excepthook = hook  # torch puts one in its place, which names the rank


class Ranks:
    """All ranks of a run, over gloo. `timeout`: seconds that a wait for the others may take.

    What it does with the others raises ChannelError where they do not come, or are lost.
    """

    def __init__(self, world: World, timeout: float, group: Any = None) -> None:
        self.world = world
        self._timeout = timeout
        self._all = group

    def gather(self, what: str, item: Any) -> list[Any]:
        """Return each rank's `item` as JSON has it: lists for tuples, keys that are strings.

        It is one collective; each rank's text that is longer than AT_ONCE bytes takes another one.
        """
        text = bytearray(json.dumps([what, item]).encode())
        if self.world.size == 1:
            return [json.loads(text)[1]]
        heads = torch.zeros((self.world.size, 8 + AT_ONCE), dtype=torch.uint8)
        begins = bytearray(struct.pack("q", len(text))) + text[:AT_ONCE].ljust(AT_ONCE)
        head = torch.frombuffer(begins, dtype=torch.uint8)
        with self._trying(f"exchange {what} with the others"):
            dist.all_gather([*heads], head, group=self._all)
            found = []
            for rank, (size, start) in enumerate(struct.iter_unpack(f"q{AT_ONCE}s", heads.numpy().tobytes())):
                theirs = bytearray(start[:size])
                if size > AT_ONCE:
                    theirs = text if rank == self.world.rank else bytearray(size)
                    dist.broadcast(torch.frombuffer(theirs, dtype=torch.uint8), rank, group=self._all)
                found.append(json.loads(theirs))
        for rank, (theirs, _) in enumerate(found):
            if theirs != what:
                raise ChannelError(
                    f"rank {self.world.rank} waits for {what}, and rank {rank} is at {theirs}: let all ranks "
                    f"call the same methods in the same order"
                )
        return [told for _, told in found]

    def tell(self, what: str, item: Any = None, source: int = 0) -> Any:
        """Return on every rank what rank `source` gives as `item`, as JSON has it."""
        return self.gather(what, item if self.world.rank == source else None)[source]

    def agree(self, doing: str, refusal: str = "", limit_s: float | None = None) -> None:
        """Wait for all ranks, of which none may refuse; raises Refused on every rank alike.

        A rank that refuses may call it in place of the next call of the others. `doing`: what all ranks have
        then done, such as "get ready". Ranks that do not come are named.
        """
        limit_s = self._timeout if limit_s is None else limit_s
        if self.world.size > 1:
            with self._trying(f"meet the others to {doing}"):
                try:
                    dist.monitored_barrier(self._all, timedelta(seconds=limit_s), wait_all_ranks=True)
                except RuntimeError as error:
                    if missing := re.search(r"[Rr]anks? ([\d, ]+) failed to pass", str(error)):
                        ranks = [int(rank) for rank in missing[1].split(",")]
                        raise _waited(self.world.rank, limit_s, ranks, doing) from error
                    raise
        for rank, why in enumerate(self.gather("the start", refusal)):
            if why:
                raise Refused(why if why.startswith(f"rank {rank} ") or not rank else f"rank {rank}: {why}")

    def most(self, what: str, mine: int) -> int:
        """Return the highest number of all ranks."""
        highest: int = max(self.gather(what, mine))
        return highest

    def copy_from_first(self, what: str, tensor: Tensor) -> None:
        """Overwrite a tensor in host memory with that of rank 0."""
        values = tensor.contiguous()
        with self._trying(f"receive {what}"):
            dist.broadcast(values.flatten().view(torch.uint8), 0, group=self._all)
        tensor.copy_(values)

    def post_tensor(self, what: str, tensor: Tensor, rank: int) -> Callable[[], None]:
        """Start to send a tensor in host memory to a rank, beside the messages of the stages.

        Returns what waits until it is sent.
        """
        trying = partial(self._trying, f"send {what} to rank {rank}")
        with trying():
            work = dist.isend(tensor.contiguous(), rank, group=self._all, tag=_TARGETS)

        def wait() -> None:
            with trying():
                assert work is not None  # as this rank is in the group
                work.wait()

        return wait

    def take_tensor(self, what: str, spec: TensorSpec, rank: int) -> Tensor:
        """Receive a tensor that a rank has posted."""
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        with self._trying(f"receive {what} from rank {rank}"):
            dist.recv(tensor, rank, group=self._all, tag=_TARGETS)
        return tensor

    def to_first(self, what: str, tensors: Sequence[Tensor], owner: int) -> list[Tensor]:
        """Return on rank 0, in host memory, the tensors that their `owner` gives; none on the others."""
        own = [tensor.cpu() for tensor in tensors]
        if owner == 0:
            return own
        forms = [[list(t.shape), str(t.dtype).removeprefix("torch.")] for t in own]
        forms, found = self.tell(f"the forms of {what}", forms, owner), []
        for tensor in own:
            with self._trying(f"send {what}"):
                dist.send(bytes_of(tensor.detach()), 0, group=self._all, tag=_TARGETS)
        for shape, dtype in forms if self.world.rank == 0 else ():
            spec = TensorSpec(tuple(shape), getattr(torch, dtype))
            numbers = self.take_tensor(what, TensorSpec((spec.nbytes,), torch.uint8), owner)
            found.append(numbers.view(spec.dtype).reshape(spec.shape))
        return found

    def clock_offset(self, now: Callable[[], float] = time.perf_counter) -> tuple[float, float]:
        """Return what to add to this rank's `now()` to get rank 0's, and the bound of its error, in seconds.

        All ranks must call it. As in NTP, rank 0's answer is assumed to be midway between question and
        answer; the round with the shortest round trip counts, and half of that is the error.
        """
        rounds = [(0.0, 0.0)] if self.world.rank == 0 else []
        with self._trying("compare its clock with rank 0's"):
            for rank in range(1, self.world.size):
                for _ in range(ROUNDS):
                    asked, token = now(), torch.zeros(1, dtype=torch.float64)
                    if self.world.rank == 0:
                        dist.recv(token, rank, group=self._all)
                        dist.send(token.fill_(now()), rank, group=self._all)
                    elif self.world.rank == rank:
                        dist.send(token, 0, group=self._all)
                        dist.recv(token, 0, group=self._all)
                        answered = now()
                        rounds.append(((answered - asked) / 2, token.item() - (asked + answered) / 2))
        error, offset = min(rounds)
        return offset, error

    @contextmanager
    def _trying(self, doing: str) -> Iterator[None]:
        try:
            yield
        except ChannelError:
            raise
        except RuntimeError as error:
            raise ChannelError(
                f"rank {self.world.rank} could not {doing}: {cause_of(error)}; look at what the other ranks "
                f"say, or give them longer than {self._timeout:g} s with timeout="
            ) from error


def _waited(rank: int, limit_s: float, whom: Collection[int] | str, doing: str) -> ChannelError:
    if not isinstance(whom, str):
        whom = f"rank{'s' * (len(whom) > 1)} {', '.join(map(str, sorted(whom)))}"
    return ChannelError(
        f"rank {rank} waited {limit_s:g} s for {whom} to {doing}; look at what the others say, or give them "
        f"longer with timeout="
    )
