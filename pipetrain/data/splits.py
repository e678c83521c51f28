"""What a data set is: samples by number in two splits, of any kind; and those that lie in memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pipetrain.errors import ConfigError, one_line
from pipetrain.model.specs import TensorSpec, Value, ValueSpec, as_tuple, bytes_of, on_each, specs_of


class DataMissing(ConfigError):
    """A data set that is neither there nor can be downloaded; a damaged one raises plain ConfigError."""


class Draw(NamedTuple):
    """What the random numbers of a sample derive from, together with its id."""

    seed: int
    epoch: int


@runtime_checkable
class Split(Protocol):
    """Samples in a fixed order: a sample's id is its position. Picklable, for worker processes."""

    def __len__(self) -> int: ...

    def inputs(self, ids: Tensor, draw: Draw | None) -> Value:
        """Return the inputs of samples int64 [n]: tensors [n, ...] in host memory.

        `draw` decides their augmentation; None for none.
        """

    def targets(self, ids: Tensor, draw: Draw | None) -> Value:
        """Return the targets of samples int64 [n]: tensors [n, ...] in host memory."""

    def first(self, n: int) -> Split:
        """Return the first n samples."""

    def checksum(self) -> int:
        """Return a number from 0 that tells other samples apart."""


@runtime_checkable
class Padded(Split, Protocol):
    """A split whose samples have several lengths: by itself it pads them to the largest that there may be."""

    def lengths(self, ids: Tensor) -> tuple[int, ...]:
        """Return the lengths to which a batch of samples int64 [n] is padded, one for each such dimension."""

    def padded(self, lengths: tuple[int, ...]) -> Split:
        """Return the split with samples padded to these lengths."""


@dataclass(frozen=True, slots=True)
class DataFacts:
    """What every rank needs to know of a data set. `sample`: a ValueSpec of its inputs, as JSON."""

    name: str
    train: int  # samples
    test: int
    fingerprint: str
    note: str
    sample: list[Any]

    @property
    def example(self) -> ValueSpec:
        return ValueSpec.from_json(self.sample)


@dataclass(frozen=True)
class Data:
    """A data set. `classes`: how many its targets tell apart, None if unknown or none.

    `note`: why it replaces the configured data set, if it does.
    """

    name: str
    train: Split
    test: Split
    classes: int | None = None
    note: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """Name, sizes, and a checksum of the samples."""
        sums = [self.train.checksum(), self.test.checksum()]
        checksum = zlib.crc32(repr([self.classes, *sums]).encode())
        return f"{self.name} {len(self.train)}+{len(self.test)} {checksum:08x}"

    @cached_property
    def facts(self) -> DataFacts:
        sample = ValueSpec.in_batch(self.train.inputs(torch.zeros(1, dtype=torch.int64), None)).to_json()
        return DataFacts(self.name, len(self.train), len(self.test), self.fingerprint, self.note, sample)


def checksum(tensors: Sequence[Tensor], *more: object) -> int:
    """Return the CRC-32 of tensors in host memory, and of `more`; it does not depend on their layout."""
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(bytes_of(tensor).numpy().data, crc)
    return zlib.crc32("".join(map(repr, (specs_of(tensors), *more))).encode(), crc)


@dataclass(frozen=True)
class Tensors:
    """A split in memory: a tensor, or a tuple of them, of all inputs, and the same of all targets.

    Row i of each is of sample i. Nothing is augmented.
    """

    all_inputs: Value  # [n, ...] each, any dtype
    all_targets: Value  # [n, ...] each, any dtype

    def __len__(self) -> int:
        return len(as_tuple(self.all_inputs)[0])

    def inputs(self, ids: Tensor, draw: Draw | None) -> Value:
        return on_each(self.all_inputs, lambda tensor: tensor[ids])

    def targets(self, ids: Tensor, draw: Draw | None) -> Value:
        return on_each(self.all_targets, lambda tensor: tensor[ids])

    def first(self, n: int) -> Tensors:
        ids = torch.arange(min(n, len(self)))
        return Tensors(self.inputs(ids, None), self.targets(ids, None))

    def checksum(self) -> int:
        return checksum((*as_tuple(self.all_inputs), *as_tuple(self.all_targets)))


@dataclass(frozen=True)
class Images:
    """Images in memory with their labels, a Split. They stay bytes until a microbatch is made.

    So CIFAR-10 takes 184 MB, and not 737. `mean`, `std`: of each channel of the training images; white is 1.
    load_data gives them the `augment` of the configuration, and the run's `dtype`.
    """

    images: Tensor  # uint8 [n, 3, h, w]
    labels: Tensor  # int64 [n]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    augment: Callable[[Tensor, Tensor, Draw], Tensor] | None = None
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.labels)

    def inputs(self, ids: Tensor, draw: Draw | None) -> Tensor:
        images = self.images[ids]
        if self.augment is not None and draw is not None:
            images = self.augment(images, ids, draw)
        mean, std = (torch.tensor(of, dtype=self.dtype)[:, None, None] for of in (self.mean, self.std))
        return images.to(self.dtype).div_(255).sub_(mean).div_(std)

    def targets(self, ids: Tensor, draw: Draw | None) -> Tensor:
        return self.labels[ids]

    def first(self, n: int) -> Images:
        return replace(self, images=self.images[:n], labels=self.labels[:n])

    def checksum(self) -> int:
        return checksum((self.images, self.labels), *map(float, (*self.mean, *self.std)))

    def fault(self, classes: int | None) -> str:
        """Return what is wrong, as its effect might go unnoticed; else "". `classes`: of the labels."""
        if type(classes) is not int or classes < 1:
            return f"classes must be a whole number, 1 or more; got {classes!r}"
        for name, numbers in (("mean", self.mean), ("std", self.std)):
            values = torch.as_tensor(numbers, dtype=torch.float64)
            if values.shape != (3,) or not values.isfinite().all() or (name == "std" and values.min() <= 0):
                return f"{name} must be three finite numbers, and std above 0; got {one_line(numbers)}"
        image, label = ValueSpec.in_batch((self.images, self.labels)).specs
        if image.dtype is not torch.uint8 or len(image.shape) != 3 or image.shape[0] != 3:
            return f"images must be uint8[3, h, w] a sample; they are {image}"
        if label != TensorSpec((), torch.int64):
            return f"labels must be int64[] a sample; they are {label}"
        if not len(self) or len(self.images) != len(self):
            return f"has {len(self.images)} images and {len(self)} labels: each image needs one label"
        if len(wrong := ((self.labels < 0) | (self.labels >= classes)).nonzero()):
            at, labels = int(wrong[0]), f"with {classes} classes labels are 0 to {classes - 1}"
            return f"labels[{at}] is {int(self.labels[at])}, and {labels}"
        return ""
