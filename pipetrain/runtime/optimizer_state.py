"""An optimizer's state of each parameter, as tensors for a checkpoint.

The state may be any tree of tensors, numbers, strings, lists, tuples and dicts. The tree is stored as JSON in
a tensor of bytes, in which each tensor is replaced by its index in the list that follows, and by how it lies
in memory where that is not as the parameter: products and sums round otherwise in another layout.

Some optimizers (such as schedule-free ones) also keep state in the options of a parameter group. Options that
the optimizer or the program has changed since the start are saved; others may differ in a resumed run.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipetrain.network.tensors import laid_out, layout_of

_BESIDE = "correction"  # no optimizer's own key


class OptimizerState:
    """The state of an optimizer, by parameter; `optimizer` has not stepped yet.

    `beside`: what a correction keeps of each parameter, which is stored with it. `by_us`: the options of a
    group that we set.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        beside: dict[Tensor, dict[str, Any]] | None = None,
        by_us: Collection[str] = ("params", "lr"),
    ) -> None:
        self._optimizer, self._beside = optimizer, {} if beside is None else beside
        self._by_us = by_us
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._began_with = {key: copy.deepcopy(self._options(group)) for key, group in self._groups.items()}

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in self._by_us}

    def of(self, parameter: Tensor) -> list[Tensor]:
        """Return a parameter's state; complex tensors as pairs. Raises TypeError if it cannot be stored."""
        if others := [key for key in self._optimizer.state if not isinstance(key, Tensor)]:
            raise TypeError(f"{others[0]!r} of no parameter")
        options, before = self._options(self._groups[id(parameter)]), self._began_with[id(parameter)]
        changed = {k: v for k, v in options.items() if k not in before or not _same(v, before[k])}
        tensors: list[Tensor] = []
        state = dict(self._optimizer.state.get(parameter, {}))
        if beside := self._beside.get(parameter):
            state[_BESIDE] = beside
        tree = _packed([state, changed], tensors, parameter)
        return [torch.frombuffer(bytearray(json.dumps(tree), "utf-8"), dtype=torch.uint8), *tensors]

    def restore(self, parameter: Tensor, tensors: Sequence[Tensor]) -> None:
        """Set the state of a parameter from the tensors of `of`."""
        tree, *values = tensors
        group = self._groups[id(parameter)]
        placed = partial(_placed, parameter)
        saved, changed = json.loads(bytes(tree.tolist()))["list"]
        for key, value in self._options(_unpacked(changed, values, placed)).items():
            now = group.get(key)
            if isinstance(now, Tensor) and isinstance(value, Tensor):
                value = value.to(now.device)
            group[key] = value
        # As in torch.optim, the step count stays on the host, unless a kernel reads it.
        host = () if group.get("capturable") or group.get("fused") else ("step",)
        state = {
            key: _unpacked(item, values, Tensor.clone if key in host else placed)
            for key, item in saved["dict"].items()
        }
        if beside := state.pop(_BESIDE, None):
            self._beside[parameter] = beside
        self._optimizer.state[parameter] = state


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)


def _packed(value: Any, tensors: list[Tensor], parameter: Tensor) -> Any:
    """Return a tree as JSON data, and append its tensors to `tensors`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        kind, value = "complex" if value.is_complex() else "tensor", value.resolve_conj()
        tensors.append(torch.view_as_real(value) if value.is_complex() else value)
        number, layout = len(tensors) - 1, layout_of(value, parameter)
        return {kind: [number, *layout] if layout else number}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(item, tensors, parameter) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _packed(item, tensors, parameter) for key, item in value.items()}}
    raise TypeError(f"values of type {type(value).__name__}")


def _unpacked(tree: Any, tensors: Sequence[Tensor], placed: Callable[[Tensor], Tensor]) -> Any:
    """Return the tree of `_packed`; `placed` copies a tensor that lies as the parameter does."""
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "dict":
        return {key: _unpacked(item, tensors, placed) for key, item in content.items()}
    if kind in ("list", "tuple"):
        items = [_unpacked(item, tensors, placed) for item in content]
        return items if kind == "list" else tuple(items)
    number, *layout = content if isinstance(content, list) else [content]
    value = placed(torch.view_as_complex(tensors[number]) if kind == "complex" else tensors[number])
    return laid_out(value, layout) if layout else value


def _placed(parameter: Tensor, value: Tensor) -> Tensor:
    """Copy state to the parameter's device, and into its memory format if it has its shape.

    A copy, as two stages of a rank that share a weight read the same tensors of a checkpoint.
    """
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
