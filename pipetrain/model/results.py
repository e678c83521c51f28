"""The results of a run by description, such as "output 0", and how those of two runs differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from pipetrain.model.specs import specs_of

Results = dict[str, Tensor]
GRADIENT, LOSS = "the gradient of ", "the loss"
FLOAT32 = torch.finfo(torch.float32).eps  # a model may compute a part in it


def add_gradients(
    results: Results,
    roots: Sequence[Tensor],
    leaves: Mapping[Tensor, str],
    weights: Sequence[Tensor] | None = None,
) -> None:
    """Add the gradients of roots, times `weights`, for named leaves; those with the same name are summed."""
    if not (roots and leaves):
        return
    grads = torch.autograd.grad(roots, list(leaves), weights, allow_unused=True)
    for name, grad in zip(leaves.values(), grads, strict=True):
        if grad is not None:
            results[f"{GRADIENT}{name}"] = grad.to_dense() + results.get(f"{GRADIENT}{name}", 0)


def difference(expected: Results, actual: Results, lowered: bool = False, most: float = math.inf) -> str:
    """Say what differs by more than rounding, or `most`, relative to its largest number; "" if nothing does.

    A gradient that is tiny compared with the largest one, as of a bias before a BatchNorm, is rounding noise.
    The loss, a mean of many terms, has less. `lowered`: whether autocast may have chosen other dtypes.
    """
    gradients = [tensor for name, tensor in expected.items() if name.startswith(GRADIENT)]
    largest = cache(lambda: max(map(_largest, gradients)))
    for name in dict.fromkeys([*expected, *actual]):  # in order
        left, right = expected.get(name), actual.get(name)
        if left is None or right is None:
            return f"{name} is {'new' if left is None else 'missing'}"
        if left.shape != right.shape or (left.dtype != right.dtype and not lowered):
            return f"{name} differs: {specs_of([left])[0]} and {specs_of([right])[0]}"
        if not left.numel():
            continue
        if left.dtype == right.dtype and torch.equal(left, right):
            continue
        size = max(_largest(left), 1e-3 * largest() if name.startswith(GRADIENT) else 0.0)
        eps = max(_eps(left.dtype), FLOAT32, _eps(torch.bfloat16) if lowered else 0.0)
        limit = min(most, (0.3 if name == LOSS else 3) * math.sqrt(eps)) * size
        if left.dtype == right.dtype and _eps(left.dtype) and _largest(left - right, math.inf) <= limit:
            continue
        exact = torch.complex128 if left.is_complex() else torch.float64
        left, right = left.to(exact), right.to(exact)
        off = (left - right).abs().masked_fill((left == right) | (left.isnan() & right.isnan()), 0.0)
        if not float(off.max()) <= limit:
            return f"{name} differs by {float(off.max()):.3g}, of {size:.3g}"
    return ""


def _largest(tensor: Tensor, not_finite: float | None = None) -> float:
    """Return the largest number of a tensor, or `not_finite`; by default the largest finite one."""
    if not tensor.numel() or tensor.dtype == torch.bool:
        return 0.0
    if _eps(tensor.dtype):
        largest = float(torch.linalg.vector_norm(tensor, math.inf))  # in one pass
        if math.isfinite(largest) or not_finite is not None:
            return largest if math.isfinite(largest) else not_finite or 0.0
    return float(tensor.abs().nan_to_num(0, 0, 0).max())


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0
