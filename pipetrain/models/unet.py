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

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipetrain.models.layers import NormalConvolution, NormalTransposed, before_relu, stack
from pipetrain.network.chain import Pop, Stash
from pipetrain.rules import COUNT, whole


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
    model = _body(levels - 1, convolutions, width, channels, flat=False)
    model.add_module("head", NormalConvolution(width, num_classes, std=width**-0.5, kernel_size=1))
    return model


def unet_instancenorm(
    num_classes: int = 1, depth: int = 5, convolutions: int = 5, width: int = 64, channels: int = 3
) -> nn.Sequential:
    """U-Net whose InstanceNorm and dropout mix no samples: shapes as `unet`, each operation is a layer.

    The defaults are those of torchgpipe's benchmark, in its 241 layers. `depth`: how often the size is
    halved, so h and w are multiples of 2^depth, and more than that. Pixels are repeated on the way up, which
    narrows the channels to width / 2. Raises ConfigError.
    """
    sizes = {"depth": depth, "num_classes": num_classes, "convolutions": convolutions, "channels": channels}
    for name, size in sizes.items():
        COUNT.read(name, size)
    whole(2).read("width", width)
    model = _body(depth, convolutions, width, channels, flat=True)
    width //= 2
    head = NormalConvolution(width, num_classes, std=width**-0.5, kernel_size=1, bias=False)
    model.add_module("head", head)
    return model


def _body(halvings: int, convolutions: int, width: int, channels: int, flat: bool) -> nn.Sequential:
    """Return a U-Net without its head; `flat`: that with InstanceNorm."""
    model = nn.Sequential()
    stashes = [Stash() for _ in range(halvings)]
    for level, stash in enumerate(stashes, start=1):
        _add_convolutions(model, f"down{level}", channels, [width] * convolutions, flat)
        model.add_module(f"down{level}_skip", stash)
        model.add_module(f"down{level}_pool", nn.MaxPool2d(2))
        channels, width = width, 2 * width
    last = channels if flat else width
    _add_convolutions(model, "bottom", channels, [width] * (convolutions - 1) + [last], flat)
    for level in range(halvings, 0, -1):
        channels, width = width, width // 2
        grow: nn.Module = nn.Upsample(scale_factor=2)
        if not flat:  # an output has one weight a channel, and no ReLU
            grow = NormalTransposed(channels, width, std=channels**-0.5, kernel_size=2, stride=2)
        model.add_module(f"up{level}_grow", grow)
        model.add_module(f"up{level}_skip", Pop(stashes[level - 1], Concatenate()))
        out = width // 2 if flat else width
        _add_convolutions(model, f"up{level}", 2 * width, [out] * convolutions, flat)
    return model


def _add_convolutions(
    model: nn.Sequential, name: str, channels: int, widths: Sequence[int], flat: bool
) -> None:
    """Add, for each width, a 3x3 convolution, BatchNorm and ReLU as a layer.

    `flat`: with dropout of channels, InstanceNorm and LeakyReLU instead, each a layer.
    """
    for index, width in enumerate(widths, start=1):
        std = before_relu(9 * channels)
        conv = NormalConvolution(channels, width, std=std, kernel_size=3, padding=1, bias=False)
        layer = stack(conv=conv, norm=nn.BatchNorm2d(width), relu=nn.ReLU())
        if flat:
            drop, norm = nn.Dropout2d(0.1), nn.InstanceNorm2d(width)
            layer = stack(conv=conv, dropout=drop, norm=norm, relu=nn.LeakyReLU())
        for kind, part in layer.named_children() if flat else [("conv", layer)]:
            model.add_module(f"{name}_{kind}{index}", part)
        channels = width


class Concatenate(nn.Module):
    """Joins what came up and the skip, each (n, c, h, w), to (n, 2 c, h, w)."""

    def forward(self, tensors: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(tensors, dim=1)
