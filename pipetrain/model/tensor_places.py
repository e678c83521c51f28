"""Finds the places of a module's tensors, and replaces them temporarily.

Weight versions and estimates run a module with other tensors than its own. Its code may use a tensor not only
through the registries: nn.LSTM has a list of its weights, and users hold another layer's weight to share it.
So each entry that holds a tensor is a place: in a module's registries, in its attributes, and in the lists,
dicts and objects among these.
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

MOST = 1000, 100_000  # entries of a container that is searched, and containers in all
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
    """Return new numbers as a parameter or a buffer, like the old tensor."""
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
    return [
        place
        for _, container in _containers(attributes_of(module))
        if container
        for place in _places_in(container)
    ]


def _places_in(owner: Any) -> list[Place]:
    entries = (
        owner.items() if isinstance(owner, dict) else enumerate(owner) if isinstance(owner, list) else ()
    )
    return [Place(owner, key) for key, value in entries if isinstance(value, Tensor)]


def tensors_in(module: nn.Module, names: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the tensors that a module uses, by name; `names`: of those that count, by id."""
    return {names[id(place.tensor)]: place.tensor for place in places(module) if id(place.tensor) in names}


def replace(modules: Iterable[nn.Module], substitutes: Mapping[int, Tensor], *more: Any) -> None:
    """Put `substitutes[id(tensor)]` into each place of `tensor`, in `more` too; shared ones stay shared."""
    found_places = chain.from_iterable(map(places, modules if substitutes else ()))
    _replace(chain(found_places, *map(_places_in, more)), substitutes)


def _replace(places: Iterable[Place], substitutes: Mapping[int, Tensor]) -> None:
    for place in places:
        if id(place.tensor) in substitutes:
            place.container[place.key] = substitutes[id(place.tensor)]


def attributes_of(*modules: nn.Module) -> list[NamedContainer]:
    """Return the dicts of the attributes of modules and their children."""
    return [(name, vars(owner)) for module in modules for name, owner in module.named_modules()]


def _containers(roots: Sequence[NamedContainer]) -> list[NamedContainer]:
    """Return `roots`, the lists, dicts, sets and objects in them, and so on, except modules."""
    containers, met = list(roots), {id(node) for _, node in roots}
    for name, node in containers:  # grows
        entries = (node.items() if isinstance(node, dict) else enumerate(node)) if len(node) < MOST[0] else ()
        for key, value in entries:
            if not _holds_more(kind := cast(Any, type(value))):
                continue
            inner = value if issubclass(kind, _CONTAINERS) else getattr(value, "__dict__", ())
            if id(inner) not in met and len(met) < MOST[1]:
                met.add(id(inner))
                containers.append((f"{name}.{key}".lstrip("."), inner))
    return [(name, node) for name, node in containers if not isinstance(node, tuple)]


@cache
def _holds_more(kind: type) -> bool:
    custom = origin(kind) not in OTHERS or issubclass(kind, SimpleNamespace | Namespace)
    return issubclass(kind, _CONTAINERS) or (custom and not issubclass(kind, nn.Module | Tensor | type))


def origin(code: Any) -> str:
    """Return the package of a class or function, or of a partial's function."""
    return str(getattr(getattr(code, "func", code), "__module__", "")).partition(".")[0]


class Held:
    """A snapshot of dicts, such as those of attributes, and of the containers and objects in them."""

    def __init__(self, roots: Sequence[NamedContainer]) -> None:
        self._all = [(name, container, container.copy()) for name, container in _containers(roots)]
        self._empty = [container for _, container, was in self._all if not was]
        self._filled = [container for _, container, was in self._all if was]
        self.content = [was for *_, was in self._all if was]
        self.places = [place for _, container, was in self._all if was for place in _places_in(container)]
        self.containers = [container for _, container, was in self._all if was]
        self._numbers = [(*place, place.tensor) for place in self.places if place.tensor.numel() == 1]

    def changed(self) -> bool:
        """Return whether the contents differ; a tensor that has changed in place counts as the same.

        Python compares the dicts, which is fast, and calls `==` only for entries that are other objects.
        """
        with suppress(Exception):  # comparing arrays and tensors fails unless they hold one number
            replaced = [key for container, key, tensor in self._numbers if container[key] is not tensor]
            return bool(replaced) or any(self._empty) or self._filled != self.content
        return True

    def changes(self) -> Iterator[tuple[str, Any, Any, Any]]:
        """Yield the name, container and key of each change, and the container's earlier content.

        The key is None for a list or set, which is named itself.
        """
        for name, container, was in self._all:
            if not isinstance(container, dict):
                if len(container) != len(was) or not all(map(_same, container, was)):
                    yield name, container, None, was
                continue
            for key in {**was, **container}:
                if key not in container or key not in was or not _same(container[key], was[key]):
                    yield f"{name}.{key}".lstrip("."), container, key, was

    def put_back(self) -> None:
        for container, was in {id(changed): (changed, was) for _, changed, _, was in self.changes()}.values():
            refill(container, was)


def _same(value: Any, was: Any) -> bool:
    plain = isinstance(was, bool | int | float | complex | str) and type(value) is type(was)
    return value is was or (plain and bool(value == was))


def refill(container: Any, content: Any) -> None:
    """Replace the content of a list, dict or set."""
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(content)


@contextmanager
def standing_in(module: nn.Module, substitutes: Mapping[int, Tensor]) -> Iterator[None]:
    """Run a module with `substitutes[id(tensor)]` in each place of `tensor`; then restore all attributes."""
    before = Held(attributes_of(module))
    try:
        _replace(before.places, substitutes)
        yield
    finally:
        before.put_back()
