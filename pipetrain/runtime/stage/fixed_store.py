"""Weights at fixed addresses, at which CUDA graphs compute: of all versions, with one gradient for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipetrain.runtime.stage.parameter_store import ParameterStore
from pipetrain.schedule.actions import Read


class FixedStore(ParameterStore):
    """Parameters with fixed addresses, after `fix`, for their gradients and the storage of their versions.

    CUDA graphs compute at the addresses of their capture. The leaves of all versions then share one gradient,
    to which graphs add. It is 0 before a batch.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._fixed: dict[str, Tensor] = {}  # gradients
        self._with_gradient: set[str] = set()  # parameters with a gradient so far, in rehearsals too
        super().__init__(*arguments, **options)

    def fix(self, versions: int) -> dict[int, dict[str, nn.Parameter]]:
        """Fix all addresses, with storage for so many versions; return leaves by their storage's address."""
        self._fixed = {name: torch.zeros_like(p.data) for name, p in self.parameters.items()}
        self._versions = {self.newest: self._fresh_leaves()}
        self._accumulating = self._versions[self.newest]
        current = [p.data for p in self.parameters.values()]
        while len(self._spare) < versions - 1:
            self._spare.append([torch.empty_like(t) for t in current])
        by_address = {}
        for storage in (current, *self._spare):
            leaves = self._fresh_leaves()
            for leaf, data in zip(leaves.values(), storage, strict=True):
                leaf.data = data
            by_address[_address(storage)] = leaves
        return by_address

    @property
    def fixed(self) -> bool:
        return bool(self._fixed)

    def unfix(self) -> None:
        self._fixed, self._spare = {}, []
        self._versions = {self.newest: self._fresh_leaves()}
        self._accumulating = self._versions[self.newest]

    def storage(self, read: Read) -> int:
        return _address(self._versions[read].values())

    @contextmanager
    def holding_only(self, leaves: dict[str, nn.Parameter]) -> Iterator[None]:
        before = self._versions
        self._versions = {0: leaves}
        try:
            yield
        finally:
            self._versions = before

    def accumulate_on(self, read: Read) -> None:
        if not self._fixed:
            super().accumulate_on(read)

    def reduce(self) -> None:
        for name in self._with_gradient if self._fixed else ():
            self.parameters[name].grad = self._fixed[name]
        if not self._fixed:
            super().reduce()
            self._with_gradient.update(self.gradients())  # in place: a rehearsal restores attributes

    def drop_gradients(self) -> None:
        super().drop_gradients()
        if self._fixed:
            torch._foreach_zero_(list(self._fixed.values()))

    def _fresh_leaves(self) -> dict[str, nn.Parameter]:
        leaves = super()._fresh_leaves()
        for name, gradient in self._fixed.items():
            leaves[name].grad = gradient
        return leaves


def _address(storage: Iterable[Tensor]) -> int:
    return next((t.data_ptr() for t in storage), 0)
