"""Small data sets that are computed, to try a task without a download.

They use only uniform random numbers, sums and products, which are the same on every machine to the last bit,
so all ranks make the same data.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from pipetrain.data.splits import Data, Tensors


def regression(
    train: int = 4096, test: int = 1024, features: int = 8, noise: float = 0.1, seed: int = 0
) -> Data:
    """Make inputs float32 [n, features], uniform from -1 to 1, and targets float32 [n, 1], of mean 1/3.

    A target is 2 x0 x1 + x2^2 - x3 / 2 plus uniform noise from -`noise` to `noise`: no model has a mean
    squared error under noise^2 / 3, and the best constant is 0.62 above that. At least four features.
    """
    generator = Generator().manual_seed(seed)
    x = _uniform((train + test, features), -1, 1, generator)
    smooth = 2 * x[:, 0] * x[:, 1] + x[:, 2] * x[:, 2] - x[:, 3] / 2
    y = (smooth + _uniform((train + test,), -noise, noise, generator))[:, None]
    return Data("regression", Tensors(x[:train], y[:train]), Tensors(x[train:], y[train:]))


def shapes(train: int = 1024, test: int = 256, size: int = 32, seed: int = 0) -> Data:
    """Make images float32 [n, 3, size, size] and the class of each pixel, int64 [n, size, size].

    An image shows a disc (class 1) and a rectangle (2), which may hide it, on a dark background (0), at
    random positions, in random sizes and colours. Only the form distinguishes the two classes. `size`: 16 or
    more.
    """
    generator = Generator().manual_seed(seed)
    n = train + test
    row, column = torch.arange(size)[:, None], torch.arange(size)
    y, x, top, left = torch.randint(size // 4, 3 * size // 4, (4, n, 1, 1), generator=generator)
    radius, height, width = torch.randint(size // 8, size // 4 + 1, (3, n, 1, 1), generator=generator)
    disc = (row - y) ** 2 + (column - x) ** 2 <= radius**2
    rectangle = ((row - top).abs() <= height) & ((column - left).abs() <= width)
    classes = torch.where(rectangle, 2, disc.long())
    colours = _uniform((n, 3, 3), 0.0, 0.3, generator)  # of each class, by channel
    colours[:, 1:] = _uniform((n, 2, 3), 0.4, 1.0, generator)
    images = colours[torch.arange(n)[:, None, None], classes].permute(0, 3, 1, 2)
    images = images + _uniform(images.shape, -0.1, 0.1, generator)
    return Data(
        "shapes",
        Tensors(images[:train], classes[:train]),
        Tensors(images[train:], classes[train:]),
        classes=3,
    )


def _uniform(shape: tuple[int, ...], low: float, high: float, generator: Generator) -> Tensor:
    return low + (high - low) * torch.rand(shape, generator=generator)
