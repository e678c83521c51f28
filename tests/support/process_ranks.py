"""Ranks that stay: they run one function after another, with what torchrun would give them.

A test of two ranks takes seconds where it starts them, and tenths here.
"""

from __future__ import annotations

import gc
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from itertools import count
from multiprocessing.connection import Connection, wait
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.trainer import pipeline
from tests.support import DEADLINE_S
from tests.support.fork_server import context

WORLDS = count()  # alike on the ranks of one set


class Ranks:
    """Processes that run the functions of a test module on each rank. They end with their parent."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what the function returns on each rank.

        Where it raises, or does not end, these ranks are given up, and the next call starts others.
        """
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                _send(pipe, function, arguments)
            return self._collected()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        from_server = context()
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        for rank in range(self.size):
            here, there = from_server.Pipe()
            process = from_server.Process(target=_serve, args=(there, rank, self.size, self._store.port))
            process.daemon = True
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def _collected(self) -> list[Any]:
        results: dict[int, Any] = {}
        end = monotonic() + DEADLINE_S
        while waiting := {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}:
            ready = wait(list(waiting), max(0.0, end - monotonic()))
            assert ready, f"ranks {sorted(waiting.values())} were still running after {DEADLINE_S:g} s"
            for pipe in waiting.keys() & ready:
                result, error = _receive(pipe)
                assert not error, f"rank {waiting[pipe]} failed:\n{error}"
                results[waiting[pipe]] = result
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def in_world(work: Callable[..., Any], *arguments: Any) -> Any:
    """Call `work`(world, store, *arguments) on a rank that stays, with a store of its own."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
    return work(World.current(), dist.PrefixStore(f"world {next(WORLDS)}", store), *arguments)


def run_world(work: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Call `work`(world, store, *arguments) on ranks that end after it; return what each returned."""
    ranks = Ranks(size)
    try:
        return ranks(in_world, work, *arguments)
    finally:
        ranks.close()


def gathered(item: object) -> list[Any]:
    """Return each rank's item, of any type: these are processes of one program on one machine."""
    if not dist.is_initialized():
        return [item]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, item)
    return found


def _send(pipe: Connection, *message: object) -> None:
    """Send copies: Connection.send would share the memory of tensors, which are lost if a rank ends."""
    pipe.send_bytes(pickle.dumps(message))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "CUDA_VISIBLE_DEVICES": "",
    }
    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = _receive(pipe)
        except EOFError:
            return
        try:
            result, error = function(*arguments), ""
        except Exception:
            result, error = None, traceback.format_exc()
        except SystemExit as end:  # this rank is to end, with that as its result
            _send(pipe, end.code, "")
            os._exit(0)
        except BaseException:
            result, error = None, traceback.format_exc()
        if not error:
            _clear()
        _send(pipe, result, error)


def _clear() -> None:
    """Close and leave what a function has left open: a gloo group's thread looks a hundred times a second."""
    for left in list(pipeline._open):
        left.close()
    for groups in [found for found in gc.get_objects() if isinstance(found, ProcessGroups)]:
        groups.abandon("")
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.excepthook = sys.__excepthook__  # torch installs its own where a program makes a group
