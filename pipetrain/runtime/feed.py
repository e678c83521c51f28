"""The microbatches of one window, for the engine: inputs of the first stage, targets of the last, all sizes.

Each is asked for by its number, and a rank has those of the microbatches that it runs itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipetrain.model.specs import Size, Value, ValueSpec, as_tuple, on_each
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


def cut(value: Value, sizes: Sequence[Size]) -> list[Value]:
    """Cut tensors into microbatches of these sizes."""
    samples = [size.samples for size in sizes]
    if isinstance(value, Tensor):
        return list(torch.split(value, samples))
    form = ValueSpec.in_batch(value)
    pieces = zip(*(torch.split(t, samples) for t in as_tuple(value)), strict=True)
    return [form.pack(piece) for piece in pieces]


class TargetRows(NamedTuple):
    """The targets of those microbatches of a batch that a rank has.

    `weights`: what each microbatch of the batch counts for; None if the rank has them all.
    """

    targets: Value
    weights: Sequence[float] | None = None


class Sources(NamedTuple):
    """The inputs of a rank's microbatches of a window, and the targets of its batches, where they are needed.

    `deal` reads for the other ranks until so many batches of the window are read; `finish` does too, and
    waits until what was sent is taken. That holds connections open, so nothing keeps it after an error.
    `ahead`: whether inputs may be asked for before they are needed; where another rank sends them, it may
    wait for this one to go on.
    """

    inputs: Iterator[Value] | None
    targets: Iterator[TargetRows] | None
    deal: Callable[[int], None] = lambda batches: None
    finish: Callable[[int], None] = lambda batches: None
    ahead: bool = True


class WindowFeed:
    """The microbatches of one window, by their numbers from 0.

    `sizes`: of its batches, each cut into so many `microbatches`. `source` has the inputs of the microbatches
    `first`, and the targets of the batches that have some of `last`; these run on this rank. Floating-point
    inputs and targets become `dtype`. `weight`: what targets count for.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        microbatches: int,
        source: Sources,
        first: Sequence[int],
        last: Sequence[int],
        weight: Weight,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._microbatches, self._source = microbatches, source
        self._sizes = [size for batch in sizes for size in batch.pieces(microbatches)]
        self._first, self._last = deque(first), set(last)
        every = range(len(self._sizes))
        whole = [range(start, start + microbatches) for start in every[::microbatches]]
        self._batches = iter([mbs for mbs in whole if not self._last.isdisjoint(mbs)])
        self._weight = weight
        self._device, self._dtype = device, dtype
        self._inputs: dict[int, tuple[Tensor, ...]] = {}  # read, and not yet given
        self._ready: dict[int, Target] = {}

    def size(self, mb: int) -> Size:
        return self._sizes[mb]

    def input(self, mb: int) -> tuple[Tensor, ...]:
        """Return the first stage's inputs [n, ...] on the device; called once for each microbatch."""
        while mb not in self._inputs and self._read_input():
            pass
        assert mb in self._inputs, f"this rank has no inputs of microbatch {mb} to give"
        return self._inputs.pop(mb)

    def prepare(self) -> None:
        """Make the next input in advance; called before the engine waits for a message."""
        if self._source.ahead and not self._inputs:
            self._read_input()

    def forget(self, mb: int) -> None:
        """Read no inputs from microbatch `mb` on: nobody would take what a reader sends of its batch."""
        self._first = deque(number for number in self._first if number < mb)

    def deal(self, mb: int) -> None:
        """Send a microbatch to the rank that runs it, if this one reads it."""
        self._source.deal(mb // self._microbatches + 1)

    def target(self, mb: int) -> Target:
        """Return the last stage's targets on the device; called once for each microbatch."""
        while mb not in self._ready:
            self._read_batch()
        return self._ready.pop(mb)

    def first(self) -> tuple[tuple[Tensor, ...] | None, Target | None]:
        """Return the first microbatch's inputs and targets, each if it is given here, without taking them.

        Called before the window begins.
        """
        if not self._inputs:
            self._read_input()
        if self._source.targets is not None and not self._ready:
            self._read_batch()
        return next(iter(self._inputs.values()), None), next(iter(self._ready.values()), None)

    def _read_input(self) -> bool:
        """Read the inputs of one more microbatch; return False if there are none."""
        inputs = self._source.inputs
        value = next(inputs, None) if inputs is not None and self._first else None
        if value is None:
            return False
        self._inputs[self._first.popleft()] = as_tuple(self._moved(value))
        return True

    def _read_batch(self) -> None:
        assert self._source.targets is not None, "this rank has no targets to give"
        (targets, weights), whole = next(self._source.targets), next(self._batches)
        own = [mb for mb in whole if mb in self._last]
        values = cut(targets, [self._sizes[mb] for mb in own])
        weights = weights or [counted_for(self._weight, value) for value in values]
        total = sum(weights)
        for mb, value in zip(own, values, strict=True):
            weight = weights[mb - whole.start]
            # A batch in which nothing counts has no mean loss: it is NaN, as in one process.
            share = weight / total if total else 1 / len(weights)
            self._ready[mb] = Target(self._moved(value), weight, share)

    def _moved(self, value: Value) -> Value:
        """Start the copy to the device; to a GPU it is asynchronous from pinned memory only."""

        def move(tensor: Tensor) -> Tensor:
            if self._device.type == "cuda" and not tensor.is_cuda:
                tensor = tensor.pin_memory()
            dtype = self._dtype if tensor.is_floating_point() else None
            return tensor.to(self._device, dtype or tensor.dtype, non_blocking=True)

        return on_each(value, move)


class Repeated:
    """Microbatches of one size that are there already, again and again; a rank may need neither part.

    `copies`: each has tensors of its own, as a window's have.
    """

    def __init__(
        self,
        size: Size,
        inputs: Sequence[tuple[Tensor, ...]] = (),
        targets: Sequence[Target] = (),
        copies: bool = False,
    ) -> None:
        self._size, self._inputs, self._targets, self._copies = size, inputs, targets, copies

    def size(self, mb: int) -> Size:
        return self._size

    def input(self, mb: int) -> tuple[Tensor, ...]:
        inputs = self._inputs[mb % len(self._inputs)]
        return tuple(t.clone() for t in inputs) if self._copies else inputs

    def target(self, mb: int) -> Target:
        target = self._targets[mb % len(self._targets)]
        return replace(target, value=on_each(target.value, Tensor.clone)) if self._copies else target

    def prepare(self) -> None:
        """There is nothing to make."""

    def deal(self, mb: int) -> None:
        """There is nothing to send."""

    def first(self) -> tuple[tuple[Tensor, ...] | None, Target | None]:
        return self.input(0) if self._inputs else None, self.target(0) if self._targets else None


Feed = WindowFeed | Repeated
