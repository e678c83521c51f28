"""The microbatches of a window that a rank runs, on its device: inputs of stage 0, targets of the last one.

A subclass of WindowFeed reads them from where the samples are: by number, or from a loader. They are read and
taken in order, the next input ahead of its use, so that its copy to the device has begun by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from pipetrain.model.specs import Size, Value, ValueSpec, as_tuple, on_each, split
from pipetrain.tasks import WeightFunction, counted_for


@dataclass(frozen=True, slots=True)
class FeedSettings:
    """What the feeds of all windows of a rank share.

    `weight`: what targets count for. Floating-point inputs and targets become `dtype`.
    """

    rank: int
    weight: WeightFunction
    device: torch.device
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class WindowPart:
    """A window as one rank's feed sees it.

    `sizes`: of its batches, each cut into so many `microbatches`. `input_ranks`, `target_ranks`: the rank
    that runs the first and the last stage of each microbatch; without the latter no targets are read.
    """

    sizes: Sequence[Size]
    microbatches: int
    input_ranks: Sequence[int]
    target_ranks: Sequence[int] | None
    settings: FeedSettings

    def local_inputs(self) -> Iterator[int]:
        """Yield the microbatches whose inputs this rank takes."""
        return (mb for mb, rank in enumerate(self.input_ranks) if rank == self.settings.rank)

    def target_batches(self) -> Iterator[int]:
        """Yield the batches of which this rank takes targets."""
        return (batch for batch in range(len(self.sizes)) if self.local_targets(batch))

    def local_targets(self, batch: int) -> list[int]:
        """Return the microbatches of a batch whose targets this rank takes."""
        ranks, rank = self.target_ranks, self.settings.rank
        return [] if ranks is None else [mb for mb in self.microbatches_of(batch) if ranks[mb] == rank]

    def microbatches_of(self, batch: int) -> range:
        return range(batch * self.microbatches, (batch + 1) * self.microbatches)


class Batches(Protocol):
    """The batches of one pass: of a loader, or of samples by number."""

    evaluated_at_once: int | None
    """The batches of a window of an evaluation; None: all."""

    def next(self, window: int | None) -> list[Size] | None:
        """Return the size of each of the next `window` batches (None: of all that are left), on rank 0.

        At the end that is empty; for a loader that never had a batch it is None.
        """

    def open(self, part: WindowPart) -> WindowFeed:
        """Return the microbatches of the next window."""


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
        return Size.of(self.value).samples


class WindowFeed:
    """The microbatches of one window, by number from 0; a rank takes those that it runs itself, in order."""

    ahead = True
    """Whether inputs may be read before they are needed: another rank may send them only later."""
    forms: tuple[ValueSpec, ValueSpec] | None = None
    """Of a sample's inputs and targets, where batches have lengths."""

    def __init__(self, part: WindowPart) -> None:
        self._part = part
        self._device, self._dtype = part.settings.device, part.settings.dtype
        self._sizes = [piece for size in part.sizes for piece in size.pieces(part.microbatches)]
        self._pending_inputs = deque(part.local_inputs())
        self._next: tuple[Tensor, ...] | None = None  # the inputs of the first of these, if they are read
        self._targets: dict[int, Target] = {}  # of a batch, not yet taken

    def _read_inputs(self, mb: int) -> Value:
        """Return this rank's next inputs, those of microbatch `mb`."""
        raise NotImplementedError

    def _read_targets(self, batch: int) -> tuple[Value, Sequence[float] | None]:
        """Return this rank's targets of the next `batch` of which it takes some.

        And what each microbatch of the batch counts for; None if the rank takes them all.
        """
        raise NotImplementedError

    def send_up_to(self, mb: int) -> None:
        """Send the other ranks their microbatches up to this one's batch, if this rank reads them."""

    def finish(self, batches: int) -> None:
        """Send what is left of the window's first `batches`, and wait until all of it is taken."""

    def size(self, mb: int) -> Size:
        return self._sizes[mb]

    def input(self, mb: int) -> tuple[Tensor, ...]:
        """Return the first stage's inputs [n, ...] on the device; called once for each microbatch."""
        assert self._pending_inputs and mb == self._pending_inputs[0], (
            f"microbatch {mb} is not this rank's next one"
        )
        inputs, self._next = self._read_next(), None
        self._pending_inputs.popleft()
        return inputs

    def target(self, mb: int) -> Target:
        """Return the last stage's targets on the device; called once for each microbatch."""
        if mb not in self._targets:
            self._load_targets(mb // self._part.microbatches)
        return self._targets.pop(mb)

    def prefetch(self) -> None:
        """Move the next input to the device in advance; called before the engine waits for a message."""
        if self.ahead and self._pending_inputs:
            self._read_next()

    def truncate(self, mb: int) -> None:
        """Read no inputs from microbatch `mb` on: nobody would take what a reader sends of its batch."""
        self._pending_inputs = deque(number for number in self._pending_inputs if number < mb)

    def peek(self) -> tuple[tuple[Tensor, ...] | None, Target | None]:
        """Return the first microbatch's inputs and targets, each if this rank takes it; for a rehearsal."""
        inputs = self._read_next() if self._pending_inputs else None
        batch = next(self._part.target_batches(), None)
        if batch is not None and not self._targets:
            self._load_targets(batch)
        return inputs, next(iter(self._targets.values()), None)

    def _read_next(self) -> tuple[Tensor, ...]:
        if self._next is None:
            self._next = as_tuple(self._to_device(self._read_inputs(self._pending_inputs[0])))
        return self._next

    def _load_targets(self, batch: int) -> None:
        """Read the targets of this rank's microbatches of a batch, and give each its share."""
        targets, weights = self._read_targets(batch)
        local_mbs, first = self._part.local_targets(batch), self._part.microbatches_of(batch).start
        values = split(targets, [self._sizes[mb] for mb in local_mbs])
        weights = weights or [counted_for(self._part.settings.weight, value) for value in values]
        total = sum(weights)
        for mb, value in zip(local_mbs, values, strict=True):
            weight = weights[mb - first]
            # A batch in which nothing counts has no mean loss: it is NaN, as in one process.
            share = weight / total if total else 1 / len(weights)
            self._targets[mb] = Target(self._to_device(value), weight, share)

    def _to_device(self, value: Value) -> Value:
        """Start the copy to the device; to a GPU it is asynchronous from pinned memory only."""

        def move(tensor: Tensor) -> Tensor:
            if self._device.type == "cuda" and not tensor.is_cuda:
                tensor = tensor.pin_memory()
            dtype = self._dtype if tensor.is_floating_point() else None
            return tensor.to(self._device, dtype or tensor.dtype, non_blocking=True)

        return on_each(value, move)


class RepeatedFeed:
    """The same microbatches of one size, repeated; `clones`: each time in new tensors, as a window's have."""

    forms: tuple[ValueSpec, ValueSpec] | None = None

    def __init__(
        self,
        size: Size,
        inputs: Sequence[tuple[Tensor, ...]] = (),
        targets: Sequence[Target] = (),
        clones: bool = False,
    ) -> None:
        self._size, self._inputs, self._targets, self._clones = size, inputs, targets, clones

    def size(self, mb: int) -> Size:
        return self._size

    def input(self, mb: int) -> tuple[Tensor, ...]:
        inputs = self._inputs[mb % len(self._inputs)]
        return tuple(t.clone() for t in inputs) if self._clones else inputs

    def target(self, mb: int) -> Target:
        target = self._targets[mb % len(self._targets)]
        return replace(target, value=on_each(target.value, Tensor.clone)) if self._clones else target

    def prefetch(self) -> None:
        """There is nothing to make."""

    def send_up_to(self, mb: int) -> None:
        """There is nothing to send."""

    def peek(self) -> tuple[tuple[Tensor, ...] | None, Target | None]:
        return self.input(0) if self._inputs else None, self.target(0) if self._targets else None


Feed = WindowFeed | RepeatedFeed
