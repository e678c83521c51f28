"""Tensors of a trial: made-up ones, those in a tree of values, and the storages that they share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipetrain.network.values import TensorSpec


def made_up(spec: TensorSpec, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor of ordinary numbers; whole numbers are 0, which every embedding has."""
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return torch.rand(spec.shape, dtype=spec.dtype, device=device)
    return torch.zeros(spec.shape, dtype=spec.dtype, device=device)


def storage_of(tensor: Tensor) -> int:
    """Return the address of the storage that a tensor shares with its views."""
    return int(tensor.untyped_storage()._cdata)


def strided(*values: Any) -> list[Tensor]:
    """Return all tensors in a tree of values, except sparse ones."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.layout is torch.strided]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging a traceback of an error that is reported otherwise."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
