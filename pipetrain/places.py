"""Where a module's code finds its tensors, and how others are put there for a while.

A weight version, and a pass that computes nothing, both let a module run over other tensors than its own.
Its code may find a tensor not in the registries alone: nn.LSTM keeps a list of its weights beside them, and
people keep one of another layer's to share it. So each entry of a module's registries, of its attributes, and
of the lists and dicts among them that holds a tensor is a place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_CHILDREN = "_modules"


@dataclass(frozen=True, slots=True)
class Place:
    """One entry of a dict or list that holds a tensor. `name`: how a person would call it."""

    container: Any
    key: Any
    name: str

    @property
    def tensor(self) -> Tensor:
        """What stands there now."""
        tensor: Tensor = self.container[self.key]
        return tensor


def places(module: nn.Module) -> list[Place]:
    """List where the tensors of a module and of its children stand; one that stands in two, twice."""
    return [place for name, owner in module.named_modules() for place in _of(owner, f"{name}." * bool(name))]


def _of(owner: nn.Module, prefix: str) -> Iterator[Place]:
    for key, value in vars(owner).items():
        if isinstance(value, Tensor):
            yield Place(vars(owner), key, prefix + key)
        elif isinstance(value, dict) and key != _CHILDREN:
            within = prefix if value is owner._parameters or value is owner._buffers else f"{prefix}{key}."
            yield from (Place(value, k, f"{within}{k}") for k, v in value.items() if isinstance(v, Tensor))
        elif isinstance(value, list):
            items = [i for i, v in enumerate(value) if isinstance(v, Tensor)]
            yield from (Place(value, i, f"{prefix}{key}[{i}]") for i in items)


@contextmanager
def standing_in(module: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Let a module run over other tensors: `others[id(tensor)]` in each place of `tensor`.

    Afterwards all is as before: what it has put into its attributes meanwhile is taken out again.
    """
    attributes = [vars(owner) for owner in module.modules()]
    inner = (value for held in attributes for value in held.values())
    containers = [*attributes, *(value for value in inner if isinstance(value, dict | list))]
    before = [container.copy() for container in containers]
    try:
        for place in places(module):
            if id(place.tensor) in others:
                place.container[place.key] = others[id(place.tensor)]
        yield
    finally:
        for container, content in zip(containers, before, strict=True):
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
