"""Counts the bytes that training holds, by stage, for ranks of ours and for another system alike.

Autograd's hooks see neither a forward that is run again inside of a backward nor gradients on their way. So
each operation of torch is looked at: the storage of a result counts from then on until it is freed, as on a
GPU's allocator, but for what an operation needs only inside of itself. What was there before (weights, the
optimizer's state, the batch) and the gradients of weights, with what is added to them, are not counted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SUMS = {torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor, torch.ops.aten.copy_.default}
"""What autograd adds up gradients by."""


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what is made in it, in any thread, for so many stages.

    What is made belongs to the stage that its thread is `at`; in a backward to that by which its node was
    marked; else to the last stage.
    """

    def __init__(self, stages: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stages = stages
        self._events: list[tuple[int, int, int]] = []  # number of a storage, stage, bytes: less when freed
        self._live: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        self._sums: list[list[int]] = []  # storages: of a sum, and what was added up
        self._numbers, self._gradients, self._thread = count(), set[int](), threading.local()

    @contextmanager
    def at(self, stage: int) -> Iterator[None]:
        """Let what this thread makes belong to a stage."""
        self._thread.stage = stage
        yield
        self._thread.stage = None

    def mark(self, stage: int, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Let the backward of what led from inputs to outputs belong to a stage."""
        ends = {tensor.grad_fn for tensor in inputs}
        nodes: list[Any] = [tensor.grad_fn for tensor in outputs]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in ends and "stage" not in node.metadata:
                node.metadata["stage"] = stage
                nodes += [before for before, _ in node.next_functions]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this thread does, an update at most."""
        hook = register_optimizer_step_pre_hook(self._note_gradients)
        with self:
            yield
        hook.remove()

    def peaks(self) -> list[int]:
        """Return the most bytes of each stage."""
        now, peaks = [0] * self.stages, [0] * self.stages
        for number, stage, nbytes in self._events:
            now[stage] += 0 if number in self._gradients else nbytes
            peaks[stage] = max(peaks[stage], now[stage])
        return peaks

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = operation(*args, **(kwargs or {}))
        taken, made = map(_storages, ((args, kwargs), results))
        for key in made.keys() - taken.keys():
            self._note(made[key])
        if operation in SUMS:
            self._sums.append(self._known((*made, *taken)))
        return results

    def _note(self, storage: torch.UntypedStorage) -> None:
        stage = getattr(self._thread, "stage", None)
        if stage is None:
            node: Any = torch._C._current_autograd_node()
            stage = (node.metadata if node else {}).get("stage", self.stages - 1)
        key, number, nbytes = id(storage), next(self._numbers), storage.nbytes()

        def freed(_: object) -> None:
            del self._live[key]
            self._events.append((number, stage, -nbytes))

        self._live[key] = number, weakref.ref(storage, freed)
        self._events.append((number, stage, nbytes))

    def _note_gradients(self, optimizer: Optimizer, *_: object) -> None:
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        self._gradients |= {*self._known(_storages([weight.grad for weight in weights]))}
        for total, *parts in filter(None, reversed(self._sums)):
            self._gradients |= {*parts} if total in self._gradients else set()

    def _known(self, keys: Iterable[int]) -> list[int]:
        return [self._live[key][0] for key in keys if key in self._live]


def _storages(values: Any) -> dict[int, torch.UntypedStorage]:
    """Return the storages of tensors, by the identity of their Python objects, in order."""
    tensors = (one for one in tree_leaves(values) if isinstance(one, Tensor))
    return {id(one.untyped_storage()): one.untyped_storage() for one in tensors}
