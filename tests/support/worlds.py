"""Gloo worlds: real processes, a file for a rendezvous, a hard deadline, nothing left behind."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from pipetrain.runtime.mesh import World
from pipetrain.seal import Seal, SealedStore

Work = Callable[..., Any]
"""(world, store, *arguments) -> something picklable."""


def run_world(work: Work, size: int, *arguments: Any, deadline: float = 120) -> list[Any]:
    """Run `work` in `size` processes and return what each returned, by rank.

    Raises AssertionError with the first traceback where one fails, or with the ranks that were still running
    at the deadline (seconds); kills whatever is left.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "tests.support.jobs"])  # imported once for all ranks
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            process = context.Process(
                target=_enter,
                args=(there, work, rank, size, str(Path(folder) / "store"), arguments),
                daemon=True,
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return _collect(pipes, monotonic() + deadline, deadline)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: list[Connection], end: float, deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(open_pipes, timeout=max(0.0, end - monotonic()))
        if not ready:
            late = sorted(set(range(len(pipes))) - set(results))
            raise AssertionError(f"ranks {late} were still running after {deadline} s")
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                failed, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                raise AssertionError(f"rank {rank} died without a word") from None
            if failed:
                raise AssertionError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _enter(
    pipe: Connection, work: Work, rank: int, size: int, store: str, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        world = World(rank, size, rank, size)
        sealed = SealedStore(dist.FileStore(store, size), Seal("of a test", ""))
        pipe.send((False, work(world, sealed, *arguments)))
    except BaseException:
        pipe.send((True, traceback.format_exc()))
