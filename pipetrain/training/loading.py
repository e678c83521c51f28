"""Batches of a loader: rank 0 reads them, and what the last stage needs travels there.

The ranks of a program each have a loader, and a shuffling one gives each rank other batches. So rank 0 alone
reads: it tells the others how many samples the batches of a window have, feeds the inputs to the first stage,
and sends the targets to the last one. No input is ever paired with another's targets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from pipetrain.boundary import Example, TensorSpec, Value, as_tuple
from pipetrain.errors import TrainingStopped
from pipetrain.runtime.mesh import Mesh

Batches = Iterable[Any]
"""Yields (inputs, targets): each a tensor [n, ...], or a tuple or list of them."""


class BadBatch(TrainingStopped):
    """A batch that cannot be trained on; the message says which, and why."""


def pair(batch: Any, what: str) -> tuple[Value, Value]:
    """Return a batch's inputs and targets, tensors of one length. Raises BadBatch."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        kind = (
            f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__
        )
        raise BadBatch(f"{what} must be a pair (inputs, targets); it is a {kind}")
    inputs, targets = (
        _value(part, f"{name} of {what}") for part, name in zip(batch, ("inputs", "targets"), strict=True)
    )
    for name, part in (("inputs", inputs), ("targets", targets)):
        lengths = {len(t) if t.dim() else 0 for t in as_tuple(part)}
        if lengths != {len(as_tuple(inputs)[0])}:
            raise BadBatch(
                f"{what} has {len(as_tuple(inputs)[0])} inputs and {min(lengths)} {name}: each "
                f"sample needs one"
            )
    if not len(as_tuple(inputs)[0]):
        raise BadBatch(f"{what} has no sample")
    return inputs, targets


def _value(part: Any, what: str) -> Value:
    if isinstance(part, list):
        part = tuple(part)
    if isinstance(part, Tensor) and part.dim():
        return part.cpu()
    if isinstance(part, tuple) and part and all(isinstance(t, Tensor) and t.dim() for t in part):
        return tuple(t.cpu() for t in part)
    raise BadBatch(f"the {what} must be a tensor [n, ...] or a tuple of them; got {type(part).__name__}")


def known_sizes(loader: Batches) -> list[int] | None:
    """Return the samples of each batch if they are known without reading it, else None."""
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    try:
        samples = len(loader.batch_sampler.sampler)  # type: ignore[arg-type]
    except TypeError:
        return None
    size = loader.batch_sampler.batch_size
    sizes = [size] * (samples // size)
    return sizes if samples % size == 0 or loader.batch_sampler.drop_last else [*sizes, samples % size]


@dataclass(frozen=True, slots=True)
class Form:
    """What a sample's inputs and targets look like."""

    inputs: Example
    targets: Example

    def to_json(self) -> list[Any]:
        return [
            [[list(spec.shape), str(spec.dtype).removeprefix("torch.")] for spec in example.specs]
            + [example.single]
            for example in (self.inputs, self.targets)
        ]

    @classmethod
    def from_json(cls, data: list[Any]) -> Form:
        examples = []
        for *specs, single in data:
            held = tuple(TensorSpec(tuple(shape), getattr(torch, dtype)) for shape, dtype in specs)
            examples.append(Example(held, single))
        return cls(*examples)

    def refuse_other(self, inputs: Value, targets: Value, what: str) -> None:
        """Refuse samples of another form. Raises BadBatch."""
        for name, mine, value in (("inputs", self.inputs, inputs), ("targets", self.targets, targets)):
            if (theirs := Example.in_batch(value)) != mine:
                raise BadBatch(
                    f"{what} has {name} {_told(theirs)} a sample, and those of the first batch were "
                    f"{_told(mine)}: pad or crop them to one shape"
                )


def _told(example: Example) -> str:
    return " + ".join(map(str, example.specs))


class Reader:
    """Rank 0's pass over a loader: the sizes of the next window, then its batches."""

    def __init__(self, loader: Batches, what: str) -> None:
        self._what = what
        self._sizes = known_sizes(loader)
        self.length = len(loader) if isinstance(loader, Sized) else None
        self._batches = enumerate(iter(loader))
        self._read = 0

    def first(self) -> tuple[Value, Value] | None:
        """Return the next batch without taking it; None at the end."""
        for number, batch in self._batches:
            self._batches = enumerate(chain([batch], (b for _, b in self._batches)), number)
            return pair(batch, f"{self._what} {number}")
        return None

    def window(self, batches: int | None) -> list[int]:
        """Return the samples of each batch of the next window; empty at the end.

        Batches whose sizes are unknown are read into memory for it.
        """
        if self._sizes is not None:
            sizes = self._sizes[self._read :][:batches]
        else:
            held = list(islice(self._batches, batches))
            sizes = [len(as_tuple(pair(batch, f"{self._what} {number}")[0])[0]) for number, batch in held]
            self._batches = chain(held, self._batches)  # type: ignore[assignment]
        self._read += len(sizes)
        return sizes

    def take(self, size: int, form: Form) -> tuple[Value, Value]:
        """Return the next batch, of `size` samples. Raises BadBatch for another one."""
        number, batch = next(self._batches, (-1, None))
        what = f"{self._what} {number}"
        if number < 0:
            raise BadBatch(f"the loader ended before the {self._read} batches that it said it has")
        inputs, targets = pair(batch, what)
        form.refuse_other(inputs, targets, what)
        if len(as_tuple(inputs)[0]) != size:
            raise BadBatch(f"{what} has {len(as_tuple(inputs)[0])} samples, and its sampler said {size}")
        return inputs, targets


class WindowSource:
    """The inputs and targets of one window's microbatches, on the ranks that need them.

    `sizes`: the samples of each microbatch of each batch; `reader`: on rank 0.
    """

    def __init__(
        self, mesh: Mesh, last: int, sizes: Sequence[Sequence[int]], form: Form, reader: Reader | None
    ) -> None:
        self._mesh = mesh
        self._last = last
        self._sizes = sizes
        self._form = form
        self._reader = reader
        self._to_read = iter(sizes)
        self._inputs: deque[Value] = deque()
        self._targets: deque[Value] = deque()
        self._posted: list[tuple[Any, Tensor]] = []

    @property
    def inputs(self) -> Iterator[Value] | None:
        return None if self._reader is None else self._given(self._inputs)

    @property
    def targets(self) -> Iterator[Value] | None:
        if self._mesh.world.rank != self._last:
            return None
        return self._given(self._targets) if self._reader is not None else self._received()

    def _given(self, ready: deque[Value]) -> Iterator[Value]:
        for _ in range(sum(map(len, self._sizes))):
            if not ready:
                self._read()
            yield ready.popleft()

    def _read(self) -> None:
        assert self._reader is not None
        sizes = next(self._to_read)
        inputs, targets = self._reader.take(sum(sizes), self._form)
        self._inputs += _cut(inputs, sizes)
        if self._last == self._mesh.world.rank:
            self._targets += _cut(targets, sizes)
            return
        self._posted = [sent for sent in self._posted if not sent[0].is_completed()]
        for tensor in as_tuple(targets):
            tensor = tensor.contiguous()
            self._posted.append((self._mesh.post_tensor(tensor, self._last), tensor))

    def _received(self) -> Iterator[Value]:
        for sizes in self._sizes:
            boundary = self._form.targets.of(sum(sizes))
            made = tuple(self._mesh.take_tensor("the targets of a batch", spec, 0) for spec in boundary.specs)
            yield from _cut(made[0] if boundary.single else made, sizes)

    def close(self) -> None:
        """Wait until the targets have been sent."""
        for work, _ in self._posted:
            work.wait()


def _cut(value: Value, sizes: Sequence[int]) -> list[Value]:
    """Cut a batch's tensors into microbatches."""
    if isinstance(value, Tensor):
        return list(torch.split(value, list(sizes)))
    return list(zip(*(torch.split(t, list(sizes)) for t in value), strict=True))
