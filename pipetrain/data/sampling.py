"""The samples of each update, and their loading at the first and the last stage.

A batch is one update; it is divided into `microbatches` pieces. The order depends only on the seed and the
epoch, so every schedule has the same updates, and each rank that needs samples (the first stage inputs, the
last targets) computes the same lists without communication.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipetrain.data.augment import key
from pipetrain.data.batch import Form
from pipetrain.data.splits import Draw, Padded, Split
from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.model.specs import Size, Value
from pipetrain.tasks import WeightFunction, counted_for

T = TypeVar("T")


class Sampler:
    """The samples of each update of each epoch, divided into microbatches.

    `batch_sizes`: the samples of each update of an epoch. Raises ConfigError for a last batch with fewer
    samples than microbatches, and if `drop_last` leaves nothing.
    """

    def __init__(
        self, samples: int, batch_size: int, microbatches: int, seed: int, drop_last: bool = False
    ) -> None:
        whole, rest = divmod(samples, batch_size)
        if drop_last and not whole:
            raise ConfigError(
                f"data.drop_last=true leaves nothing of {samples} samples at batch_size={batch_size}: "
                "set data.drop_last=false or a smaller batch_size"
            )
        if not drop_last and 0 < rest < microbatches:
            raise ConfigError(
                f"the last batch has {rest} of {samples} samples, fewer than microbatches={microbatches}: "
                "set data.drop_last=true, another batch_size or fewer microbatches"
            )
        self.batch_sizes = [batch_size] * whole
        if rest and not drop_last:
            self.batch_sizes.append(rest)
        self._samples, self._microbatches = samples, microbatches
        self._seed = seed

    def epoch(self, epoch: int) -> list[list[Tensor]]:
        """Return for each update of an epoch (from 0) its microbatches' sample ids, int64 [n] each."""
        generator = torch.Generator().manual_seed(key(self._seed, epoch) >> 1)
        order = torch.randperm(self._samples, generator=generator)
        batches = torch.split(order[: sum(self.batch_sizes)], self.batch_sizes)
        return [list(torch.tensor_split(ids, self._microbatches)) for ids in batches]


@dataclass(frozen=True, slots=True)
class Sampled:
    """Samples by number, in an order that every rank knows, so that no batch travels between them.

    `split`: None on ranks that need no sample. `sizes`: the samples of each batch. With a `sampler` they are
    shuffled and augmented, else taken in order, each batch as one microbatch, as an evaluation does. `seed`:
    of the augmentation. `classes`: that targets tell apart, None if unknown or none.
    """

    split: Split | None
    sizes: list[int]
    sampler: Sampler | None
    seed: int
    workers: int
    timeout: float
    classes: int | None = None

    def epoch(self, epoch: int) -> list[list[Tensor]]:
        """Return for each batch of an epoch (from 0) its microbatches' sample ids, int64 [n] each."""
        if self.sampler is not None:
            return self.sampler.epoch(epoch)
        return [[ids] for ids in torch.split(torch.arange(sum(self.sizes)), self.sizes)]

    def draw(self, epoch: int) -> Draw | None:
        return None if self.sampler is None else Draw(self.seed, epoch)

    def size(self, batch: Sequence[Tensor]) -> Size:
        """Return the size of a batch, of the sample ids of its microbatches."""
        lengths = self.split.lengths(torch.cat([*batch])) if isinstance(self.split, Padded) else ()
        return Size(sum(map(len, batch)), lengths)

    def at(self, size: Size) -> Split:
        """Return the samples as they are in a batch of this size."""
        assert self.split is not None, "this rank needs the samples"
        return self.split.padded(size.lengths) if isinstance(self.split, Padded) else self.split

    @property
    def form(self) -> Form | None:
        """What samples look like where their lengths differ between batches; elsewhere None."""
        if not isinstance(self.split, Padded):
            return None
        one = torch.zeros(1, dtype=torch.int64)
        short = self.split.lengths(one)
        longer = tuple(n + more for more, n in enumerate(short, 1))  # by other numbers, if two are equal
        splits = (self.split.padded(lengths) for lengths in (short, longer))
        first, second = ((split.inputs(one, None), split.targets(one, None)) for split in splits)
        return Form.of(first, second)

    def counting(self, epoch: int, weight: WeightFunction) -> list[int]:
        """Return the numbers of the batches of an epoch in which something counts.

        The targets of a batch are read one by one, until one of them counts.
        """
        assert self.split is not None, "the rank of the last stage needs the samples"
        counting = []
        for number, batch in enumerate(self.epoch(epoch)):
            read = partial(self.at(self.size(batch)).targets, draw=self.draw(epoch))
            if any(counted_for(weight, read(ids)) for ids in torch.split(torch.cat(batch), 1)):
                counting.append(number)
        return counting

    def first(self) -> tuple[Value, Value]:
        assert self.split is not None
        ids = torch.arange(self.sizes[0])
        return self.split.inputs(ids, self.draw(0)), self.split.targets(ids, self.draw(0))


def even(samples: int, most: int) -> list[int]:
    """Divide samples into the fewest pieces of at most `most`, whose sizes differ by at most 1."""
    return [size.samples for size in Size(samples).pieces(math.ceil(samples / most))]


def _same(microbatch: Any) -> Any:
    return microbatch


@dataclass(frozen=True)
class _Microbatches(Dataset[Value]):
    """A data set whose items are whole microbatches, so that no work is done sample by sample."""

    read: Callable[[Any], Value]
    ids: Sequence[Any]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> Value:
        return self.read(self.ids[number])


def loaded(
    read: Callable[[T], Value], ids: Sequence[T], workers: int = 0, timeout: float = 60.0
) -> Iterator[Value]:
    """Yield what `read` returns for each microbatch, in the order of `ids`, which say which samples it has.

    `workers`: processes that prepare them ahead, from the first microbatch to the last, or until the iterator
    is closed. PyTorch's global random state is not used. Raises TrainingStopped if a worker dies, fails, or
    takes over `timeout` seconds; without workers errors are raised unchanged.
    """
    loader: DataLoader[Value] = DataLoader(
        _Microbatches(read, ids),
        batch_size=None,
        collate_fn=_same,
        num_workers=workers,
        timeout=timeout if workers else 0,
        # The loader draws a seed for its workers; from the global generator, this would change dropout.
        generator=torch.Generator(),
    )
    yielded = 0
    try:
        for batch in loader:
            yield batch
            yielded += 1
    except Exception as error:
        if not workers:
            raise
        traceback.clear_frames(error.__traceback__)  # they reference the iterator, which keeps workers alive
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TrainingStopped(
            f"the data workers ({workers}) failed at microbatch {yielded} of {len(ids)}: {reason[-1]}; "
            "data.workers=0 makes the samples in the training process"
        ) from error
