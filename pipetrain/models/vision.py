"""Models for images of 32x32 pixels: a perceptron, AlexNet, VGG and ResNet.

With `imagenet` the latter three are those for 224x224, with torchvision's layers. Weights begin as He et al.
have them before a ReLU, those of convolutions by fan-out.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from pipetrain.models.layers import NormalConvolution, NormalLinear, before_relu, stack
from pipetrain.rules import BOOL, COUNT, whole


def mlp(num_classes: int = 10, depth: int = 6, width: int = 128) -> nn.Sequential:
    """Perceptron: images (n, 3, 32, 32) to logits (n, num_classes), `depth` linear layers of `width` units.

    Without BatchNorm the result does not depend on the microbatches, so every flush schedule must give the
    same weights. Raises ConfigError if depth is under 2 or width under 1.
    """
    whole(2).read("depth", depth)
    COUNT.read("width", width)
    first, std = 3 * 32 * 32, before_relu(width)
    linear = NormalLinear(first, width, std=before_relu(first))
    model = stack(hidden1=stack(flatten=nn.Flatten(), linear=linear, relu=nn.ReLU()))
    for index in range(2, depth):
        linear = NormalLinear(width, width, std=std)
        model.add_module(f"hidden{index}", stack(linear=linear, relu=nn.ReLU()))
    model.add_module("head", NormalLinear(width, num_classes, std=std))
    return model


# AlexNet


def alexnet(num_classes: int = 10, width: int = 64, imagenet: bool = False) -> nn.Sequential:
    """AlexNet: images (n, 3, 32, 32) to logits (n, num_classes), in 8 layers.

    For 32x32 the first convolution is 3x3 without a stride, and a max-pool halves. `width`: channels of the
    first layer. Raises ConfigError. Source: Krizhevsky, "One weird trick for parallelizing convolutional
    neural networks", 2014.
    """
    COUNT.read("width", width)
    BOOL.read("imagenet", imagenet)
    first = (11, 4, 2) if imagenet else (3, 1, 1)  # kernel, stride, padding
    pool, side = ((3, 2), 6) if imagenet else ((2, 2), 4)
    layers = [(1, first), (3, (5, 1, 2)), (6, (3, 1, 1)), (4, (3, 1, 1)), (4, (3, 1, 1))]
    model, channels, hidden = nn.Sequential(), 3, 64 * width
    for index, (times, (kernel, stride, padding)) in enumerate(layers, start=1):
        std = before_relu(times * width * kernel**2)
        conv = NormalConvolution(channels, channels := times * width, kernel, stride, padding, std=std)
        layer = stack(conv=conv, relu=nn.ReLU())
        if index in (1, 2, 5):
            layer.add_module("pool", nn.MaxPool2d(*pool))
        model.add_module(f"conv{index}", layer)
    before = stack(pool=nn.AdaptiveAvgPool2d(side), flatten=nn.Flatten(), dropout=nn.Dropout())
    model.add_module("hidden1", _hidden(channels * side**2, hidden, before))
    model.add_module("hidden2", _hidden(hidden, hidden, nn.Dropout()))
    model.add_module("head", NormalLinear(hidden, num_classes, std=0.01))
    return model


# VGG


def vgg11(
    num_classes: int = 10, width: int = 64, batchnorm: bool = True, imagenet: bool = False
) -> nn.Sequential:
    """VGG11: images (n, 3, 32, 32) to logits (n, num_classes), in 9 layers, with `imagenet` 11."""
    return _vgg((1, 1, 2, 2, 2), num_classes, width, batchnorm, imagenet)


def vgg13(
    num_classes: int = 10, width: int = 64, batchnorm: bool = True, imagenet: bool = False
) -> nn.Sequential:
    """VGG13: images (n, 3, 32, 32) to logits (n, num_classes), in 11 layers, with `imagenet` 13."""
    return _vgg((2, 2, 2, 2, 2), num_classes, width, batchnorm, imagenet)


def vgg16(
    num_classes: int = 10, width: int = 64, batchnorm: bool = True, imagenet: bool = False
) -> nn.Sequential:
    """VGG16: images (n, 3, 32, 32) to logits (n, num_classes), in 14 layers, with `imagenet` 16."""
    return _vgg((2, 2, 3, 3, 3), num_classes, width, batchnorm, imagenet)


def vgg19(
    num_classes: int = 10, width: int = 64, batchnorm: bool = True, imagenet: bool = False
) -> nn.Sequential:
    """VGG19: images (n, 3, 32, 32) to logits (n, num_classes), in 17 layers, with `imagenet` 19."""
    return _vgg((2, 2, 4, 4, 4), num_classes, width, batchnorm, imagenet)


def _vgg(
    depths: tuple[int, ...], num_classes: int, width: int, batchnorm: bool, imagenet: bool
) -> nn.Sequential:
    """Stack `depths[i]` convolutions in block i, then the head; `width`: channels of the first block.

    A layer is a convolution with `batchnorm`, ReLU and, at the end of a block, the max-pool, which has no
    weights and makes the boundary four times smaller, so a cut before it would never be better. `conv3_2` is
    the second convolution of the third block. Raises ConfigError.

    Source: Simonyan and Zisserman, "Very deep convolutional networks", 2015, table 1, with BatchNorm and,
    without `imagenet`, the one linear layer that is usual for CIFAR-10.
    """
    COUNT.read("width", width)
    BOOL.read("batchnorm", batchnorm)
    BOOL.read("imagenet", imagenet)
    model, channels = nn.Sequential(), 3
    for block, (depth, times) in enumerate(zip(depths, (1, 2, 4, 8, 8), strict=True), start=1):
        for index in range(1, depth + 1):
            layer = _convolution(channels, channels := times * width, bias=True, norm=batchnorm)
            layer.add_module("relu", nn.ReLU())
            if index == depth:
                layer.add_module("pool", nn.MaxPool2d(2))
            model.add_module(f"conv{block}_{index}", layer)
    fan, before = (64 * width, nn.Dropout()) if imagenet else (channels, nn.Flatten())
    if imagenet:
        pooled = stack(pool=nn.AdaptiveAvgPool2d(7), flatten=nn.Flatten())
        model.add_module("hidden1", _hidden(channels * 7**2, fan, pooled))
        model.add_module("hidden2", _hidden(fan, fan, nn.Dropout()))
    model.add_module("head", stack(before=before, linear=NormalLinear(fan, num_classes, std=0.01)))
    return model


# ResNet


class Residual(nn.Module):
    """A residual block: `relu(body(x) + shortcut(x))`, from (n, c, h, w) to (n, c', h / stride, w / stride).

    It is one layer, because two tensors would cross a cut inside it. Source: He et al., "Deep residual
    learning", 2016, with a projection (option B) where the shape changes.
    """

    def __init__(self, body: nn.Sequential, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.body = body
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out_channels:
            self.shortcut = _convolution(channels, out_channels, kernel=1, stride=stride)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


def resnet18(num_classes: int = 10, imagenet: bool = False, width: int = 64) -> nn.Sequential:
    """ResNet18: images (n, 3, 32, 32) to logits (n, num_classes), in 10 layers."""
    return _resnet(_basic, 1, (2, 2, 2, 2), num_classes, imagenet, width)


def resnet34(num_classes: int = 10, imagenet: bool = False, width: int = 64) -> nn.Sequential:
    """ResNet34: images (n, 3, 32, 32) to logits (n, num_classes), in 18 layers."""
    return _resnet(_basic, 1, (3, 4, 6, 3), num_classes, imagenet, width)


def resnet50(num_classes: int = 10, imagenet: bool = False, width: int = 64) -> nn.Sequential:
    """ResNet50: images (n, 3, 32, 32) to logits (n, num_classes), in 18 layers."""
    return _resnet(_bottleneck, 4, (3, 4, 6, 3), num_classes, imagenet, width)


def resnet101(num_classes: int = 10, imagenet: bool = False, width: int = 64) -> nn.Sequential:
    """ResNet101: images (n, 3, 32, 32) to logits (n, num_classes), in 35 layers."""
    return _resnet(_bottleneck, 4, (3, 4, 23, 3), num_classes, imagenet, width)


def _resnet(
    body: Callable[[int, int, int], nn.Sequential],
    expansion: int,
    depths: tuple[int, ...],
    num_classes: int,
    imagenet: bool,
    width: int,
) -> nn.Sequential:
    """Stack `depths[i]` blocks in group i after CIFAR's stem, a 3x3 convolution, or 7x7 and a max-pool.

    `width`: channels of the stem.
    """
    COUNT.read("width", width)
    BOOL.read("imagenet", imagenet)
    channels = width
    stem = _convolution(3, channels, *((7, 2) if imagenet else (3, 1)))
    stem.add_module("relu", nn.ReLU())
    if imagenet:
        stem.add_module("pool", nn.MaxPool2d(3, 2, padding=1))
    model = stack(stem=stem)
    for group, (depth, times) in enumerate(zip(depths, (1, 2, 4, 8), strict=True), start=1):
        inner, outer = times * width, times * width * expansion
        for index in range(depth):
            stride = 2 if group > 1 and index == 0 else 1
            block = Residual(body(channels, inner, stride), channels, outer, stride)
            model.add_module(f"layer{group}_{index}", block)
            channels = outer
    pool, linear = nn.AdaptiveAvgPool2d(1), nn.Linear(channels, num_classes)
    model.add_module("head", stack(pool=pool, flatten=nn.Flatten(), linear=linear))
    return model


def _basic(channels: int, width: int, stride: int) -> nn.Sequential:
    """Two 3x3 convolutions, a ReLU between them."""
    first = _convolution(channels, width, stride=stride)
    return stack(first=first, relu=nn.ReLU(), second=_convolution(width, width))


def _bottleneck(channels: int, width: int, stride: int) -> nn.Sequential:
    """1x1, 3x3, 1x1; the stride is at the 3x3, as in torchvision."""
    return stack(
        reduce=_convolution(channels, width, kernel=1),
        relu1=nn.ReLU(),
        conv=_convolution(width, width, stride=stride),
        relu2=nn.ReLU(),
        expand=_convolution(width, 4 * width, kernel=1),
    )


# Shared


def _convolution(
    channels: int, width: int, kernel: int = 3, stride: int = 1, bias: bool = False, norm: bool = True
) -> nn.Sequential:
    std = before_relu(width * kernel**2)
    conv = NormalConvolution(channels, width, kernel, stride, padding=kernel // 2, std=std, bias=bias)
    return stack(conv=conv, norm=nn.BatchNorm2d(width)) if norm else stack(conv=conv)


def _hidden(fan: int, width: int, before: nn.Module) -> nn.Sequential:
    """Return a linear layer of `fan` inputs and its ReLU, after what comes `before`."""
    return stack(before=before, linear=NormalLinear(fan, width, std=before_relu(fan)), relu=nn.ReLU())
