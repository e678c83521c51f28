"""Watches a module while it is traced, for what a trace would fix or leave out.

A trace holds operations on tensors. A module that changes its own attributes, draws from Python's random
numbers or computes gradients by code of its own would be trained otherwise than in one process.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from pipetrain.errors import ConfigError

_OUT = "make the model an nn.Sequential of its layers, and such code stays inside one"
_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules"})
_TRACERS = ("/torch/export", "/torch/_export", "/torch/_functorch", "/torch/_dynamo", "/torch/fx")
_FUNCTION = vars(torch.autograd.Function)["apply"]  # a classmethod, not bound to a class
_HOOK = Tensor.register_hook
_SET = nn.Module.__setattr__


@dataclass(slots=True)
class Watch:
    """What was seen. `refused`: a sentence, or ""; `assigned`: module, attribute and value, old and new."""

    refused: str = ""
    assigned: list[tuple[nn.Module, str, Any, Any]] = field(default_factory=list)

    def assign(self, new: bool) -> None:
        """Give the module's attributes the values that it assigned, or those before."""
        for module, key, old, value in self.assigned if new else reversed(self.assigned):
            setattr(module, key, value if new else old)


@contextmanager
def watching(model: nn.Module) -> Iterator[Watch]:
    """Watch a module that runs meanwhile. Raises ConfigError for gradients by code of its own."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise ConfigError(
                f"{name or 'the model'} has a backward hook, which a trace would leave out: "
                f"remove it, or {_OUT}"
            )
    names = {id(module): name for name, module in model.named_modules()}
    watch, known = Watch(), [(module, set(vars(module))) for module in model.modules()]

    def set_attribute(module: nn.Module, key: str, value: Any) -> None:
        if id(module) in names:
            why = _assigned(module, f"{names[id(module)]}.{key}".lstrip("."), key, value)
            watch.refused = watch.refused or why
            if why and key in vars(module):
                watch.assigned.append((module, key, vars(module)[key], value))
        _SET(module, key, value)

    before, states = _containers(model), _random_states()
    torch.autograd.Function.apply = classmethod(_refuse_function)  # type: ignore[assignment,method-assign]
    Tensor.register_hook = _refuse_hook  # type: ignore[method-assign]
    nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign,assignment]
    try:
        yield watch
    finally:
        torch.autograd.Function.apply = _FUNCTION  # type: ignore[method-assign]
        Tensor.register_hook = _HOOK  # type: ignore[method-assign]
        nn.Module.__setattr__ = _SET  # type: ignore[method-assign]
        for module, before_it in known:  # what torch.export leaves behind
            for key in vars(module).keys() - before_it:
                if isinstance(vars(module)[key], FakeTensor):
                    del vars(module)[key]
    after = _containers(model)
    for name in sorted(before.keys() & after.keys()):
        if not _same(before[name], after[name]):
            watch.refused = watch.refused or _changing(name, "")
    if states != _random_states():
        watch.refused = watch.refused or (
            f"the model draws from Python's or NumPy's random numbers, and a trace would fix what it drew: "
            f"draw by torch, or {_OUT}"
        )


def _assigned(module: nn.Module, name: str, key: str, value: Any) -> str:
    """Return why a module may not assign an attribute, or ""."""
    caller = sys._getframe(2)
    if any(tracer in caller.f_code.co_filename for tracer in _TRACERS):
        return ""
    where = f" at {caller.f_code.co_filename.rpartition('/')[2]}:{caller.f_lineno}"
    if key in module._parameters or key in module._buffers:
        old = module._parameters.get(key, module._buffers.get(key))
        if old is value:
            return ""
        return (
            f"the model assigns {name} anew{where}, which no stage would see: change a buffer in place "
            f"(self.{key}.copy_(...)), and parameters only by the optimizer"
        )
    old = vars(module).get(key)
    if (
        old is None
        or key not in vars(module)
        or any(isinstance(t, Tensor) for t in tree_leaves([old, value]))
    ):
        return ""  # made when it is first used, or an intermediate result
    return "" if _same(old, value) else _changing(name, where)


def _changing(name: str, where: str) -> str:
    return (
        f"the model changes its attribute {name}{where} when it runs, and a trace would fix its value: keep "
        f"such state in a buffer, or {_OUT}"
    )


def _refuse_function(cls: type, *args: Any, **kwargs: Any) -> Any:
    raise ConfigError(
        f"the model uses the autograd Function {cls.__name__}{_caller()}, whose backward a trace would leave "
        f"out: {_OUT}"
    )


def _refuse_hook(tensor: Tensor, hook: Any) -> Any:
    raise ConfigError(
        f"the model registers a hook on a tensor{_caller()}, which a trace would leave out: {_OUT}"
    )


def _caller() -> str:
    frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and f.filename != __file__]
    return f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""


def _containers(model: nn.Module) -> dict[str, Any]:
    """Return copies of the lists, dicts and sets that a model's modules keep, except of tensors."""
    return {
        f"{name}.{key}".lstrip("."): value.copy()
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _REGISTRIES
        and not key.endswith("_hooks")
        and type(value) in (list, dict, set)
        and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    }


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    try:
        return type(old) is type(new) and bool(old == new)
    except Exception:  # such as a comparison of arrays within
        return True


def _random_states() -> Any:
    return random.getstate(), repr(np.random.get_state(legacy=False))
