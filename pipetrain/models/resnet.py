"""ResNet 18, 34 and 50 for 32x32 images, as a list of layers that can be cut between residual blocks.

A residual block is one layer: a cut inside it would send two tensors where one does. The stem is the one
for CIFAR, a 3x3 convolution that keeps the resolution, without the max-pool that ImageNet needs. Entries are
named after their group: `layer2_0` is the first block of the second group. No op works in place, so what
crosses a boundary can never be changed behind its owner's back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn

WIDTHS = (64, 128, 256, 512)
"""Channels inside the blocks of the four groups."""


class Residual(nn.Module):
    """A residual block: `relu(body(x) + shortcut(x))`, from (n, c, h, w) to (n, c', h / stride, w / stride).

    Source: He et al., "Deep residual learning", 2016, with a projection (option B) where the shape changes.
    """

    def __init__(self, body: nn.Sequential, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out_channels:
            self.shortcut = _convolution(channels, out_channels, 1, stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def resnet18(num_classes: int = 10) -> nn.Sequential:
    """ResNet18: images (n, 3, 32, 32) to logits (n, num_classes), in 10 layers."""
    return _resnet(_basic, 1, (2, 2, 2, 2), num_classes)


def resnet34(num_classes: int = 10) -> nn.Sequential:
    """ResNet34: images (n, 3, 32, 32) to logits (n, num_classes), in 18 layers."""
    return _resnet(_basic, 1, (3, 4, 6, 3), num_classes)


def resnet50(num_classes: int = 10) -> nn.Sequential:
    """ResNet50: images (n, 3, 32, 32) to logits (n, num_classes), in 18 layers."""
    return _resnet(_bottleneck, 4, (3, 4, 6, 3), num_classes)


def _resnet(
    body: Callable[[int, int, int], nn.Sequential], expansion: int, depths: tuple[int, ...], num_classes: int
) -> nn.Sequential:
    stem = _convolution(3, WIDTHS[0], 3, 1)
    stem.add_module("relu", nn.ReLU())
    layers: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    channels = WIDTHS[0]
    for group, (depth, width) in enumerate(zip(depths, WIDTHS, strict=True), start=1):
        for index in range(depth):
            stride = 2 if group > 1 and index == 0 else 1
            layers[f"layer{group}_{index}"] = Residual(
                body(channels, width, stride), channels, width * expansion, stride
            )
            channels = width * expansion
    layers["head"] = nn.Sequential(
        OrderedDict[str, nn.Module](
            pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), linear=nn.Linear(channels, num_classes)
        )
    )
    model = nn.Sequential(layers)
    _initialise(model)
    return model


def _basic(channels: int, width: int, stride: int) -> nn.Sequential:
    """Two 3x3 convolutions, a ReLU between them."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            first=_convolution(channels, width, 3, stride),
            relu=nn.ReLU(),
            second=_convolution(width, width, 3, 1),
        )
    )


def _bottleneck(channels: int, width: int, stride: int) -> nn.Sequential:
    """1x1, 3x3, 1x1; the stride is at the 3x3, as in torchvision."""
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            reduce=_convolution(channels, width, 1, 1),
            relu1=nn.ReLU(),
            conv=_convolution(width, width, 3, stride),
            relu2=nn.ReLU(),
            expand=_convolution(width, 4 * width, 1, 1),
        )
    )


def _convolution(channels: int, width: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict[str, nn.Module](
            conv=nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False),
            norm=nn.BatchNorm2d(width),
        )
    )


def _initialise(model: nn.Sequential) -> None:
    """Draw the convolutions in the order of the layers; the head keeps PyTorch's own draw.

    Source: He et al., "Delving deep into rectifiers", 2015, fan-out.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
