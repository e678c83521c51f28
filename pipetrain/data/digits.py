"""The data set that is always there: scikit-learn's 1,797 handwritten digits, as 32x32 colour images.

They let everything run on a machine with no network, in minutes, to an accuracy that says whether the
training works. The split is fixed by a hash of the sample's number, not by the run's seed, so accuracies of
different runs compare. Writers are in both splits, as in the usual random split of this set.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipetrain.data.hashing import draw
from pipetrain.data.sets import ImageData, Split

TEST_EVERY = 5
"""One sample in five of each class is for testing: 360 of the 1,797."""


def load() -> ImageData:
    """Read the digits that come with scikit-learn: 1,437 to train on and 360 to test on, ten classes."""
    from sklearn.datasets import load_digits  # a second of imports that only this data set needs

    digits = load_digits()
    images = _enlarge(torch.from_numpy(digits.images).float())
    labels = torch.from_numpy(digits.target.astype(np.int64))
    test = _test_samples(labels)
    train = Split(images[~test], labels[~test])
    grey = train.images[:, 0].double() / 255
    mean, std = float(grey.mean()), float(grey.std())
    return ImageData(
        name="digits",
        train=train,
        test=Split(images[test], labels[test]),
        classes=10,
        mean=(mean, mean, mean),
        std=(std, std, std),
    )


def _enlarge(images: Tensor) -> Tensor:
    """Make 8x8 images of 0 to 16 (n, 8, 8) into uint8 (n, 3, 32, 32), grey, bilinear.

    The weights are eighths and the pixels whole, so float32 is exact and no machine rounds differently.
    """
    large = functional.interpolate(images[:, None], size=32, mode="bilinear", align_corners=False)
    return (large * (255 / 16)).round().to(torch.uint8).repeat(1, 3, 1, 1)


def _test_samples(labels: Tensor) -> Tensor:
    """Choose which samples (n,) are for testing: each fifth, ordered by class and then by a hash."""
    hashes = draw(0, np.arange(len(labels), dtype=np.uint64))
    order = np.lexsort((hashes, labels.numpy()))
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    chosen[torch.from_numpy(order[::TEST_EVERY].copy())] = True
    return chosen
