"""Finds the places of a module's tensors, and replaces them temporarily.

Weight versions and estimates let a module run with other tensors than its own. Its code may use a tensor not
only through the registries: nn.LSTM keeps a list of its weights, and users keep another layer's weight to
share it. So each entry of a module's registries, of its attributes, and of the lists, dicts and objects
among them that holds a tensor is a place.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

MOST = 1000, 100_000  # entries of a container whose inside is looked at, and containers in all
_CONTAINERS: Any = dict | list | tuple | set | deque
OTHERS = {*sys.stdlib_module_names, "torch", "pipetrain"}
NamedContainer = tuple[str, Any]
"""A container, with its name."""


class Place(NamedTuple):
    """One entry of a dict or list that holds a tensor."""

    container: Any
    key: Any

    @property
    def tensor(self) -> Tensor:
        tensor: Tensor = self.container[self.key]
        return tensor


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters and buffers by name, each once."""
    return dict(chain(model.named_parameters(), model.named_buffers()))


def names_by_id(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's parameters and buffers, by the id of each."""
    return {id(tensor): name for name, tensor in named_tensors(model).items()}


def in_place_of(old: Tensor, new: Tensor) -> Tensor:
    """Return new numbers as the parameter or buffer that the old ones are."""
    if not isinstance(old, nn.Parameter) or isinstance(new, nn.Parameter):
        return new
    parameter = nn.Parameter(new, old.requires_grad)
    vars(parameter).update(vars(old))  # attributes set by a layer
    return parameter


def on_meta(tensor: Tensor) -> Tensor:
    """Return a parameter or buffer without numbers, on the meta device."""
    if tensor.device.type == "meta":
        return tensor
    return in_place_of(tensor, torch.empty_like(tensor.data, device="meta"))


def places(module: nn.Module) -> list[Place]:
    """Return the places of all tensors of a module and of its children; a tensor may have several."""
    return [place for _, of in _containers(attributes_of(module)) if of for place in _places_in(of)]


def _places_in(of: Any) -> list[Place]:
    entries = of.items() if isinstance(of, dict) else enumerate(of) if isinstance(of, list) else ()
    return [Place(of, key) for key, value in entries if isinstance(value, Tensor)]


def tensors_in(module: nn.Module, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the tensors that a module uses, by name; `names`: of those that count, by id."""
    return {names[id(place.tensor)]: place.tensor for place in places(module) if id(place.tensor) in names}


def replace(modules: Iterable[nn.Module], others: Mapping[int, Tensor], *more: Any) -> None:
    """Put `others[id(tensor)]` into each place of `tensor`, in `more` too; what is shared stays so."""
    own = chain.from_iterable(map(places, modules if others else ()))
    _replace(chain(own, *map(_places_in, more)), others)


def _replace(places: Iterable[Place], others: Mapping[int, Tensor]) -> None:
    for place in places:
        if id(place.tensor) in others:
            place.container[place.key] = others[id(place.tensor)]


def attributes_of(*modules: nn.Module) -> list[NamedContainer]:
    """Return the dicts of the attributes of modules and their children."""
    return [(name, vars(owner)) for module in modules for name, owner in module.named_modules()]


def _containers(roots: Sequence[NamedContainer]) -> list[NamedContainer]:
    """Return `roots`, the lists, dicts, sets and objects in them, and what is in these, but modules."""
    found, met = list(roots), {id(of) for _, of in roots}
    for name, of in found:  # grows
        entries = (of.items() if isinstance(of, dict) else enumerate(of)) if len(of) < MOST[0] else ()
        for key, value in entries:
            if not _holds_more(kind := cast(Any, type(value))):
                continue
            inner = value if issubclass(kind, _CONTAINERS) else getattr(value, "__dict__", ())
            if id(inner) not in met and len(met) < MOST[1]:
                met.add(id(inner))
                found.append((f"{name}.{key}".lstrip("."), inner))
    return [(name, of) for name, of in found if not isinstance(of, tuple)]


@cache
def _holds_more(kind: type) -> bool:
    own = origin(kind) not in OTHERS or issubclass(kind, SimpleNamespace | Namespace)
    return issubclass(kind, _CONTAINERS) or (own and not issubclass(kind, nn.Module | Tensor | type))


def origin(code: Any) -> str:
    """Return the package of a class or function, also of a partial one."""
    return str(getattr(getattr(code, "func", code), "__module__", "")).partition(".")[0]


class Held:
    """What dicts hold now, such as those of attributes, and the containers and objects in them."""

    def __init__(self, roots: Sequence[NamedContainer]) -> None:
        self._all = [(name, of, of.copy()) for name, of in _containers(roots)]
        self._empty = [of for _, of, was in self._all if not was]
        self._filled = [of for _, of, was in self._all if was]
        self.content = [was for *_, was in self._all if was]
        self.places = [place for _, of, was in self._all if was for place in _places_in(of)]
        self._numbers = [(*place, place.tensor) for place in self.places if place.tensor.numel() == 1]

    def changed(self) -> bool:
        """Return whether anything else is held; a tensor whose numbers have changed in place is the same.

        Python compares the dicts, which is fast, and asks only entries that are other objects for `==`.
        """
        with suppress(Exception):  # of arrays and tensors, which have no truth value but those of one number
            others = [key for of, key, tensor in self._numbers if of[key] is not tensor]
            return bool(others) or any(self._empty) or self._filled != self.content
        return True

    def changes(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Yield the name, container and key of what has changed, and what was in the container.

        The key is None for a list or set, which is named itself.
        """
        for name, of, was in self._all:
            if not isinstance(of, dict):
                if len(of) != len(was) or not all(map(_same, of, was)):
                    yield name, of, None, was
                continue
            for key in {**was, **of}:
                if key not in of or key not in was or not _same(of[key], was[key]):
                    yield f"{name}.{key}".lstrip("."), of, key, was

    def put_back(self) -> None:
        for container, was in {id(of): (of, was) for _, of, _, was in self.changes()}.values():
            refill(container, was)


def _same(now: Any, was: Any) -> bool:
    plain = isinstance(was, bool | int | float | complex | str) and type(now) is type(was)
    return now is was or (plain and bool(now == was))


def refill(container: Any, content: Any) -> None:
    """Let a list, dict or set have a content."""
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(content)


@contextmanager
def standing_in(module: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Let a module run with `others[id(tensor)]` in each place of `tensor`; then restore all attributes."""
    held = Held(attributes_of(module))
    try:
        _replace(held.places, others)
        yield
    finally:
        held.put_back()
