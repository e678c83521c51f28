"""What autograd saves of a forward: storages, each once, and whose they are.

Tensors that share memory share a storage, which is held once however many operations save it, and however
many layers hand it on. So a layer's storages are numbered here, and a stage joins those of its layers.

A split backward (see runtime/split.py) puts off the weight gradients of `DEAR` operations, matrix products
and convolutions: what these save, and the gradients of their outputs, are held from I until W.
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
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_ATEN = torch.ops.aten
_PADDED = ("default", "padding")  # a number, or a word such as "same"
DEAR = {
    F.linear,
    F.bilinear,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.mm,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
    # As they stand in a traced model:
    _ATEN.linear.default,
    _ATEN.bilinear.default,
    _ATEN.matmul.default,
    _ATEN.mm.default,
    _ATEN.bmm.default,
    _ATEN.addmm.default,
    _ATEN.baddbmm.default,
    _ATEN.convolution.default,
    *(getattr(packet, kind) for packet in (_ATEN.conv1d, _ATEN.conv2d, _ATEN.conv3d) for kind in _PADDED),
    _ATEN.conv_transpose1d.default,
    _ATEN.conv_transpose2d.input,
    _ATEN.conv_transpose3d.input,
}


@dataclass(frozen=True, slots=True)
class Storages:
    """The storages of a forward: `made` has the bytes of those that it makes, and returns or saves.

    Elsewhere they are numbered: n >= 0 is `made[n]`, and -1 - k the storage of what it takes as number k.
    """

    made: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()  # that of each output
    saved: frozenset[int] = frozenset()  # by autograd
    dear: frozenset[int] = frozenset()  # of these, by operations whose weight gradient can be put off
    gradients: int = 0  # bytes of the gradients of these operations' outputs


NONE = Storages()


def storage_of(tensor: Tensor) -> int:
    """Return the address of the storage that a tensor shares with its views."""
    return int(tensor.untyped_storage()._cdata)


def strided(*values: Any) -> list[Tensor]:
    """Return all tensors in a tree of values, except sparse ones."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.layout is torch.strided]


class Saving:
    """A context that notes what autograd saves of a forward over `weights`, which are not counted."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        weights = list(weights)
        self._weights = {id(t) for t in weights if t.requires_grad}
        self._apart = {storage_of(t) for t in strided(weights)}
        self._saved: list[Tensor] = []  # kept, so that no address is used twice
        self._dear: set[int] = set()
        self._gradients = 0
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
        self._saved = []
        return Storages(tuple(made), returned, frozenset(saved), frozenset(dear), self._gradients)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operation of `DEAR`."""
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        inputs = [t for t in given if id(t) not in self._weights]
        if self._within or len(inputs) != 1 or len(given) == 1:  # as Deferred.put_off has it
            return func(*args, **kwargs)
        self._within = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._within = False
        self._gradients += result.nbytes
        return result

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided and (key := storage_of(tensor)) not in self._apart:
            self._saved.append(tensor)
            if self._within:
                self._dear.add(key)
        return tensor.detach()  # a node that saves its own output would keep itself alive


class _Watch(TorchFunctionMode):
    def __init__(self, saving: Saving) -> None:
        super().__init__()
        self._saving = saving

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in DEAR:
            return self._saving.run(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
