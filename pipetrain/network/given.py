"""The model that a program has given, as it was when it was cut.

A plan says which gradients travel, and a trace holds the numbers of the model. A program that changes these
later would train another model than it has: that is refused at the next window.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from pipetrain.errors import ConfigError

_OF_TORCH = ("_parameters", "_buffers", "_modules")
_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, partial)  # an activation, for example
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
log = logging.getLogger("pipetrain")


class Given:
    """What must not change of a model: what it trains, and its layers.

    Of one that is `traced` all modules, and the plain attributes of these and of objects such as a config.
    `replaced`: returns the name of a tensor that is another one now, of a model that is traced or not.
    """

    def __init__(self, model: nn.Module, traced: bool, replaced: Callable[[bool], str | None]) -> None:
        self._replaced = replaced
        self._model = weakref.ref(model)  # what a program has dropped it does not change
        self._traced = traced
        facts = _facts(model, traced).items()
        self._facts = {name: deepcopy(fact) if _is_plain(fact) else fact for name, fact in facts}
        self._warned = False

    def prove(self, training: bool) -> None:
        """Refuse what has changed before a window, of training or of evaluation. Raises ConfigError."""
        model = self._model()
        if model is None:
            return
        if training and not self._warned:
            self._warned = True
            if not any(module.training for module in model.modules()):
                log.warning(
                    "pipetrain: the model is in evaluation mode and is trained so, without dropout and with "
                    "the statistics of BatchNorm as they are: call model.train() before, if that is not meant"
                )
        if name := next(self._changed(model, training), None) or self._replaced(self._traced):
            raise ConfigError(
                f"since the model was cut into stages, which do not follow, this has changed: {name}; do so "
                f"before the first batch; to go on so, end this Pipeline by collect() and close(), and make "
                f"another of the model"
            )

    def _changed(self, model: nn.Module, training: bool) -> Iterator[str]:
        now = _facts(model, self._traced)
        for name, before in self._facts.items():
            if not training and name.rpartition(".")[2] in ("training", "requires_grad"):
                continue  # an evaluation needs no gradients, and puts all modules into evaluation mode
            missing = None if isinstance(before, weakref.ref) else before  # no plain attribute any more
            fact = now.get(name, missing)
            made = before is None and not _is_plain(fact)  # at its first use
            if fact is not before and not made and (type(fact) is not type(before) or fact != before):
                yield name
        for name in now.keys() - self._facts.keys():
            holder, _, _ = name.rpartition(".")
            # Beside lists a new module is a part that no forward calls.
            if isinstance(now[name], weakref.ref) and isinstance(model.get_submodule(holder), _LISTS):
                yield name


def form_of(model: nn.Module) -> dict[str, Any]:
    """Return by name what says how a model trains, beside its tensors: it must be the same on all ranks.

    Classes and modes of the modules, what is trained, and the public attributes of torch's own modules. Those
    of a user's may differ, as `verbose = rank == 0` does.
    """
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        of = f"model.{name}".rstrip(".")
        found |= {of: type(module).__qualname__, f"{of}.training": module.training}
        if type(module).__module__.startswith("torch.nn"):
            own = vars(module).items()
            found |= {f"{of}.{k}": v for k, v in own if k[0] != "_" and _is_plain(v)}
    return found | {f"model.{name}.requires_grad": trained for name, trained in _trained(model).items()}


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)}


def _facts(model: nn.Module, traced: bool) -> dict[str, object]:
    """Return what must not change, by name: a module, by a weak reference, a function, or a plain value."""
    found: dict[str, object] = {f"{name}.requires_grad": trained for name, trained in _trained(model).items()}
    parts = model.named_modules(remove_duplicate=False) if traced else model._modules.items()
    found |= {name: weakref.ref(part) for name, part in parts if part is not None}
    for name, module in model.named_modules() if traced else [("", model)]:
        found[f"hooks of {name or 'it'}"] = [list(vars(module).get(kind, ())) for kind in _HOOKS]
    for name, p in model.named_parameters():
        found[f"hooks of {name}"] = bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))
    return found | dict(_attributes(model) if traced else ())


def _attributes(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield functions, numbers, strings and collections of these among the attributes, by name.

    Of the modules, and of the objects among their attributes that hold nothing else, each where it is first.
    """
    met: set[int] = set()
    for name, module in model.named_modules():
        kind: Any = type(module)
        of_class = {key: getattr(module, key) for key in _of_class(kind)}
        for key, value in ({"forward": ""} | of_class | vars(module)).items():
            of = f"{name}.{key}".lstrip(".")
            if key in _OF_TORCH or key.endswith("_hooks"):
                continue
            if isinstance(value, _FUNCTIONS) or _is_plain(value):
                yield of, value
            elif _is_record(value) and id(value) not in met:
                met.add(id(value))
                yield from ((f"{of}.{k}", v) for k, v in vars(value).items() if _is_plain(v))


@cache
def _of_class(kind: Any) -> list[str]:
    """Return the plain attributes of a user's class, which those of a module may come to hide."""
    own = [base for base in kind.__mro__ if base is not object and not base.__module__.startswith("torch.")]
    return [k for base in own for k, v in vars(base).items() if not k.startswith("__") and _is_plain(v)]


def _is_record(value: Any) -> bool:
    """Return whether an object, such as a config, has nothing but plain values, and dtypes."""
    if callable(value) or not hasattr(value, "__dict__"):
        return False
    return all(_is_plain(held) or isinstance(held, torch.dtype) for held in vars(value).values())


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list, set):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | complex | str)
