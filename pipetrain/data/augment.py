"""Random numbers of samples; random crop and flip of the images of a whole microbatch at once.

Random numbers are a hash of (seed, epoch, sample id), and the arithmetic is per element, so an image is the
same in any batch, worker process, schedule or resumed run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pipetrain.data.splits import Draw
from pipetrain.rules import BOOL, whole

Words = NDArray[np.uint64]

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix(words: Words) -> Words:
    """Mix each 64-bit word: a bijection in which each input bit changes half of the output bits.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (SplitMix64), 2014, with
    the constants of Stafford's variant 13, as in java.util.SplittableRandom.
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def key(*numbers: int) -> int:
    """Hash integers, in order, to a 64-bit key; negative ones count modulo 2**64."""
    state = 0
    for number in numbers:
        word = np.array([(state ^ (number & _MASK)) + _GAMMA & _MASK], dtype=np.uint64)
        state = int(mix(word)[0])
    return state


def draw(stream: int, counters: Words) -> Words:
    """Return the numbers of a stream at the given positions: 64 random bits each, the counters' shape."""
    return mix(np.uint64(stream) + (counters + np.uint64(1)) * np.uint64(_GAMMA))


def draws(ids: Tensor, where: Draw, count: int) -> Words:
    """Return random words of samples int64 [n]: uint64 [n, count]."""
    positions: Words = ids.numpy().astype(np.uint64)[:, None] * np.uint64(count)
    steps: Words = np.arange(count, dtype=np.uint64)
    return draw(key(*where), positions + steps)


@dataclass(frozen=True)
class Augment:
    """Pad by `crop` black pixels on each side, crop at random to the old size, flip half of the images.

    The padding is black in the raw image, as in torchvision's RandomCrop(32, padding). Raises ConfigError for
    a crop that is not a number of pixels, or leaves nothing of an image.
    """

    crop: int
    flip: bool

    def __post_init__(self) -> None:
        whole(0).read("data.augment.crop", self.crop)
        BOOL.read("data.augment.flip", self.flip)

    def __call__(self, images: Tensor, ids: Tensor, where: Draw) -> Tensor:
        """Augment uint8 images [n, c, h, w] with sample ids [n]: uint8 [n, c, h, w], a new tensor."""
        words = draws(ids, where, 3)  # row, column, flip
        if self.crop:  # one gather over a view of all (2 crop + 1)**2 cuts of the padded images
            row, column = torch.from_numpy((words[:, :2] % np.uint64(2 * self.crop + 1)).astype(np.int64)).T
            height, width = images.shape[2:]
            whole(0, min(height, width) - 1).read("data.augment.crop", self.crop)
            cuts = functional.pad(images, (self.crop,) * 4).unfold(2, height, 1).unfold(3, width, 1)
            images = cuts[torch.arange(len(images)), :, row, column]
        if self.flip:
            flipped = torch.from_numpy((words[:, 2] >> np.uint64(63)).astype(np.bool_))
            images = torch.where(flipped[:, None, None, None], images.flip(-1), images)
        return images
