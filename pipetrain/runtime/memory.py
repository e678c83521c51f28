"""What an optimizer remembers of each parameter, as tensors that a checkpoint can hold.

That may be any tree of tensors, numbers, words, lists, tuples and dicts. The tree becomes JSON in a tensor of
bytes, where each tensor has the number under which it follows; nothing of it is ever run.

Some optimizers (schedule-free ones, for one) remember in the options of a parameter's group, too. What they
have changed there belongs to what is remembered. What a person has set does not: it may be another when a run
goes on.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_SET_BY_US = ("params", "lr")


class Memory:
    """What `optimizer`, a new one, will remember."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._began_with = {key: copy.deepcopy(_options(group)) for key, group in self._groups.items()}

    def of(self, parameter: Tensor) -> list[Tensor]:
        """Return what is remembered of a parameter; complex tensors as pairs of real numbers.

        Raises TypeError, which says what it is, for what cannot be told so.
        """
        if others := [key for key in self._optimizer.state if not isinstance(key, Tensor)]:
            raise TypeError(f"{others[0]!r} of no parameter")
        options, before = _options(self._groups[id(parameter)]), self._began_with[id(parameter)]
        changed = {k: v for k, v in options.items() if k not in before or not _same(v, before[k])}
        tensors: list[Tensor] = []
        tree = _packed([dict(self._optimizer.state.get(parameter, {})), changed], tensors)
        return [torch.frombuffer(bytearray(json.dumps(tree), "utf-8"), dtype=torch.uint8), *tensors]

    def restore(self, parameter: Tensor, tensors: Sequence[Tensor]) -> None:
        """Go on from what was remembered of a parameter."""
        state, changed = _unpacked(json.loads(bytes(tensors[0].tolist())), tensors[1:])
        group = self._groups[id(parameter)]
        group.update(changed)
        # As torch.optim does: a count of steps stays on the host, unless a kernel reads it.
        host = () if group.get("capturable") or group.get("fused") else ("step",)
        self._optimizer.state[parameter] = {
            key: value if key in host else _placed(value, parameter) for key, value in state.items()
        }


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _SET_BY_US}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)


def _packed(value: Any, tensors: list[Tensor]) -> Any:
    """Return a tree as JSON has it; its tensors are put into `tensors`."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        kind = "complex" if value.is_complex() else "tensor"
        tensors.append(torch.view_as_real(value.resolve_conj()) if value.is_complex() else value)
        return {kind: len(tensors) - 1}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_packed(item, tensors) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _packed(item, tensors) for key, item in value.items()}}
    raise TypeError(f"values of type {type(value).__name__}")


def _unpacked(tree: Any, tensors: Sequence[Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "dict":
        return {key: _unpacked(item, tensors) for key, item in content.items()}
    if kind in ("list", "tuple"):
        items = [_unpacked(item, tensors) for item in content]
        return items if kind == "list" else tuple(items)
    return torch.view_as_complex(tensors[content]) if kind == "complex" else tensors[content]


def _placed(value: Any, parameter: Tensor) -> Any:
    """Put what is remembered where the parameter is, and where it has its shape in its order of numbers."""
    if isinstance(value, dict):
        return {key: _placed(item, parameter) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(item, parameter) for item in value)
    if not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
