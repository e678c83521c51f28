"""The operations with an expensive weight gradient: matrix products, convolutions and embeddings.

A split backward defers that gradient, and a selective recompute keeps the results of these operations. Both
use a mode that torch calls for each function, and so does the estimate of what is saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATEN = torch.ops.aten


def overloads(*packets: Any) -> Iterator[Any]:
    """Yield ATen operations and their overloads, as a traced model calls them."""
    for packet in packets:
        yield packet
        yield from (getattr(packet, name) for name in packet.overloads())


_PRODUCTS = ("matmul", "mm", "bmm", "addmm", "baddbmm")
_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
LOWERED = {  # computed in the lower precision under autocast
    F.linear,
    torch.linalg.matmul,
    Tensor.__matmul__,
    *(getattr(namespace, name) for namespace in (torch, Tensor) for name in _PRODUCTS),
    *(getattr(F, name) for name in _CONVOLUTIONS),
    *overloads(*(getattr(_ATEN, name) for name in ("linear", "convolution", *_PRODUCTS, *_CONVOLUTIONS))),
}
EXPENSIVE = {
    *LOWERED,
    F.bilinear,
    F.embedding,
    torch.einsum,
    torch.tensordot,
    torch.inner,
    *overloads(_ATEN.bilinear, _ATEN.embedding),
}

# Attention that shows its operations: has_torch_function only decides whether it is replaced as a whole.
_attention = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda tensors: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)


class Watching(TorchFunctionMode, ABC):
    """A mode that sees the products within nn.MultiheadAttention, which torch calls as one function."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is F.multi_head_attention_forward:
            with self:
                return _attention(*args, **(kwargs or {}))
        return self.run(func, args, kwargs or {})

    @abstractmethod
    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one function."""
