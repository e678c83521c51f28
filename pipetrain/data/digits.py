"""The data set that is always available: 1,797 handwritten digits, as 32x32 colour images.

Everything runs with them without a network, in minutes, to an accuracy that shows whether training works. The
split is a hash of the sample's number, independent of the run's seed, so accuracies are comparable. Writers
are in both splits, as in the usual random split of this set. NOTICE names the authors.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from pipetrain.data.augment import draw
from pipetrain.data.splits import Data, Images

FILE = Path(__file__).with_name("digits.csv.gz")  # a line for each sample: 64 pixels from 0 to 16, the label
TEST_EVERY = 5  # one sample in five of each class is a test sample: 360 of the 1,797


def load() -> Data:
    """Read the digits: 1,437 to train on and 360 to test on, ten classes."""
    table: npt.NDArray[np.float64] = np.loadtxt(FILE, delimiter=",")
    images = _enlarge(torch.from_numpy(table[:, :-1].reshape(-1, 8, 8)).float())
    labels = torch.from_numpy(table[:, -1].astype(np.int64))
    hashes = draw(0, np.arange(len(labels), dtype=np.uint64))
    order = np.lexsort((hashes, table[:, -1]))  # by class, then by the hash
    test = torch.zeros(len(labels), dtype=torch.bool)
    test[torch.from_numpy(order[::TEST_EVERY].copy())] = True
    mean, std = _mean_and_std(images[~test, 0])
    train, under_test = (
        Images(images[chosen], labels[chosen], (mean,) * 3, (std,) * 3) for chosen in (~test, test)
    )
    return Data("digits", train, under_test, classes=10)


def _mean_and_std(pixels: Tensor) -> tuple[float, float]:
    """Return both for pixels from 0 to 255, as fractions of 255; integer sums do not depend on threads."""
    whole = pixels.long()
    n, sum_, squares = whole.numel(), int(whole.sum()), int((whole * whole).sum())
    return sum_ / n / 255, math.sqrt((n * squares - sum_ * sum_) / (n * (n - 1))) / 255


def _enlarge(images: Tensor) -> Tensor:
    """Turn 8x8 images of 0 to 16 [n, 8, 8] into uint8 [n, 3, 32, 32], grey, bilinear.

    The weights are eighths and the pixels integers, so float32 is exact and no machine rounds differently.
    """
    large = functional.interpolate(images[:, None], size=32, mode="bilinear", align_corners=False)
    return (large * (255 / 16)).round().to(torch.uint8).repeat(1, 3, 1, 1)
