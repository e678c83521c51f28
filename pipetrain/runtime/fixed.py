"""Weights that stay where they are, for CUDA graphs, which compute at the addresses of their capture."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipetrain.runtime.weights import Weights


class FixedWeights(Weights):
    """Weights whose gradients, and the storage of whose versions, stay where they are after `fix`.

    The leaves of all versions then have one gradient, to which graphs add. It is 0 before a batch.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._fixed: dict[str, Tensor] = {}  # gradients
        self._graded: set[str] = set()  # weights that have had a gradient so far, in rehearsals too
        super().__init__(*arguments, **options)

    def fix(self, versions: int) -> dict[int, dict[str, Tensor]]:
        """Let all stay from now on, with storage for so many versions; return leaves by its address."""
        self._fixed = {name: torch.zeros_like(p.data) for name, p in self._live.items()}
        self._versions = {self.newest: self._fresh_leaves()}
        self._accumulating = self._versions[self.newest]
        own = [p.data for p in self._live.values()]
        while len(self._spare) < versions - 1:
            self._spare.append([torch.empty_like(t) for t in own])
        found = {}
        for storage in (own, *self._spare):
            leaves = self._fresh_leaves()
            for leaf, data in zip(leaves.values(), storage, strict=True):
                leaf.data = data
            found[_address(storage)] = leaves
        return found

    def storage(self, version: int) -> int:
        """Return the address of a version's storage, as in `fix`."""
        return _address(self._versions[version].values())

    @contextmanager
    def only(self, leaves: dict[str, Tensor]) -> Iterator[None]:
        """Let these leaves be version 0."""
        before = self._versions
        self._versions = {0: leaves}
        try:
            yield
        finally:
            self._versions = before

    def accumulate_on(self, version: int) -> None:
        if not self._fixed:
            super().accumulate_on(version)

    def reduce(self) -> None:
        for name in self._graded if self._fixed else ():
            self._live[name].grad = self._fixed[name]
        if not self._fixed:
            super().reduce()
            self._graded |= self.gradients().keys()

    def step(self, keep: bool, skip: bool = False, unless: Tensor | None = None) -> None:
        super().step(keep, skip, unless)
        self._clear()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        try:
            with super().put_back():
                yield
        finally:
            for name, leaf in self._accumulating.items():
                leaf.grad = self._fixed.get(name)
            self._clear()

    def _fresh_leaves(self) -> dict[str, Tensor]:
        leaves = super()._fresh_leaves()
        for name, gradient in self._fixed.items():
            leaves[name].grad = gradient
        return leaves

    def _clear(self) -> None:
        if self._fixed:
            torch._foreach_zero_(list(self._fixed.values()))


def _address(storage: Iterable[Tensor]) -> int:
    return next((t.data_ptr() for t in storage), 0)
