"""U-Net as layers between which it can be cut: each convolution, max-pool and transposed convolution is one.

Source: Ronneberger, Fischer and Brox, "U-Net: convolutional networks for biomedical image segmentation",
2015, figure 1. As has become usual, the convolutions are padded, so that the scores have the size of the
image and no skip is cropped, and each has BatchNorm. Weights begin as in the paper, with a variance of 2 / N
for N inputs to an output before a ReLU.

A level is a resolution. The way down has a max-pool between two levels, and the way up a transposed
convolution. Each level of the way up joins what the same level made on the way down. Its Stash keeps this
skip for its Pop: it travels straight from the stage of the one to the stage of the other.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipetrain.model.chain import Pop, Stash
from pipetrain.models.layers import NormalConvolution, NormalTransposed, before_relu, stack
from pipetrain.rules import whole


def unet(
    num_classes: int = 2, levels: int = 5, convolutions: int = 2, width: int = 64, channels: int = 3
) -> nn.Sequential:
    """U-Net: images (n, channels, h, w) to the scores of each pixel (n, num_classes, h, w).

    `levels`: resolutions, each half of the one before, so h and w are multiples of 2^(levels - 1);
    `convolutions`: 3x3, of a level on each way; `width`: channels of the first level, doubled at each next
    one. The defaults are the paper's. It has 2 (levels - 1) (convolutions + 2) + convolutions + 1 layers.
    Raises ConfigError.
    """
    sizes = {"levels": levels, "num_classes": num_classes, "convolutions": convolutions}
    for name, size in (sizes | {"width": width, "channels": channels}).items():
        least = 2 if name == "levels" else 1
        whole(least).read(name, size)
    model = nn.Sequential()
    stashes = [Stash() for _ in range(levels - 1)]
    for level, stash in enumerate(stashes, start=1):
        _add_convolutions(model, f"down{level}", channels, width, convolutions)
        model.add_module(f"down{level}_skip", stash)
        model.add_module(f"down{level}_pool", nn.MaxPool2d(2))
        channels, width = width, 2 * width
    _add_convolutions(model, "bottom", channels, width, convolutions)
    for level in range(levels - 1, 0, -1):
        channels, width = width, width // 2
        # An output has one weight a channel, and no ReLU.
        grow = NormalTransposed(channels, width, std=channels**-0.5, kernel_size=2, stride=2)
        model.add_module(f"up{level}_grow", grow)
        model.add_module(f"up{level}_skip", Pop(stashes[level - 1], Concatenate()))
        _add_convolutions(model, f"up{level}", 2 * width, width, convolutions)
    model.add_module("head", NormalConvolution(width, num_classes, std=width**-0.5, kernel_size=1))
    return model


def _add_convolutions(model: nn.Sequential, name: str, channels: int, width: int, count: int) -> None:
    """Add `count` layers of a 3x3 convolution, BatchNorm and ReLU."""
    for index in range(1, count + 1):
        std = before_relu(9 * channels)
        conv = NormalConvolution(channels, width, std=std, kernel_size=3, padding=1, bias=False)
        layer = stack(conv=conv, norm=nn.BatchNorm2d(width), relu=nn.ReLU())
        model.add_module(f"{name}_conv{index}", layer)
        channels = width


class Concatenate(nn.Module):
    """Joins what came up and the skip, each (n, c, h, w), to (n, 2 c, h, w)."""

    def forward(self, tensors: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(tensors, dim=1)
