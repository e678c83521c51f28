"""Which samples make up each update, and how their images get to the first stage.

A batch is one update; `microbatches` says into how many pieces it is cut. The order depends on the seed and
the epoch alone, so every schedule sees the same updates, and each rank that needs samples (the first stage
the images, the last the labels) makes the same lists for itself: nothing is sent. Images are made by
PyTorch's DataLoader, a whole microbatch at a time.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipetrain.data.hashing import key
from pipetrain.data.sets import Split
from pipetrain.errors import ConfigError, TrainingStopped

Transform = Callable[[Tensor, Tensor], Tensor]
"""(uint8 images (n, 3, h, w), sample ids (n,)) -> the model's input (n, 3, h, w)."""


def pieces(samples: int, microbatches: int) -> list[int]:
    """Cut a batch evenly: the sizes of its microbatches, the first ones one larger, as torch.tensor_split."""
    size, more = divmod(samples, microbatches)
    return [size + (index < more) for index in range(microbatches)]


class Sampler:
    """The samples of each update of each epoch, cut into microbatches.

    Without `shuffle` the samples come in their own order. Raises ConfigError where the numbers do not fit:
    nothing to train on, a batch that does not divide, a last batch with fewer samples than microbatches.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        microbatches: int,
        seed: int,
        drop_last: bool = False,
        shuffle: bool = True,
    ) -> None:
        self.batch_sizes = _batch_sizes(samples, batch_size, microbatches, drop_last)
        """Samples in each update of an epoch; the short last one is counted unless it is dropped."""
        self.microbatch_sizes = [pieces(size, microbatches) for size in self.batch_sizes]
        """Samples in each microbatch of each update."""
        self._samples = samples
        self._seed = seed
        self._shuffle = shuffle

    def epoch(self, epoch: int) -> list[list[Tensor]]:
        """List each update of an epoch, counted from 0: its microbatches' sample ids, int64 (n,) each."""
        if self._shuffle:
            generator = torch.Generator().manual_seed(key(self._seed, epoch) >> 1)
            order = torch.randperm(self._samples, generator=generator)
        else:
            order = torch.arange(self._samples)
        ends = list(accumulate(self.batch_sizes))
        batches = zip(ends, self.batch_sizes, self.microbatch_sizes, strict=True)
        return [list(torch.split(order[end - size : end], sizes)) for end, size, sizes in batches]


def inputs(
    split: Split,
    ids: Sequence[Tensor],
    transform: Transform,
    workers: int = 0,
    timeout: float = 60.0,
) -> Iterator[Tensor]:
    """Give the input of each microbatch, in the order of `ids` (int64 (n,) each).

    With `workers`, so many processes make them ahead; they start with the first microbatch and end with the
    last, or when the iterator is closed. PyTorch's own random state is not touched. Raises TrainingStopped
    where a worker dies, fails, or takes over `timeout` seconds; without workers an error comes as it is.
    """
    batches: DataLoader[Tensor] = DataLoader(
        _Microbatches(split, transform),
        batch_sampler=[microbatch.tolist() for microbatch in ids],
        num_workers=workers,
        collate_fn=_as_it_is,
        timeout=timeout if workers else 0,
        # It draws a seed for its workers, which from PyTorch's own generator would change the run's dropout.
        generator=torch.Generator(),
    )
    if not workers:
        yield from batches
        return
    given = 0
    try:
        for batch in batches:
            yield batch
            given += 1
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # they hold the iterator, and so keep the workers alive
        raise TrainingStopped(
            f"the data workers ({workers}) failed at microbatch {given} of {len(ids)}: {_last_line(error)}; "
            "data.workers=0 makes the images in the training process"
        ) from error


class _Microbatches(Dataset[Tensor]):
    """A data set that is asked for whole microbatches, so that nothing is done one image at a time."""

    def __init__(self, split: Split, transform: Transform) -> None:
        self._split = split
        self._transform = transform

    def __getitems__(self, ids: list[int]) -> Tensor:
        chosen = torch.tensor(ids)
        return self._transform(self._split.images[chosen], chosen)

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]


def _as_it_is(batch: Any) -> Any:
    return batch


def _last_line(error: Exception) -> str:
    """Of an error that comes from a worker with its traceback, the line that says what it was."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


def _batch_sizes(samples: int, batch_size: int, microbatches: int, drop_last: bool) -> list[int]:
    if batch_size < 1 or microbatches < 1:
        raise ConfigError(
            f"batch_size and microbatches must be 1 or more; got batch_size={batch_size}, "
            f"microbatches={microbatches}"
        )
    if batch_size % microbatches:
        raise ConfigError(
            f"microbatches={microbatches} does not divide batch_size={batch_size}: choose numbers that divide"
        )
    if samples < 1:
        raise ConfigError("there is no sample to use: give a data set, or a data.train_limit, that has one")
    whole, rest = divmod(samples, batch_size)
    if drop_last:
        if not whole:
            raise ConfigError(
                f"data.drop_last=true leaves nothing of {samples} samples at batch_size={batch_size}: "
                "set data.drop_last=false or a smaller batch_size"
            )
        rest = 0
    if 0 < rest < microbatches:
        raise ConfigError(
            f"the last batch has {rest} of {samples} samples, fewer than microbatches={microbatches}: "
            "set data.drop_last=true, another batch_size or fewer microbatches"
        )
    return [batch_size] * whole + [rest] * (rest > 0)
