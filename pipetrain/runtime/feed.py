"""What a pass feeds: its batches, window by window, and the microbatches of one window for the engine.

The ranks of a program each have a loader, and a shuffling one gives each rank other batches. So rank 0 alone
reads it: it tells the others how many samples the batches of a window have, feeds the inputs to the first
stage, and sends the targets to the last one. Samples by number have the same order on every rank: the first
stage's rank reads inputs and the last one's targets, and nothing travels.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, tee
from typing import Protocol

import torch
from torch import Tensor

from pipetrain.data.loader import Sampled, loaded
from pipetrain.data.loading import Form, Reader
from pipetrain.errors import TrainingStopped
from pipetrain.network.values import Size, Value, ValueSpec, as_tuple, on_each
from pipetrain.runtime.links import Links
from pipetrain.tasks import Task, counted_for

log = logging.getLogger("pipetrain")

EVALUATED_AT_ONCE = 16  # batches of a loader in a window of an evaluation
UNTAKEN = 256  # tensors of targets that are kept, as gloo tells only who waits that one has been taken
Weight = Callable[[Value], Tensor | float]
Sent = deque[tuple[Callable[[], None], Tensor]]  # what waits, and the tensors
Sources = tuple[Iterator[Value] | None, Iterator[Value] | None, Sent]
"""The inputs of a window's microbatches and the targets of its batches, each where they are needed; and what
is sent as they are read, to be waited for. That holds connections open, so nothing keeps it after an error.
"""


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


def cut(value: Value, microbatches: int) -> list[Value]:
    """Cut a batch's tensors into so many microbatches, as `Size.pieces` says."""
    form = ValueSpec.in_batch(value)
    pieces = zip(*(torch.tensor_split(t, microbatches) for t in as_tuple(value)), strict=True)
    return [form.pack(piece) for piece in pieces]


class WindowFeed:
    """The microbatches of one window, by their numbers from 0.

    `sizes`: of its batches, each cut into so many `microbatches`. `inputs` yields those of each microbatch,
    `targets` those of each batch; None if this rank does not hold the first stage, or the last.
    Floating-point inputs and targets become `dtype`. `weight`: what targets count for.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        microbatches: int,
        inputs: Iterator[Value] | None,
        targets: Iterator[Value] | None,
        weight: Weight,
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._sizes = [size for batch in sizes for size in batch.pieces(microbatches)]
        self._microbatches = microbatches  # of a batch
        self._source, self._targets = inputs, targets
        self._weight = weight
        self._device, self._dtype = device, dtype
        self._inputs: dict[int, tuple[Tensor, ...]] = {}  # read, and not yet given
        self._ready: dict[int, Target] = {}
        self._inputs_read = self._targets_read = 0  # microbatches

    def size(self, mb: int) -> Size:
        """Return the size of a microbatch."""
        return self._sizes[mb]

    def input(self, mb: int) -> tuple[Tensor, ...]:
        """Return the first stage's inputs [n, ...] on the device; called once for each microbatch."""
        while mb not in self._inputs:
            self._read_input()
        return self._inputs.pop(mb)

    def prepare(self) -> None:
        """Make the next input in advance; called before the engine waits for a message."""
        if self._source is not None and not self._inputs and self._inputs_read < len(self._sizes):
            self._read_input()

    def target(self, mb: int) -> Target:
        """Return the last stage's targets on the device; called once for each microbatch."""
        while mb not in self._ready:
            self._read_batch()
        return self._ready.pop(mb)

    def first(self) -> tuple[tuple[Tensor, ...] | None, Target | None]:
        """Return the first microbatch's inputs and targets, each if it is given here, without taking them.

        Called before the window begins.
        """
        self.prepare()
        if self._targets is not None and not self._targets_read:
            self._read_batch()
        return self._inputs.get(0), self._ready.get(0)

    def _read_input(self) -> None:
        assert self._source is not None, "this rank has no inputs to give"
        self._inputs[self._inputs_read] = as_tuple(self._moved(next(self._source)))
        self._inputs_read += 1

    def _read_batch(self) -> None:
        assert self._targets is not None, "this rank has no targets to give"
        values = cut(next(self._targets), self._microbatches)
        weights = [counted_for(self._weight, value) for value in values]
        whole = sum(weights)
        for value, weight in zip(values, weights, strict=True):
            # A batch in which nothing counts has no mean loss: it is NaN, as in one process.
            share = weight / whole if whole else 1 / len(weights)
            self._ready[self._targets_read] = Target(self._moved(value), weight, share)
            self._targets_read += 1

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

    def first(self) -> tuple[tuple[Tensor, ...] | None, Target | None]:
        return self.input(0) if self._inputs else None, self.target(0) if self._targets else None


Feed = WindowFeed | Repeated

# The batches of a pass


def counting(samples: Sampled, epoch: int, task: Task, links: Links, last: int) -> list[list[Tensor]]:
    """Return the batches of an epoch in which something counts, alike on all ranks: see Sampled.epoch.

    `last`: the rank of the last stage, which reads samples of a batch until one counts. Raises
    TrainingStopped if nothing does.
    """
    batches, split, draw = samples.epoch(epoch), samples.split, samples.draw(epoch)
    if task.counts_samples or draw is None:
        return batches
    left: list[int] = []
    if links.world.rank == last:
        assert split is not None, "the rank of the last stage needs the samples"
        for number, batch in enumerate(batches):
            targets = (split.targets(one, draw) for one in torch.split(torch.cat(batch), 1))
            if any(counted_for(task.weight, some) for some in targets):
                left.append(number)
    left = links.tell("the batches in which something counts", left, last)
    skipped = len(batches) - len(left)
    what = f"epoch {epoch + 1}: none of the targets counts in {skipped} of {len(batches)} batches"
    if not left:
        raise TrainingStopped(f"{what}: there is nothing to learn")
    if skipped and links.world.rank == 0:
        log.warning("pipetrain: %s, which are skipped", what)
    return [batches[number] for number in left]


class Batches(Protocol):
    """The batches of one pass: of a loader, or of samples by number."""

    evaluated_at_once: int | None
    """The batches of a window of an evaluation; None: all."""

    def next(self, window: int | None) -> list[Size] | None:
        """Return the size of each of the next `window` batches (None: of all that are left), on rank 0.

        At the end that is empty; for a loader that never had a batch it is None.
        """

    def open(self, sizes: Sequence[Size], microbatches: int, last: int | None) -> Sources:
        """Return the samples of the next window, of batches of these sizes, each cut into so many.

        `last`: the last stage's rank, None to read no targets.
        """


class OfNumbers:
    """The `batches` of an epoch of samples by number (the ids of each microbatch), after the first `done`.

    The rank of the first stage reads inputs, that of the last one targets.
    """

    evaluated_at_once: int | None = None

    def __init__(
        self,
        samples: Sampled,
        epoch: int,
        batches: Sequence[Sequence[Tensor]],
        placement: Sequence[int],
        rank: int,
        done: int = 0,
    ) -> None:
        batches = batches[done:]
        self._sizes = [Size(sum(map(len, batch))) for batch in batches]
        self._announced = 0
        split, draw = samples.split, samples.draw(epoch)
        assert split is not None or rank not in (placement[0], placement[-1]), "this rank needs the samples"
        self._inputs: Iterator[Value] | None = None
        self._targets: Iterator[Value] | None = None
        if split is not None and rank == placement[0]:
            ids, read = [ids for batch in batches for ids in batch], partial(split.inputs, draw=draw)
            self._inputs = loaded(read, ids, samples.workers, samples.timeout)
        if split is not None and rank == placement[-1]:
            self._targets = (split.targets(torch.cat([*batch]), draw) for batch in batches)

    @classmethod
    def of(
        cls,
        samples: Sampled,
        task: Task,
        links: Links,
        placement: Sequence[int],
        epoch: int = 0,
        done: int = 0,
    ) -> OfNumbers:
        """Return the batches of an epoch in which something counts; all ranks call it. See `counting`."""
        batches = counting(samples, epoch, task, links, placement[-1])
        return cls(samples, epoch, batches, placement, links.world.rank, done)

    def next(self, window: int | None) -> list[Size]:
        sizes = self._sizes[self._announced :][:window]
        self._announced += len(sizes)
        return sizes

    def open(self, sizes: Sequence[Size], microbatches: int, last: int | None) -> Sources:
        return self._inputs, self._targets, deque()


class OfLoader:
    """The batches of a loader; `reader`: on rank 0, which `begin` prepares when it is first asked."""

    evaluated_at_once: int | None = EVALUATED_AT_ONCE

    def __init__(
        self, links: Links, reader: Reader | None, form: Form, begin: Callable[[Reader], object]
    ) -> None:
        self._links = links
        self._reader = reader
        self._form = form
        self._begin: Callable[[Reader], object] | None = begin

    def next(self, window: int | None) -> list[Size] | None:
        assert self._reader is not None, "rank 0 reads the loader"
        begin, self._begin = self._begin, None
        if begin is not None:
            begin(self._reader)
        return self._reader.window(window)

    def open(self, sizes: Sequence[Size], microbatches: int, last: int | None) -> Sources:
        rank, targets, sent = self._links.world.rank, None, Sent()
        if self._reader is None:
            return None, self._receiving(self._expect(sizes[0]), sizes) if last == rank else None, sent
        read: Iterator[tuple[Value, Value]] = map(self._reader.take, sizes)
        if last == rank:
            read, again = tee(read)
            targets = (targets for _, targets in again)
        elif last is not None:
            read = self._sending(read, last, sent)
        pieces = (cut(inputs, microbatches) for inputs, _ in read)
        return chain.from_iterable(pieces), targets, sent

    def _sending(
        self, batches: Iterator[tuple[Value, Value]], last: int, sent: Sent
    ) -> Iterator[tuple[Value, Value]]:
        """Yield batches whose targets are on their way to the last stage."""
        for inputs, targets in batches:
            for tensor in map(Tensor.contiguous, as_tuple(targets)):
                sent.append((self._links.post_tensor("targets", tensor, last), tensor))
            while len(sent) > UNTAKEN:  # of a whole pass they would be all targets
                sent.popleft()[0]()
            yield inputs, targets

    def _receiving(self, first: Callable[[], Value], sizes: Sequence[Size]) -> Iterator[Value]:
        """Yield the targets of batches. The receive of the `first` is posted, so that they come early."""
        yield first()
        for size in sizes[1:]:  # of which a window may leave out some
            yield self._expect(size)()

    def _expect(self, size: Size) -> Callable[[], Value]:
        specs, what = self._form.targets.of(size).specs, "the targets of a batch"
        waits = [self._links.expect_tensor(what, spec, 0) for spec in specs]
        return lambda: self._form.targets.pack(tuple(wait() for wait in waits))
