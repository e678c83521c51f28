"""What autograd saves of a forward: storages, each once, and whose they are.

Tensors that share memory share a storage, which is held once however many operations save it, and however
many layers hand it on. So a layer's storages are numbered here, and a stage joins those of its layers.

A split backward (see runtime/split.py) puts off the weight gradients of `DEAR` operations: what these save,
and the gradients of their outputs, are held from I until W. A selective recomputation (see
runtime/recompute.py) keeps their results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from pipetrain.network.products import DEAR, Watching, overloads
from pipetrain.network.tensors import storage_of, strided

# By a selective recomputation, as they cost nothing:
_NOT_KEPT = {F.embedding, *overloads(torch.ops.aten.embedding)}


@dataclass(frozen=True, slots=True)
class Storages:
    """The storages of a forward: `made` has the bytes of those that it makes, and returns or saves.

    Elsewhere they are numbered: n >= 0 is `made[n]`, and -1 - k the storage of what it takes as number k.
    """

    made: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()  # that of each output
    saved: frozenset[int] = frozenset()  # by autograd
    dear: frozenset[int] = frozenset()  # of these, by operations whose weight gradient can be put off
    gradients: int = 0  # bytes of the gradients of these operations' results, and of all other weights
    results: frozenset[int] = frozenset()  # of operations with a weight that nothing overwrites


NONE = Storages()


class Saving:
    """A context that notes what autograd saves of a forward over `weights`, which are not counted."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        weights = list(weights)
        self._weights = {id(t) for t in weights if t.requires_grad}
        self._at_once = {
            id(t): t.nbytes for t in weights if t.requires_grad
        }  # of weights that are not put off
        self._apart = {storage_of(t) for t in strided(weights)}
        self._saved: list[Tensor] = []  # kept, so that no address is used twice
        self._dear: set[int] = set()
        self._gradients = 0
        self._results: list[tuple[Tensor, int]] = []  # with their version counters
        self._within = False  # an operation whose weight gradient can be put off
        self._stack = ExitStack()

    def __enter__(self) -> Saving:
        self._stack.enter_context(_Watch(self))
        self._stack.enter_context(saved_tensors_hooks(self._pack, lambda tensor: tensor))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def storages(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Storages:
        """Return the storages of the forward, which took and returned these tensors."""
        numbers = {storage_of(t): -1 - k for k, t in reversed(list(enumerate(inputs))) if strided(t)}
        made: list[int] = []

        def number(tensor: Tensor) -> int:
            key = storage_of(tensor)
            if key not in numbers:
                numbers[key] = len(made)
                made.append(tensor.untyped_storage().nbytes())
            return numbers[key]

        saved = [number(t) for t in self._saved]
        returned = tuple(number(t) for t in outputs)
        dear = {numbers[key] for key in self._dear}
        results = [number(t) for t, version in self._results if t._version == version]
        self._saved, self._results = [], []
        return Storages(
            tuple(made),
            returned,
            frozenset(saved),
            frozenset(dear),
            self._gradients + sum(self._at_once.values()),
            frozenset(results),
        )

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation of `DEAR`."""
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        trained = [t for t in operands if id(t) in self._weights or id(t._base) in self._weights]
        # As Deferred.put_off has it:
        if self._within or len(trained) == len(operands) or all(t.dim() < 2 for t in trained):
            return func(*args, **kwargs)
        self._within = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._within = False
        self._gradients += result.nbytes
        for operand in trained:
            self._at_once.pop(id(operand if id(operand) in self._weights else operand._base), None)
        if func not in _NOT_KEPT:
            self._results.append((result, result._version))
        return result

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and (key := storage_of(tensor)) not in self._apart:
            self._saved.append(tensor)
            if self._within:
                self._dear.add(key)
        return tensor.detach()  # a node that saves its own output would keep itself alive


class _Watch(Watching):
    def __init__(self, saving: Saving) -> None:
        super().__init__()
        self._saving = saving

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return self._saving.run(func, args, kwargs) if func in DEAR else func(*args, **kwargs)
