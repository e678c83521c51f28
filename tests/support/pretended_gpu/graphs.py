"""CUDA graphs of a pretended device: kernels that are noted, and run again on the same memory.

A graph keeps addresses, no tensors. What it has allocated belongs to its pool: when nobody holds a tensor of
it any more, the next capture into the pool may get its memory, so that each replay of that graph overwrites
it. What a graph uses of memory of no pool must still be there when it is replayed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from tests.support.pretended_gpu.streams import Gpu, Host, Refused, Stream, _here, being, here
from tests.support.pretended_gpu.tensors import garbage, is_tagged, storages, tag, tensors_in, written

_held = torch._C._storage_Use_Count
_one = torch.zeros(1)
_OWN = _held(_one.untyped_storage()._cdata) - 1  # of a storage that Python has seen, beside tensors


class Pool:
    """The memory of some graphs: what each has allocated, by storage."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []


class Graph:
    """torch.cuda.CUDAGraph."""

    def __init__(self) -> None:
        self.mode, self.spoilt = "", False  # of the capture
        self.host: Host | None = None
        self.allocated: dict[int, Tensor] = {}  # by storage
        self.holds: Counter[int] = Counter()  # by storage, how many tensors of this object have it
        self._used: dict[int, Tensor] = {}  # of other memory
        self._overwritten: list[Tensor] = []  # of earlier graphs of the pool
        self._noted: list[tuple[Any, Any, Any, Any]] = []
        self._undo: list[tuple[Tensor, Tensor]] = []
        self._written: list[Tensor] = []
        self._gpu: Gpu | None = None

    # Capture

    def note(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Note an operation, and run it for what it returns; what it writes is put back."""
        writes = written(func, args, kwargs)
        self._undo += [(t, t.clone()) for t in writes]
        made = tag(func(*args, **kwargs))
        before = storages(tensors_in(*args, *kwargs.values()))
        new = [t for t in tensors_in(made) if not storages(t) & before]
        self.allocated |= {t.untyped_storage()._cdata: self._address(t) for t in new}
        self._written += map(self._address, writes)
        noted = [tree_map_only(Tensor, self._address, part) for part in (args, kwargs, made)]
        self._noted.append((func, *noted))
        return made

    def fill(self, made: Tensor) -> None:
        """Note that a new tensor is filled as it is now."""
        values = made.clone()
        self.allocated[made.untyped_storage()._cdata] = self._address(made)
        self._noted.append((torch.clone, (values,), {}, self._address(made)))

    def _address(self, t: Tensor) -> Tensor:
        """Return a tensor of the same memory; a number of the host goes with the launch."""
        if not is_tagged(t):
            return t.clone()
        storage = t.untyped_storage()._cdata
        self.holds[storage] += 1
        alias = t.detach()
        if storage not in self.allocated:
            self._used.setdefault(storage, alias)
        return alias

    @contextmanager
    def captured(self, gpu: Gpu, pool: Pool, mode: str) -> Iterator[None]:
        """Note what runs: nothing has run afterwards."""
        self._gpu, self.host, self.mode = gpu, gpu.host, mode
        gpu.host.graphs.add(self)
        self._overwritten = [
            t for graph in pool.graphs for t in graph.allocated.values() if not self._in_use(t)
        ]
        gpu.captures.append(self)
        thread = Thread(target=_watch, args=(gpu, here("rank")), daemon=True)  # as a deadline's does
        thread.start()
        thread.join()
        try:
            with being(graph=self):
                yield
        finally:
            gpu.captures.remove(self)
            with _disable_current_modes():
                for tensor, before in reversed(self._undo):
                    tensor.data.copy_(before)
                for t in self.allocated.values():
                    garbage(t)
            self._undo = []
        pool.graphs.append(self)
        inside = {storage for graph in gpu.host.graphs for storage in graph.allocated}
        self._used = {storage: t for storage, t in self._used.items() if storage not in inside}

    def _in_use(self, t: Tensor) -> bool:
        """Return whether anybody but graphs holds the memory of a tensor."""
        assert self.host is not None
        storage = t.untyped_storage()._cdata
        return _held(storage) > _OWN + sum(graph.holds[storage] for graph in self.host.graphs)

    # Replay

    def replay(self) -> None:
        assert self._gpu is not None
        if any(not self._in_use(t) for t in self._used.values()):
            raise Refused("a graph uses memory that was freed")
        with _disable_current_modes(), torch.no_grad():
            self._gpu.launch([*self._used.values(), *self.allocated.values()], self._written)
            for t in self._overwritten:
                garbage(t)
            for func, args, kwargs, made in self._noted:
                again = func(*args, **kwargs)
                for old, new in zip(tensors_in(made), tensors_in(again), strict=True):
                    if storages(old) != storages(new):
                        self._gpu.on_write([old])
                        old.data.copy_(new)


def _watch(gpu: Gpu, rank: int | None) -> None:
    with being(rank=rank), suppress(Refused):
        gpu.touch("Event.query")


class capture:
    """torch.cuda.graph, with its faults: it stays on its stream if the capture was spoilt."""

    def __init__(self, gpu: Gpu, graph: Graph, pool: Pool | None, mode: str) -> None:
        self._gpu, self._graph, host = gpu, graph, gpu.host
        host.capturing = self._stream = host.capturing or gpu.stream()
        self._context = graph.captured(gpu, pool or Pool(), mode)

    def __enter__(self) -> None:
        self._gpu.synchronize()
        self._before: Stream | None = here("stream")
        _here.stream = self._stream
        self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)
        if self._graph.spoilt:
            raise Refused("operation failed due to a previous error during capture")
        _here.stream = self._before
