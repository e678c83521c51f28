"""Which samples make up each update, and how their images get to the first stage.

A batch is one update; `microbatches` says into how many pieces it is cut. The order depends on the seed and
the epoch alone, so every schedule sees the same updates, and each rank that needs samples (the first stage
the images, the last the labels) makes the same lists for itself: nothing is sent.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipetrain.data.augment import Transform, key
from pipetrain.data.sets import Split
from pipetrain.errors import ConfigError, TrainingStopped


def pieces(samples: int, microbatches: int) -> list[int]:
    """Cut a batch evenly: the sizes of its microbatches, the first ones one larger, as torch.tensor_split."""
    size, more = divmod(samples, microbatches)
    return [size + (index < more) for index in range(microbatches)]


class Sampler:
    """The samples of each update of each epoch, cut into microbatches.

    `batch_sizes` says how many samples each update of an epoch has, `microbatch_sizes` how many each of its
    microbatches. Without `shuffle` the samples come in their own order. Raises ConfigError for a last batch
    with fewer samples than microbatches, and where `drop_last` leaves nothing.
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
        self.batch_sizes = [batch_size] * whole + [rest] * (rest > 0 and not drop_last)
        self.microbatch_sizes = [pieces(size, microbatches) for size in self.batch_sizes]
        self._samples = samples
        self._seed = seed
        self._shuffle = shuffle

    def epoch(self, epoch: int) -> list[list[Tensor]]:
        """List each update of an epoch, counted from 0: its microbatches' sample ids, int64 [n] each."""
        if self._shuffle:
            generator = torch.Generator().manual_seed(key(self._seed, epoch) >> 1)
            order = torch.randperm(self._samples, generator=generator)
        else:
            order = torch.arange(self._samples)
        batches = torch.split(order[: sum(self.batch_sizes)], self.batch_sizes)
        return [
            list(torch.split(ids, sizes)) for ids, sizes in zip(batches, self.microbatch_sizes, strict=True)
        ]


class _Microbatches(Dataset[Tensor]):
    """A data set that is asked for whole microbatches, so that nothing is done one image at a time."""

    def __init__(self, split: Split, transform: Transform) -> None:
        self._split = split
        self._transform = transform

    def __getitems__(self, ids: list[int]) -> Tensor:
        chosen = torch.tensor(ids)
        return self._transform(self._split.images[chosen], chosen)


def inputs(
    split: Split,
    ids: Sequence[Tensor],
    transform: Transform,
    workers: int = 0,
    timeout: float = 60.0,
) -> Iterator[Tensor]:
    """Give the input of each microbatch, in the order of `ids` (int64 [n] each).

    With `workers`, so many processes make them ahead; they start with the first microbatch and end with the
    last, or when the iterator is closed. PyTorch's own random state is not touched. Raises TrainingStopped
    where a worker dies, fails, or takes over `timeout` seconds; without workers an error comes as it is.
    """
    loader: DataLoader[Tensor] = DataLoader(
        _Microbatches(split, transform),
        batch_sampler=[microbatch.tolist() for microbatch in ids],
        num_workers=workers,
        collate_fn=torch.as_tensor,  # what comes is a whole microbatch
        timeout=timeout if workers else 0,
        # It draws a seed for its workers, which from PyTorch's own generator would change the run's dropout.
        generator=torch.Generator(),
    )
    given = 0
    try:
        for batch in loader:
            yield batch
            given += 1
    except Exception as error:
        if not workers:
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the iterator, and so keep the workers alive
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TrainingStopped(
            f"the data workers ({workers}) failed at microbatch {given} of {len(ids)}: {reason[-1]}; "
            "data.workers=0 makes the images in the training process"
        ) from error
