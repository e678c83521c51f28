"""A folder of images, one folder a class, as torchvision's ImageFolder reads it: `<root>/train/CLASS/*.jpg`.

Files are read when needed, so a data set may be larger than the memory. torchvision itself is not needed;
Pillow is (`pip install 'pipetrain[images]'`).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from pipetrain.data.augment import draws
from pipetrain.data.splits import Data, Draw
from pipetrain.errors import ConfigError, failing
from pipetrain.rules import COUNT

# torchvision.datasets.folder.IMG_EXTENSIONS
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_BORDER = 256 / 224  # the shorter side of an image before it is cropped, over the size of the crop


@dataclass(frozen=True)
class ImageFiles:
    """A split of image files.

    An image becomes RGB, its shorter side `size` * 256 / 224 pixels, and is cropped to `size` pixels: in the
    middle or, with a draw, at random. If `flip`, half of the images are then mirrored. It is normalised by
    `mean` and `std` of each channel, where white is 1.
    """

    root: Path
    files: tuple[str, ...]  # below root
    labels: Tensor  # int64 [n]
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool

    def __len__(self) -> int:
        return len(self.files)

    def inputs(self, ids: Tensor, draw: Draw | None) -> Tensor:
        """Return the images of a microbatch, float32 [n, 3, size, size]. Raises ConfigError."""
        # Row, column and flip, from 0 to 1.
        places = np.full((len(ids), 3), 0.5) if draw is None else draws(ids, draw, 3) / 2.0**64
        pixels = [self._pixels(number, *place) for number, place in zip(ids.tolist(), places, strict=True)]
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (self.mean, self.std))
        return ((images - mean) / std).contiguous()

    def targets(self, ids: Tensor, draw: Draw | None) -> Tensor:
        return self.labels[ids]

    def first(self, n: int) -> ImageFiles:
        return replace(self, files=self.files[:n], labels=self.labels[:n])

    def checksum(self) -> int:
        """Return the CRC-32 of names, sizes in bytes, labels and image preparation, but not of pixels."""
        sizes = [(self.root / file).stat().st_size for file in self.files]
        preparation = [self.size, *self.mean, *self.std]
        return zlib.crc32(repr((self.files, sizes, self.labels.tolist(), preparation)).encode())

    def _pixels(self, number: int, row: float, column: float, flip: float) -> NDArray[np.uint8]:
        """Read a file, cropped at a place from 0 (the first) to 1 (the last): uint8 [size, size, 3]."""
        path = self.root / self.files[number]
        with failing(f"{path} cannot be read as an image"), Image.open(path) as image:
            width, height = image.size
            side = min(width, height) / _BORDER
            left, upper = column * (width - side), row * (height - side)
            box = left, upper, min(left + side, width), min(upper + side, height)
            pixels = image.convert("RGB").resize((self.size,) * 2, Image.Resampling.BILINEAR, box)
        if self.flip and flip > 0.5:
            pixels = pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(pixels)


def load(
    root: str,
    size: int = 224,
    mean: Sequence[float] = (0.485, 0.456, 0.406),
    std: Sequence[float] = (0.229, 0.224, 0.225),
    flip: bool = True,
    name: str = "images",
) -> Data:
    """Read the names of the images in `<root>/train/CLASS/` and `<root>/test/CLASS/`, or `val` for `test`.

    The classes are numbered in the order of their names. `mean` and `std` are ImageNet's by default. Raises
    ConfigError for a folder that is missing or empty, and for classes that differ.
    """
    COUNT.read("data.size", size)
    folder = Path(root).absolute()
    test = folder / ("val" if (folder / "val").is_dir() and not (folder / "test").is_dir() else "test")
    classes = [_classes(folder / "train"), _classes(test)]
    if lonely := sorted(set(classes[0]) ^ set(classes[1])):
        raise ConfigError(
            f"{folder} has {', '.join(lonely)} in only one of its folders train and {test.name}: "
            "both need the same class folders"
        )
    splits = []
    for split in classes:
        files = tuple(file for files in split.values() for file in files)
        labels = torch.tensor([label for label, files in enumerate(split.values()) for _ in files])
        splits.append(ImageFiles(folder, files, labels, size, tuple(mean), tuple(std), flip))
    return Data(name, splits[0], splits[1], classes=len(classes[0]))


def _classes(folder: Path) -> dict[str, list[str]]:
    """Return the files of each class, as paths from the folder's parent, both sorted. Raises ConfigError."""
    classes: dict[str, list[str]] = {}
    with failing(f"{folder} cannot be listed"):
        within = folder.iterdir() if folder.exists() else ()
        for path in sorted(path for path in within if path.is_dir() and not path.name.startswith(".")):
            images = (file for file in _files_under(path) if file.suffix.lower() in SUFFIXES)
            classes[path.name] = sorted(file.relative_to(folder.parent).as_posix() for file in images)
    empty = next((folder / name for name in classes if not classes[name]), None if classes else folder)
    if empty is not None:
        raise ConfigError(
            f"{empty} has no images ({' '.join(SUFFIXES)}): data.root must have train/CLASS/*.jpg and "
            f"test/CLASS/*.jpg (or val for test)"
        )
    return classes


def _files_under(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders. Raises OSError, which Path.rglob ignores."""

    def fail(error: OSError) -> None:
        raise error

    for inner, _, names in os.walk(folder, onerror=fail):
        yield from (Path(inner, name) for name in names)
