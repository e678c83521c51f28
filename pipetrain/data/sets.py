"""What a data set is, once it is in memory: images as bytes and labels, in two splits.

Images stay uint8 until a microbatch is made of them: CIFAR-10 is 184 MB this way and 737 MB as floats, and
every process holds it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from torch import Tensor

from pipetrain.errors import ConfigError

IMAGE = (3, 32, 32)
"""Channels, height and width of every image."""


class DataMissing(ConfigError):
    """A data set that is not there and could not be had. The message says in one line what and why.

    It is what `data.fallback` answers; a file that is there and wrong is a plain ConfigError and is not.
    """


@dataclass(frozen=True)
class Split:
    """Samples in a fixed order: a sample's id is its position."""

    images: Tensor
    """uint8 (n, 3, 32, 32)"""
    labels: Tensor
    """int64 (n,)"""

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, n: int) -> Split:
        """Keep the first n samples, or all of them where there are fewer. Raises ConfigError for n < 1."""
        if n < 1:
            raise ConfigError(f"a limit on samples must be 1 or more, or null for all of them; got {n}")
        return Split(self.images[:n], self.labels[:n])


@dataclass(frozen=True)
class ImageData:
    """A data set of images: what to train on, what to test on, and how to normalise them."""

    name: str
    train: Split
    test: Split
    classes: int
    mean: tuple[float, float, float]
    """Of each channel of the training images, where white is 1."""
    std: tuple[float, float, float]
    """Likewise."""
    note: str = ""
    """Why it is not the data set that was asked for, if it is not."""

    @property
    def fingerprint(self) -> str:
        """Return what tells it from another one: name, sizes and a sum over the labels."""
        labels = b"".join(split.labels.numpy().tobytes() for split in (self.train, self.test))
        return f"{self.name} {len(self.train)}+{len(self.test)} {zlib.crc32(labels):08x}"
