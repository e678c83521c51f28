"""Finds the places of a module's tensors, and replaces them temporarily.

Weight versions and estimates let a module run with other tensors than its own. Its code may use a tensor not
only through the registries: nn.LSTM keeps a list of its weights, and users keep another layer's weight to
share it. So each entry of a module's registries, of its attributes, and of the lists and dicts among them
that holds a tensor is a place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


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
    return [
        Place(of, key)
        for of in _containers(module)
        for key, value in (of.items() if isinstance(of, dict) else enumerate(of))
        if isinstance(value, Tensor)
    ]


def replace(modules: Iterable[nn.Module], others: Mapping[int, Tensor]) -> None:
    """Put `others[id(tensor)]` into each place of `tensor`, so that what is shared stays shared."""
    for place in chain.from_iterable(map(places, modules if others else ())):
        if id(place.tensor) in others:
            place.container[place.key] = others[id(place.tensor)]


def _containers(module: nn.Module) -> list[Any]:
    """Return the dicts of a module's and its children's attributes, and the dicts and lists among these."""
    attributes = [vars(owner) for owner in module.modules()]
    inner = (value for of_layer in attributes for value in of_layer.values())
    return [*attributes, *(value for value in inner if isinstance(value, dict | list))]


class Attributes:
    """What modules, their children and some dicts hold now."""

    def __init__(self, modules: Iterable[nn.Module], *dicts: dict[str, Any]) -> None:
        containers = [*dicts, *chain.from_iterable(map(_containers, modules))]
        self._sizes = [(of, len(of)) for of in containers]
        reads = [partial(of.get, key) for of in containers if isinstance(of, dict) for key in of]
        reads += [
            partial(of.__getitem__, n) for of in containers if isinstance(of, list) for n in range(len(of))
        ]
        self._values = [(read, read()) for read in reads]

    def changed(self) -> bool:
        """Return whether anything else is held; a tensor whose numbers have changed in place is the same."""
        return any(len(of) != size for of, size in self._sizes) or any(
            (now := read()) is not value and not (isinstance(now, int | float | str) and now == value)
            for read, value in self._values
        )


@contextmanager
def standing_in(module: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Let a module run with `others[id(tensor)]` in each place of `tensor`; then restore all attributes."""
    containers = _containers(module)
    before = [container.copy() for container in containers]
    try:
        replace([module], others)
        yield
    finally:
        for container, content in zip(containers, before, strict=True):
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
