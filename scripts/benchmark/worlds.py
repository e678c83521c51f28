"""Processes that work together: met through a file, and never left behind.

Each has one thread. A rank that fails or dies ends all; a parent that dies, however it does, takes its ranks
with it, because each watches it. Ctrl-C is the parent's alone.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.multiprocessing.spawn import ProcessException, start_processes

from pipetrain.plan.plan import Plan
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.device import keep_freed_memory

TIMEOUT_S = 300.0  # of any wait between ranks
LAST_WORDS_S = 5.0  # before a deadline, for a rank's stack

Say = Callable[[Any], None]
"""Tells the person who waits how far it is: a text, or what reads as one."""

Work = Callable[..., Any]
"""(links, say, *arguments) -> something picklable."""

Meet = Callable[[World, str], Any]
"""(world, the path of a file to meet through) -> what the work is given first."""


def titled(say: Say, title: str) -> Say:
    """Return a `say` that puts a title before what is said."""
    return lambda text: say(f"{title}: {text}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of a world compute and how they send: see Links.

    On a GPU they share the first one, or are `apart`, each on its own where there are enough. `timeout`:
    seconds that any wait between ranks may take.
    """

    device: str = "cpu"
    staged: bool = False
    timeout: float = TIMEOUT_S
    apart: bool = False

    def __call__(self, world: World, path: str) -> ProcessGroups:
        """Join the ranks by links without edges: see `fitted`."""
        device = torch.device(self.device)
        if device.type == "cuda":
            apart = self.apart and torch.cuda.device_count() >= world.size
            device = torch.device("cuda", world.rank if apart else 0)
            if not apart and not self.staged:
                share_gpu(world.rank)
        keep_freed_memory()  # as a run of ours does, whoever's turn it is
        store = meeting(world, path) if world.size > 1 else None
        return ProcessGroups(
            world, [(rank,) for rank in range(world.size)], [], device, store, self.timeout, self.staged
        )


CPU = Place()
_fitted: dict[
    tuple[tuple[tuple[int, ...], ...], bool], ProcessGroups
] = {}  # by placement, and whether it is staged


def fitted(groups: ProcessGroups, plan: Plan) -> ProcessGroups:
    """Return links of the same ranks for a plan: with its placement, its edges and its ties.

    All ranks call it in the same order.
    """
    if groups.world.size == 1:
        return groups
    key = _, staged = tuple(plan.placement), groups.staged or plan.draft.policy is not None
    if key not in _fitted:
        _fitted[key] = ProcessGroups(
            groups.world, plan.placement, [], groups.device, None, groups._timeout, staged
        )
    _fitted[key].open(plan.links, plan.ties)
    return _fitted[key]


class WorldFailed(RuntimeError):
    """A rank failed or died, or all took too long; the message says which, and what it said."""

    @property
    def reason(self) -> str:
        """The first line of what was raised."""
        raised = str(self).rpartition("Traceback (most recent call last):")[2]
        (line, *_) = re.findall(r"^\S.*", raised, re.MULTILINE)  # frames are indented
        return str(line)


def run_world(
    work: Work, ranks: int, say: Say, *arguments: Any, place: Place = CPU, deadline: float = math.inf
) -> list[Any]:
    """Run `work` in so many processes, joined by links, and return what each returned, by rank.

    It may take `deadline` seconds. Raises WorldFailed. See run_ranks.
    """
    # On the CPU they are forked from a server that has imported torch; CUDA wants processes that are spawned.
    method = "forkserver" if place.device == "cpu" else "spawn"
    return run_ranks(place, work, ranks, say, arguments, deadline, method)


def run_ranks(
    meet: Meet,
    work: Work,
    ranks: int,
    say: Say,
    arguments: Sequence[Any] = (),
    deadline: float = math.inf,
    method: str = "forkserver",
) -> list[Any]:
    """Run `work` in so many processes and return what each returned, by rank. Raises WorldFailed.

    However this is left, by an exception too, the processes are gone.
    """
    context: Any = multiprocessing.get_context(method)
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.pipelining", "benchmark.contestants"])
    end, (here, there) = monotonic() + deadline, context.Pipe(duplex=False)
    listener = threading.Thread(target=_hear, args=(here, say))
    with tempfile.TemporaryDirectory() as folder:
        entry = ranks, Path(folder), meet, work, there, deadline, arguments
        running = start_processes(  # type: ignore[no-untyped-call]
            _enter, entry, ranks, join=False, daemon=True, start_method=method
        )
        there.close()
        listener.start()
        try:
            while not running.join(
                None if end == math.inf else max(0.0, end - monotonic()), grace_period=0.0
            ):
                if monotonic() >= end:
                    late = [rank for rank, process in enumerate(running.processes) if process.is_alive()]
                    raise WorldFailed(f"ranks {late} were still running after {deadline:.0f} s")
        except ProcessException as error:
            raise WorldFailed(f"rank {error.error_index}: {str(error).strip()}") from error
        finally:
            for process in running.processes:
                process.kill()
                process.join()
            listener.join()
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(ranks)]


def _hear(pipe: Connection, say: Say) -> None:
    """Say what rank 0 says, until no rank is left."""
    with suppress(EOFError):
        while True:
            say(pipe.recv())


def _enter(
    rank: int,
    ranks: int,
    folder: Path,
    meet: Meet,
    work: Work,
    pipe: Connection,
    deadline: float,
    arguments: Sequence[Any],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    gc.freeze()  # what has been imported is not looked through again and again
    if deadline < math.inf:  # where it stands, if it hangs
        faulthandler.dump_traceback_later(max(1.0, deadline - LAST_WORDS_S))
    met = meet(World(rank, ranks, rank, ranks), f"{folder}/store")
    result = work(met, _silent if rank else pipe.send, *arguments)
    (folder / str(rank)).write_bytes(pickle.dumps(result))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _silent(text: object) -> None:
    """Say nothing: rank 0 speaks for all."""


def meeting(world: World, path: str) -> Store:
    """Return the store through which the ranks of a world find each other: a file."""
    return dist.FileStore(path, world.size)  # type: ignore[attr-defined]


def share_gpu(rank: int) -> None:
    """Prepare a process that has not touched CUDA yet for ranks that share a GPU and talk over NCCL.

    NCCL takes ranks with one host id for one machine's, and refuses two on one GPU. With ids of their own
    they talk over sockets, here those of the loopback.
    """
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ.setdefault("NCCL_NET", "Socket")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
