"""The model that a program has given, as it was when it was cut.

A plan says which gradients travel, and a trace holds the numbers of the model. A program that changes these
later would train another model than it has: that is refused at the next window.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from pipetrain.errors import ConfigError
from pipetrain.network.modes import is_in_evaluation, warn_of_evaluation

_WAY_OUT = "to go on so, end this Pipeline by collect() and close(), and make another of the model"
Part = Callable[[], Any]
_OF_TORCH = ("_parameters", "_buffers", "_modules")


class Given:
    """What must not change of a model: what it trains, and its layers.

    Of one that is `traced` all modules, and the plain attributes of these and of objects such as a config.
    """

    def __init__(self, model: nn.Module, traced: bool) -> None:
        self._model = weakref.ref(model)  # what a program has dropped it does not change
        self._trained = _trained(model)
        self._parts = _parts(model, traced)
        self._attributes = _plain_attributes(model) if traced else []
        self._evaluates = is_in_evaluation(model)
        self._warned = False

    def prove(self, training: bool) -> None:
        """Refuse what has changed before a window, of training or of evaluation. Raises ConfigError.

        An evaluation needs no gradients, and puts all modules into evaluation mode.
        """
        model = self._model()
        if training and not self._warned:
            self._warned = True
            warn_of_evaluation(self._evaluates if model is None else is_in_evaluation(model))
        if model is None:
            return
        for name, held, key, trained in self._trained if training else ():
            if (now := held.get(key)) is not None and now.requires_grad != trained:
                raise ConfigError(
                    f"{name} of the model was {'trained' if trained else 'frozen'} when the model was cut "
                    f"into stages, and requires_grad={not trained} now, which they do not follow: freeze and "
                    f"unfreeze before the first batch; {_WAY_OUT}"
                )
        for name, held, key, part in self._parts:
            if held.get(key) is not part():
                raise ConfigError(
                    f"{name} of the model has been replaced since it was cut into stages, which they do not "
                    f"follow: replace it before the first batch; {_WAY_OUT}"
                )
        for name, held, key, value in self._attributes:
            if (training or key != "training") and _differs(value, held.get(key, value)):
                raise ConfigError(
                    f"{name} of the model was {value!r} when it was traced and has been changed since, which "
                    f"its trace does not follow: set it before the first batch, or make the model an "
                    f"nn.Sequential of its layers, which run as they are; {_WAY_OUT}"
                )


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
            plain = _plain_of(module)
            found |= {f"{of}.{key}": value for key, value in plain if not key.startswith("_")}
    return found | {f"model.{name}.requires_grad": trained for name, *_, trained in _trained(model)}


def _trained(model: nn.Module) -> list[tuple[str, dict[str, Any], str, bool]]:
    """Return name, place and requires_grad of each parameter."""
    return [
        (f"{name}.{key}" if name else key, module._parameters, key, p.requires_grad)
        for name, module in model.named_modules()
        for key, p in module._parameters.items()
        if p is not None
    ]


def _parts(model: nn.Module, traced: bool) -> list[tuple[str, dict[str, Any], str, Part]]:
    """Return name and place of each module and config, and what it is; if not traced, of each layer."""
    records = [(*place, partial(_same, place[1][place[2]])) for place in _records(model)] if traced else []
    return records + [
        (f"{name}.{key}" if name else key, module._modules, key, weakref.ref(child))
        for name, module in (model.named_modules() if traced else [("", model)])
        for key, child in module._modules.items()
        if child is not None
    ]


def _same(value: Any) -> Any:
    return value


def _plain_attributes(model: nn.Module) -> list[tuple[str, dict[str, Any], str, Any]]:
    """Return name, place and a copy of each attribute of numbers, strings and collections of these.

    Of the modules, and of the objects among their attributes that hold nothing else, such as a config.
    """
    found = [
        (f"{name}.{key}" if name else key, vars(module), key, deepcopy(value))
        for name, module in model.named_modules()
        for key, value in _plain_of(module)
    ]
    places = reversed([*_records(model)])
    records = {id(held[key]): (name, held[key]) for name, held, key in places}  # each where it is first
    for name, record in records.values():
        kinds = reversed(type(record).__mro__[:-1])
        held = {key: value for kind in kinds for key, value in vars(kind).items()} | vars(record)
        found += [
            (f"{name}.{key}", vars(record), key, deepcopy(value))
            for key, value in held.items()
            if not key.startswith("__") and _is_plain(value)
        ]
    return found


def _records(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield name and place of each object such as a config."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _OF_TORCH and not key.endswith("_hooks") and _is_record(value):
                yield f"{name}.{key}" if name else key, vars(module), key


def _is_record(value: Any) -> bool:
    """Return whether an object has nothing but plain values, and dtypes."""
    if callable(value) or _is_plain(value) or not hasattr(value, "__dict__"):
        return False
    return all(_is_plain(held) or isinstance(held, torch.dtype) for held in vars(value).values())


def _plain_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if key not in _OF_TORCH and not key.endswith("_hooks") and _is_plain(value):
            yield key, value


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list, set):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, bool | int | float | complex | str)


def _differs(value: Any, now: Any) -> bool:
    """Return whether a plain value is another one now. What was None may be made when it is first used."""
    if value is now or (value is None and not _is_plain(now)):
        return False
    return type(now) is not type(value) or bool(now != value)
