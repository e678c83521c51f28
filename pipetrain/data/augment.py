"""From bytes to what the model eats: random crop and flip, then normalisation, all of a microbatch at once.

The random numbers come from a hash of (seed, epoch, sample id), so an image looks the same in whatever
batch, worker or schedule it is made. The arithmetic is per element and rounds after each step, so that it too
does not depend on the company an image is in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipetrain.data.hashing import Words, draw, key
from pipetrain.errors import ConfigError

_DRAWS = 3  # numbers a sample takes from its stream: row, column, flip


@dataclass(frozen=True)
class Augment:
    """Pad by `crop` black pixels on each side, crop at random to the old size, flip half of the images.

    The padding is black in the raw image, before normalisation, as in torchvision's RandomCrop(32, padding).
    Raises ConfigError for a negative crop.
    """

    crop: int
    flip: bool

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise ConfigError(f"data.augment.crop must be 0 pixels or more; got {self.crop}")

    def __call__(self, images: Tensor, ids: Tensor, seed: int, epoch: int) -> Tensor:
        """Augment uint8 images (n, c, h, w) with sample ids (n,): uint8 (n, c, h, w), a new tensor."""
        first: Words = ids.numpy().astype(np.uint64)[:, None] * np.uint64(_DRAWS)
        steps: Words = np.arange(_DRAWS, dtype=np.uint64)
        words = draw(key(seed, epoch), first + steps)
        if self.crop:
            offsets = torch.from_numpy((words[:, :2] % np.uint64(2 * self.crop + 1)).astype(np.int64))
            images = _shift(images, offsets, self.crop)
        if self.flip:
            flipped = torch.from_numpy((words[:, 2] >> np.uint64(63)).astype(np.bool_))
            images = torch.where(flipped[:, None, None, None], images.flip(-1), images)
        return images


@dataclass(frozen=True)
class Transform:
    """What turns bytes into the model's input; without `augment` it only normalises, as for evaluation.

    It is plain data, so a worker process can be given it. The next epoch's is `replace(transform, epoch=1)`.
    """

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    augment: Augment | None = None
    seed: int = 0
    epoch: int = 0
    dtype: torch.dtype = torch.float32

    def __call__(self, images: Tensor, ids: Tensor) -> Tensor:
        """Make uint8 images (n, 3, h, w) with sample ids (n,) into `dtype` (n, 3, h, w), contiguous."""
        if self.augment is not None:
            images = self.augment(images, ids, self.seed, self.epoch)
        mean = torch.tensor(self.mean, dtype=self.dtype)[:, None, None]
        std = torch.tensor(self.std, dtype=self.dtype)[:, None, None]
        return images.to(self.dtype).div_(255).sub_(mean).div_(std)


def _shift(images: Tensor, offsets: Tensor, crop: int) -> Tensor:
    """Cut each padded image at its (row, column): one gather over a view of all (2 crop + 1)**2 cuts."""
    n, _, height, width = images.shape
    cuts = functional.pad(images, (crop,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    return cuts[torch.arange(n), :, offsets[:, 0], offsets[:, 1]]
