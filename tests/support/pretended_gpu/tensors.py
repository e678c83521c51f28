"""Tensors of host memory whose storages are tagged as a pretended device's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_UNSIGNED = {torch.uint16, torch.uint32, torch.uint64}
_WHOLE = _UNSIGNED | {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
CPU_ALONE = {
    "_amp_foreach_non_finite_check_and_unscale_": {torch.bfloat16},
    "_foreach_copy_": _UNSIGNED,
    "where": _UNSIGNED,
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addmv", "convolution"), _WHOLE),
}
"""By operation the dtypes of which the CPU has a kernel, and CUDA none, as its sources dispatch them."""


def is_tagged(t: Tensor) -> bool:
    """Return whether a tensor is on the device."""
    kind = type(t) in (Tensor, nn.Parameter, nn.Buffer) and t.layout is torch.strided
    return kind and getattr(t.untyped_storage(), "on_device", False)


def is_pinned(t: Tensor) -> bool:
    return getattr(t.untyped_storage(), "is_pinned_memory", False)


def tensors_in(*values: Any) -> list[Tensor]:
    """Return the tensors among arguments or results, as torch.utils._pytree does, but sooner."""
    found = [t for t in values if isinstance(t, Tensor)]
    return found + [t for some in values if isinstance(some, tuple | list) for t in tensors_in(*some)]


def tag(value: Any) -> Any:
    for t in tensors_in(value):
        if t.layout is torch.strided and not t.is_meta:
            t.untyped_storage().on_device = True  # type: ignore[attr-defined]
    return value


def storages(value: Any) -> set[int]:
    return {t.untyped_storage()._cdata for t in tensors_in(value)}


def garbage(t: Tensor) -> None:
    """Fill memory in which nothing is computed yet, or which others have had."""
    if t.is_floating_point() or t.is_complex():
        t.data.fill_(math.nan)


def written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes."""
    values = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | dict(kwargs)
    aliases = {one.name: one.alias_info for one in func._schema.arguments}
    found = [value for name, value in values.items() if (alias := aliases[name]) and alias.is_write]
    if "batch_norm" in func.__name__ and "backward" not in func.__name__:  # its schema does not say so
        found.append(args[3:5])
    return tensors_in(*found)
