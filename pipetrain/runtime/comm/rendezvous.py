"""How the ranks of a run find each other, in torchrun's store.

The store outlives the ranks that torchrun restarts. Each of its agents counts its own restarts: a replaced
node begins with 0 again. So the ranks count attempts: each one counts its starts in the store, and rank
0 answers the newest start of every other rank with its own number. Under this number they meet, so no key of
an earlier attempt is read. Every wait has a deadline.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from threading import Event, Thread

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipetrain.errors import ChannelError, cause_of
from pipetrain.runtime.comm.collectives import World, came_too_late

log = logging.getLogger("pipetrain")

START_S = 300.0  # for the ranks' imports
SILENCE_S = 10.0  # between two lines about a long wait
POLL_S = 0.02
DELAY_KEY = "delay"  # the key of the seconds that rank 0 may take longer
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
LOOPBACK = 127  # first byte of its addresses
OUTSIDE_ADDRESS = "192.0.2.1"  # from RFC 5737, in no network, so it is reached by the default route


def choose_interface(world: World) -> None:
    """Let gloo and NCCL listen only on the network of torchrun's address; existing settings stay.

    That is the loopback if all ranks are on this machine. Their default is the network of this machine's host
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
    """Return the name of the interface that leads to a host, as Linux reports it; None if unknown."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        address = _local_address(host)
        if address[0] == LOOPBACK:  # a machine's own name often stands for the loopback
            address = _local_address(OUTSIDE_ADDRESS)
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode())
                if fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24] == address:
                    return name
    return None


def _local_address(host: str) -> bytes:
    """Return this machine's address on the route to a host, without sending anything. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return socket.inet_aton(probe.getsockname()[0])


class Attempt:
    """A start of all ranks by torchrun; its `store` outlives it."""

    def __init__(self, world: World, store: Store) -> None:
        self._world = world
        self._store = PrefixStore("pipetrain", store)
        self._start = self._store.add(f"starts of rank {world.rank}", 1)
        self._attempt_store: Store | None = None
        self._answer_key = f"attempt of rank {world.rank}, start {self._start}"

    def send_delay(self, delay_s: float) -> None:
        """On rank 0: let the others wait so much longer for it to meet them. The next attempts keep it."""
        self._store.set(DELAY_KEY, str(delay_s))

    def receive_delay(self, limit_s: float) -> float | None:
        """On another rank: return what rank 0 has sent, None if it meets the others without a delay."""
        store = self._store
        with _meeting(self._world.rank):
            self._until(
                lambda: store.check([DELAY_KEY]) or store.check([self._answer_key]), limit_s, "rank 0"
            )
            return float(store.get(DELAY_KEY)) if store.check([DELAY_KEY]) else None

    def meet(self, limit_s: float) -> Store:
        """Return this attempt's store once all ranks have arrived. Raises ChannelError."""
        store, rank = self._store, self._world.rank
        if self._attempt_store is None:
            number = self._start
            with _meeting(rank):
                if rank == 0:
                    self._admit_ranks(store, limit_s)
                else:
                    self._until(lambda: store.check([self._answer_key]), limit_s, "rank 0")
                    number = int(store.get(self._answer_key))
                    store.set(f"attempt {number}/rank {rank}", "")
                    self._until(lambda: store.check([f"attempt {number}/all"]), limit_s, "all ranks")
            self._attempt_store = PrefixStore(f"attempt {number}", store)
        return self._attempt_store

    def _admit_ranks(self, store: Store, limit_s: float) -> None:
        missing, answered = set(range(1, self._world.size)), Counter[int]()

        def all_arrived() -> bool:
            for rank in sorted(missing):
                start = store.add(f"starts of rank {rank}", 0)
                if start > answered[rank]:  # it may be one of an earlier attempt, which then has no reader
                    store.set(f"attempt of rank {rank}, start {start}", str(self._start))
                    answered[rank] = start
                if store.check([f"attempt {self._start}/rank {rank}"]):
                    missing.discard(rank)
            return not missing

        self._until(all_arrived, limit_s, missing)
        store.set(f"attempt {self._start}/all", "")

    def _until(self, arrived: Callable[[], bool], limit_s: float, awaited: Collection[int] | str) -> None:
        """Poll the store, in Python rather than C++, so that a signal is handled."""
        end = time.monotonic() + limit_s
        while not arrived():
            if time.monotonic() > end:
                raise came_too_late(self._world.rank, limit_s, awaited, "start")
            time.sleep(POLL_S)


@cache
def this_attempt(world: World) -> Attempt:
    """Return the attempt of this process. Raises ChannelError."""
    with _meeting(world.rank):
        return Attempt(world, _torchrun_store(world))


@contextmanager
def _meeting(rank: int) -> Iterator[None]:
    """Name the rank that could not use the store of the rendezvous. Raises ChannelError."""
    try:
        yield
    except ChannelError:
        raise
    except RuntimeError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ChannelError(
            f"rank {rank} could not meet the others at {address}: {cause_of(error)}; look at what rank 0 says"
        ) from error


def _torchrun_store(world: World) -> Store:
    """Connect to torchrun's store, without the prefix of the agent's count; a single process has its own."""
    if world.size == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return dist.HashStore()  # type: ignore[attr-defined]
    store = _connected(world)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _connected(world: World) -> Store:
    """Connect to the store of the environment; without torchrun, rank 0 serves it. Raises RuntimeError."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    connected = Event()

    def warn_while_waiting() -> None:
        while not connected.wait(SILENCE_S):
            log.warning("pipetrain: rank %d still waits to meet the others at %s", world.rank, address)

    Thread(target=warn_while_waiting, daemon=True).start()
    try:
        store: Store = next(rendezvous("env://", timeout=timedelta(seconds=START_S)))[0]
        return store
    finally:
        connected.set()


def make_group(world: World, store: Store, limit: timedelta) -> None:
    """Make the process group of all ranks, over gloo. Raises ChannelError."""
    choose_interface(world)
    hook = sys.excepthook
    try:
        with _meeting(world.rank):
            dist.init_process_group(
                "gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit
            )
    finally:
        sys.excepthook = hook  # torch installs its own, which prints the rank
