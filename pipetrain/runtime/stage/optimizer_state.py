"""An optimizer's state for each parameter, as tensors for a checkpoint.

The state may be any tree that can be packed, see packing.py: its JSON is a tensor of bytes, followed by the
tensors of the tree.

Some optimizers (such as schedule-free ones) also have state in the options of a parameter group. Options that
the optimizer or the program has changed since the start are saved; others may differ in a resumed run.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipetrain.model.packing import from_bytes, packed, to_bytes, unpacked

_CORRECTION = "correction"  # not a key of any optimizer


class OptimizerState:
    """The state of an optimizer, by parameter; `optimizer` has not stepped yet.

    `correction_state`: by parameter, stored with it. `options_we_set`: the options of a group that the run
    sets.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        correction_state: dict[Tensor, dict[str, Any]] | None = None,
        options_we_set: Collection[str] = ("params", "lr"),
    ) -> None:
        self._optimizer, self._options_we_set = optimizer, options_we_set
        self._correction_state = {} if correction_state is None else correction_state
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._initial_options = {k: copy.deepcopy(self._options(g)) for k, g in self._groups.items()}

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key not in self._options_we_set}

    def tensors_of(self, parameter: Tensor) -> list[Tensor]:
        """Return a parameter's state; complex tensors as pairs. Raises TypeError if it cannot be stored."""
        options, before = self._options(self._groups[id(parameter)]), self._initial_options[id(parameter)]
        changed = {k: v for k, v in options.items() if k not in before or not _equal(v, before[k])}
        tensors: list[Tensor] = []
        state = dict(self._optimizer.state.get(parameter, {}))
        if correction_state := self._correction_state.get(parameter):
            state[_CORRECTION] = correction_state
        tree = packed([state, changed], tensors, parameter)
        return [to_bytes(tree), *tensors]

    def restore(self, parameter: Tensor, tensors: Sequence[Tensor]) -> None:
        """Set the state of a parameter from the tensors of `tensors_of`."""
        tree, *values = tensors
        group = self._groups[id(parameter)]
        placed = partial(_copy_like, parameter)
        saved, changed = from_bytes(tree)["list"]
        options = copy.deepcopy(self._initial_options[id(parameter)])
        options |= self._options(unpacked(changed, values, placed))
        for key in self._options(group).keys() - options.keys():
            del group[key]
        for key, value in options.items():
            current = group.get(key)
            if isinstance(current, Tensor) and isinstance(value, Tensor):
                value = value.to(current.device)
            group[key] = value
        # As in torch.optim, the step count stays on the host, unless a kernel reads it.
        host = () if group.get("capturable") or group.get("fused") else ("step",)
        state = {
            key: unpacked(item, values, Tensor.clone if key in host else placed)
            for key, item in saved.get("items") or saved["dict"].items()
        }
        if correction_state := state.pop(_CORRECTION, None):
            self._correction_state[parameter] = correction_state
        self._optimizer.state[parameter] = state


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    return bool(a == b)


def _copy_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Copy state to the parameter's device, and into its memory format if it has its shape.

    It is a copy, as two stages of a rank that share a weight read the same tensors of a checkpoint.
    """
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
