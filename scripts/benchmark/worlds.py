"""The processes of a suite: met through a file, and never left behind.

On the CPU they are forked from a server that has imported torch; CUDA wants processes that are spawned.

Each has one thread, and the allocator's settings that a run of ours has, whoever's turn it is.
A rank that dies closes its pipe, which ends the suite; a parent that dies, however it does, takes its ranks
with it, because each watches it. Ctrl-C is the parent's alone.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from pipetrain.runtime.allocator import keep_freed_memory
from pipetrain.runtime.mesh import Mesh, World
from pipetrain.seal import Seal, SealedStore

TIMEOUT_S = 300.0  # of any wait between ranks
SILENCE_S = 900.0  # after which a suite that says nothing is given up
LAST_WORDS_S = 5.0  # before a deadline, when a rank tells where it stands
SLICES = 2  # stages a rank that a mesh has room for

Say = Callable[[str], None]
"""Tells the person who waits how far it is."""

Work = Callable[..., Any]
"""(mesh, say, *arguments) -> something picklable."""


def titled(say: Say, title: str) -> Say:
    """Return a `say` that puts a title before what is said."""
    return lambda text: say(f"{title}: {text}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of a world compute and how they send: see Mesh. On a GPU, all of them on the first one.

    `timeout`: seconds that any wait between ranks may take.
    """

    device: str = "cpu"
    staged: bool | None = None
    timeout: float = TIMEOUT_S


CPU = Place()


class WorldFailed(RuntimeError):
    """A rank failed, died or fell silent; the message says which, and its traceback."""


def run_world(
    work: Work, ranks: int, say: Say, *arguments: Any, place: Place = CPU, deadline: float = math.inf
) -> list[Any]:
    """Run `work` in so many processes and return what each returned, by rank. Raises WorldFailed.

    It may take `deadline` seconds. However this is left, by an exception too, its processes are gone.
    """
    end = monotonic() + deadline
    context: Any = multiprocessing.get_context("forkserver" if place.device == "cpu" else "spawn")
    context.set_forkserver_preload(["torch._dynamo", "benchmark.tasks"])  # imported once for all ranks
    pipes: list[Connection] = []
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=_enter,
                    args=(there, work, rank, ranks, str(Path(folder) / "store"), place, deadline, arguments),
                    daemon=True,
                )
                process.start()
                there.close()
                pipes.append(here)
                processes.append(process)
            return _collect(pipes, say, end, deadline)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collect(pipes: list[Connection], say: Say, end: float, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        left = max(0.0, end - monotonic())
        ready = wait(list(waiting), min(SILENCE_S, left))
        if not ready and left < SILENCE_S:
            raise WorldFailed(f"ranks {sorted(waiting.values())} were still running after {deadline:.0f} s")
        if not ready:
            raise WorldFailed(f"ranks {sorted(waiting.values())} said nothing for {SILENCE_S:g} s")
        for pipe, rank in waiting.items():
            if pipe not in ready:
                continue
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise WorldFailed(f"rank {rank} died without a word") from None
            if kind == "said":
                say(value)
            elif kind == "failed":
                raise WorldFailed(f"rank {rank} failed:\n{value}")
            else:
                results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _enter(
    pipe: Connection,
    work: Work,
    rank: int,
    ranks: int,
    store: str,
    place: Place,
    deadline: float,
    arguments: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if deadline < math.inf:  # where it stands, if it hangs
        faulthandler.dump_traceback_later(max(1.0, deadline - LAST_WORDS_S))
    if place.device == "cuda":
        share_gpu(rank)
    keep_freed_memory()
    try:
        mesh = connect(World(rank, ranks, rank, ranks), store, place)
        pipe.send(("done", work(mesh, _speaker(pipe, rank), *arguments)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _speaker(pipe: Connection, rank: int) -> Say:
    return (lambda text: pipe.send(("said", text))) if rank == 0 else (lambda text: None)


def share_gpu(rank: int) -> None:
    """Prepare a process that has not touched CUDA yet for ranks that share a GPU and talk over NCCL.

    NCCL takes ranks with one host id for one machine's, and refuses two on one GPU. With ids of their own
    they talk over sockets, here those of the loopback.
    """
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    os.environ.setdefault("NCCL_NET", "Socket")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # As `python -m pipetrain` has it; set anew, because a parent whose torch has met CUDA hands down LAZY.
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"


def connect(world: World, store: str, place: Place = CPU) -> Mesh:
    """Join the ranks by one mesh that serves every contestant, with up to SLICES stages a rank."""
    placement = list(range(world.size)) * SLICES if world.size > 1 else [0]
    edges = [edge for stage in range(len(placement) - 1) for edge in [(stage, stage + 1), (stage + 1, stage)]]
    meeting = None
    if world.size > 1:
        meeting = SealedStore(dist.FileStore(store, world.size), Seal(store, ""))  # type: ignore[attr-defined]
    device = torch.device("cuda", 0) if place.device == "cuda" else torch.device("cpu")
    return Mesh(world, placement, edges, device, meeting, place.timeout, place.staged)
