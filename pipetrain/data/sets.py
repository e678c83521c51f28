"""A data set in memory: images as bytes and labels, in two splits.

Images stay uint8 until a microbatch is made: CIFAR-10 takes 184 MB this way, and 737 MB as floats, in every
process.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

from torch import Tensor

from pipetrain.errors import ConfigError

IMAGE = (3, 32, 32)  # channels, height and width of every image


class DataMissing(ConfigError):
    """A data set that is neither there nor can be downloaded; a damaged one raises plain ConfigError."""


@dataclass(frozen=True)
class Split:
    """Samples in a fixed order: a sample's id is its position."""

    images: Tensor  # uint8 [n, 3, 32, 32]
    labels: Tensor  # int64 [n]

    def __len__(self) -> int:
        return len(self.labels)

    def first(self, n: int) -> Split:
        return Split(self.images[:n], self.labels[:n])


@dataclass(frozen=True)
class ImageData:
    """A data set of images: training and test samples, and their normalisation.

    `mean` and `std` are those of each channel of the training images, where white is 1. `note`: why it
    replaces the configured data set, if it does.
    """

    name: str
    train: Split
    test: Split
    classes: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    note: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """Name, sizes, and a checksum of pixels, labels and numbers."""
        numbers = [self.classes, *map(float, self.mean), *map(float, self.std)]
        checksum = zlib.crc32(repr(numbers).encode())
        for split in (self.train, self.test):
            for tensor in (split.images, split.labels):
                checksum = zlib.crc32(tensor.contiguous().numpy().data, checksum)
        return f"{self.name} {len(self.train)}+{len(self.test)} {checksum:08x}"


def prove(data: ImageData) -> None:
    """Refuse a data set with invalid fields, whose effect might go unnoticed. Raises ConfigError."""
    if fault := _fault(data):
        fault = " ".join(fault.split())
        raise ConfigError(f"the data set {data.name} cannot be used: {fault}; correct what data.source gives")


def _fault(data: ImageData) -> str | None:
    """Return what is wrong with a data set, None if nothing is."""
    if type(data.classes) is not int or data.classes < 1:
        return f"classes must be a whole number, 1 or more; got {data.classes!r}"
    for name, numbers, above in (("mean", data.mean, -math.inf), ("std", data.std, 0)):
        if not _are_three(numbers, above):
            more = " above 0" if above == 0 else ""
            return f"{name} must be three finite numbers{more}; got {numbers!r}"
    for name, split in (("train", data.train), ("test", data.test)):
        if fault := _split_fault(split, data.classes):
            return f"{name} {fault}"
    return None


def _are_three(numbers: Any, above: float) -> bool:
    sound = isinstance(numbers, Sequence) and len(numbers) == 3
    return sound and all(isinstance(number, Real) and above < float(number) < math.inf for number in numbers)


def _split_fault(split: Any, classes: int) -> str | None:
    if not isinstance(split, Split):
        return f"must be a pipetrain.data.Split; got {type(split).__name__}"
    for name, tensor, form in (
        ("images", split.images, "torch.uint8 [n, 3, 32, 32] on cpu"),
        ("labels", split.labels, "torch.int64 [n] on cpu"),
    ):
        if (got := _form(tensor)) != form:
            return f"{name} must be a tensor {form}; got {got}"
    if len(split.images) != len(split.labels):
        return f"has {len(split.images)} images and {len(split.labels)} labels: each image needs one label"
    if not len(split):
        return "has no sample"
    wrong = ((split.labels < 0) | (split.labels >= classes)).nonzero()
    if len(wrong):
        sample = int(wrong[0])
        label = int(split.labels[sample])
        return f"labels[{sample}] is {label}, and with {classes} classes labels are 0 to {classes - 1}"
    return None


def _form(tensor: Any) -> str:
    """Describe the dtype, shape and device of a tensor, or the type of anything else."""
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    sizes = ["n", *map(str, tensor.shape[1:])] if tensor.dim() else []
    return f"{tensor.dtype} [{', '.join(sizes)}] on {tensor.device}"
