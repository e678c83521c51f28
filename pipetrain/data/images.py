"""Images in memory, as bytes until a microbatch is made.

CIFAR-10 takes 184 MB this way, and 737 MB as floats.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipetrain.data.augment import Augment
from pipetrain.data.sets import Draw, crc
from pipetrain.errors import one_line
from pipetrain.network.values import TensorSpec, ValueSpec


@dataclass(frozen=True)
class Images:
    """Images with their labels, a Split. `mean`, `std`: of each channel of the training images; white is 1.

    load_data gives them the `augment` of the configuration, and the run's `dtype`.
    """

    images: Tensor  # uint8 [n, 3, h, w]
    labels: Tensor  # int64 [n]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    augment: Augment | None = None
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, ids: Tensor, draw: Draw | None) -> Tensor:
        """Return images as `dtype` [n, 3, h, w], contiguous: augmented where there is a draw."""
        images = self.images[ids]
        if self.augment is not None and draw is not None:
            images = self.augment(images, ids, *draw)
        mean = torch.tensor(self.mean, dtype=self.dtype)[:, None, None]
        std = torch.tensor(self.std, dtype=self.dtype)[:, None, None]
        return images.to(self.dtype).div_(255).sub_(mean).div_(std)

    def targets(self, ids: Tensor, draw: Draw | None) -> Tensor:
        """Return labels int64 [n]."""
        return self.labels[ids]

    def first(self, n: int) -> Images:
        return replace(self, images=self.images[:n], labels=self.labels[:n])

    def checksum(self) -> int:
        numbers = [*map(float, self.mean), *map(float, self.std)]
        return crc(self.images, self.labels) ^ zlib.crc32(repr(numbers).encode())

    def faults(self, classes: int | None) -> Iterator[str]:
        """Yield what is wrong, as its effect might go unnoticed. `classes`: that labels tell apart."""
        if type(classes) is not int or classes < 1:
            yield f"classes must be a whole number, 1 or more; got {classes!r}"
            return
        for name, numbers, least in (("mean", self.mean, -math.inf), ("std", self.std, 0.0)):
            values = torch.as_tensor(numbers, dtype=torch.float64)
            if values.shape != (3,) or not (values.isfinite() & (values > least)).all():
                more = " above 0" if least == 0 else ""
                yield f"{name} must be three finite numbers{more}; got {one_line(numbers)}"
        image, label = ValueSpec.in_batch((self.images, self.labels)).specs
        if image.dtype is not torch.uint8 or len(image.shape) != 3 or image.shape[0] != 3:
            yield f"images must be uint8[3, h, w] a sample; they are {image}"
        if label != TensorSpec((), torch.int64):
            yield f"labels must be int64[] a sample; they are {label}"
        if not len(self) or len(self.images) != len(self):
            yield f"has {len(self.images)} images and {len(self)} labels: each image needs one label"
        if len(wrong := ((self.labels < 0) | (self.labels >= classes)).nonzero()):
            at, of = int(wrong[0]), f"with {classes} classes labels are 0 to {classes - 1}"
            yield f"labels[{at}] is {int(self.labels[at])}, and {of}"
