"""The microbatches of one window, for the engine.

Only the rank of the first stage reads inputs, only that of the last stage targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipetrain.network.values import Value, ValueSpec, as_tuple, on_each
from pipetrain.tasks import counted_for

Weight = Callable[[Value], Tensor | float]


@dataclass(frozen=True, slots=True)
class Target:
    """The last stage's targets of a microbatch.

    `weight`: how much they count for; `share`: of the batch's weight.
    """

    value: Value  # tensors [n, ...]
    weight: float
    share: float

    @property
    def samples(self) -> int:
        return len(as_tuple(self.value)[0])


def cut(value: Value, sizes: Sequence[int]) -> list[Value]:
    """Cut a batch's tensors into microbatches of these sizes."""
    form = ValueSpec.in_batch(value)
    pieces = zip(*(torch.split(t, list(sizes)) for t in as_tuple(value)), strict=True)
    return [form.pack(piece) for piece in pieces]


class Feed(Protocol):
    """The microbatches of one window, numbered from 0."""

    def size(self, mb: int) -> int:
        """Return the number of samples of a microbatch."""

    def input(self, mb: int) -> tuple[Tensor, ...]:
        """Return the first stage's inputs [n, ...] on the device; called in ascending order."""

    def target(self, mb: int) -> Target:
        """Return the last stage's targets on the device; called once for each microbatch."""

    def prepare(self) -> None:
        """Make the next input in advance; called before the engine waits for a message."""

    def first(self) -> tuple[tuple[Tensor, ...] | None, Target | None]:
        """Return the first microbatch's inputs and targets, each if it is given here, without taking them.

        Called before the window begins.
        """


class WindowFeed:
    """The batches of one window: each a list of its microbatches' numbers of samples.

    `inputs` yields those of each microbatch, `targets` those of each batch; None if this rank does not hold
    the first stage, or the last. Floating-point inputs and targets become `dtype`. `weight`: what targets
    count for; `prove`: called with the targets of each batch before they are used.
    """

    def __init__(
        self,
        batches: Sequence[Sequence[int]],
        inputs: Iterator[Value] | None,
        targets: Iterator[Value] | None,
        weight: Weight,
        device: torch.device,
        dtype: torch.dtype | None = None,
        prove: Callable[[Value], None] = lambda targets: None,
    ) -> None:
        self._sizes = [size for batch in batches for size in batch]
        self._batches = iter(batches)
        self._inputs, self._targets = inputs, targets
        self._weight, self._prove = weight, prove
        self._device, self._dtype = device, dtype
        self._ahead: tuple[Tensor, ...] | None = None
        self._given = 0
        self._ready: dict[int, Target] = {}  # read, and not yet given
        self._read = 0  # microbatches

    def size(self, mb: int) -> int:
        return self._sizes[mb]

    def input(self, mb: int) -> tuple[Tensor, ...]:
        assert self._inputs is not None, f"this rank has no inputs to give for microbatch {mb}"
        inputs, self._ahead = self._ahead, None
        self._given += 1
        return as_tuple(self._moved(next(self._inputs))) if inputs is None else inputs

    def prepare(self) -> None:
        if self._inputs is not None and self._ahead is None and self._given < len(self._sizes):
            self._ahead = as_tuple(self._moved(next(self._inputs)))

    def target(self, mb: int) -> Target:
        assert self._targets is not None, f"this rank has no targets to give for microbatch {mb}"
        while mb not in self._ready:
            self._read_batch(self._targets)
        return self._ready.pop(mb)

    def first(self) -> tuple[tuple[Tensor, ...] | None, Target | None]:
        self.prepare()
        if self._targets is not None and not self._read:
            self._read_batch(self._targets)
        return self._ahead, self._ready.get(0)

    def _read_batch(self, targets: Iterator[Value]) -> None:
        batch = next(targets)
        self._prove(batch)
        values = cut(batch, next(self._batches))
        weights = [counted_for(self._weight, value) for value in values]
        whole = sum(weights)
        for value, weight in zip(values, weights, strict=True):
            # A batch in which nothing counts has no mean loss: it is NaN, as in one process.
            share = weight / whole if whole else 1 / len(weights)
            self._ready[self._read] = Target(self._moved(value), weight, share)
            self._read += 1

    def _moved(self, value: Value) -> Value:
        """Start the copy to the device; to a GPU it is asynchronous from pinned memory only."""

        def move(tensor: Tensor) -> Tensor:
            if self._device.type == "cuda":
                tensor = tensor.pin_memory()
            dtype = self._dtype if tensor.is_floating_point() else None
            return tensor.to(self._device, dtype or tensor.dtype, non_blocking=True)

        return on_each(value, move)
