"""Counts the memory of tensors in the host, at its most."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """The bytes of the tensors with data that were made within and are alive: `now`, and at their `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._met: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._meet((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self._meet(result, made=True)
        self.peak = max(self.peak, self.now)
        return result

    def _meet(self, values: Any, made: bool) -> None:
        for tensor in tree_leaves(values):
            if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor) or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if id(storage) not in self._met:
                size = storage.nbytes() if made else 0
                self.now += size
                self._met[id(storage)] = weakref.ref(storage, partial(self._forget, id(storage), size))

    def _forget(self, key: int, size: int, _: object) -> None:
        self.now -= size
        del self._met[key]
