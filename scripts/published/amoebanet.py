"""AmoebaNet-D as layers between which it can be cut: the stem, the cells and the classifier.

Source: Real et al., "Regularized evolution for image classifier architecture search", 2019, sized as in Huang
et al., "GPipe", 2019. It is the form whose speed torchgpipe 0.0.7 published, layer by layer: a normal cell
joins the states 0, 3, 4 and 6, as its authors' code does (in the paper 4, 5 and 6), and averages 3x3 where
the paper takes the maximum.

A cell takes what the two layers before it made. So it returns what it made and what the layer before it did,
and two tensors cross a cut.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError
from pipetrain.models.layers import NormalConvolution, NormalLinear, before_relu, stack
from pipetrain.rules import COUNT

Operation = tuple[int, str]  # number of a state, key of OPERATIONS


class Genotype(NamedTuple):
    """A kind of cell. States 0 and 1 enter it, each pair adds one, the sum; the states `joined` leave it."""

    pairs: tuple[tuple[Operation, Operation], ...]
    joined: tuple[int, ...]


NORMAL = Genotype(
    (
        ((1, "conv1"), (1, "average")),
        ((1, "identity"), (0, "conv7")),
        ((0, "conv1"), (0, "conv7")),
        ((2, "average"), (2, "identity")),
        ((1, "average"), (5, "conv1")),
    ),
    joined=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    (
        ((0, "maximum"), (0, "average")),
        ((2, "identity"), (1, "conv3")),
        ((2, "conv7"), (2, "average")),
        ((3, "identity"), (1, "maximum")),
        ((2, "average"), (3, "conv1")),
    ),
    joined=(4, 5, 6),
)

OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {  # of channels and a stride
    "identity": lambda channels, stride: nn.Identity(),
    "average": lambda channels, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
    "maximum": lambda channels, stride: nn.MaxPool2d(2, stride),
    "conv1": lambda channels, stride: _convolution(channels, channels, stride=stride),
    "conv3": lambda channels, stride: _narrowed(channels, stride, (3, 3)),
    "conv7": lambda channels, stride: _narrowed(channels, stride, (1, 7), (7, 1)),  # its stride is 1
}


def amoebanet(num_classes: int = 10, cells: int = 18, filters: int = 256) -> nn.Sequential:
    """AmoebaNet-D (cells, filters): images (n, 3, h, w) to logits (n, num_classes), in cells + 6 layers.

    h and w are multiples of 32. `cells`: normal ones, a multiple of 3; `filters`: a multiple of 8, four times
    the channels of the stem. Raises ConfigError.
    """
    for name, size, factor in (("cells", cells, 3), ("filters", filters, 8)):
        if COUNT.read(name, size) % factor:
            raise ConfigError(f"model.{name}={size} must be a multiple of {factor}")
    channels = last = before = filters // 4
    model, kind = stack(stem=_convolution(3, channels, (3, 3), stride=2)), NORMAL
    for group, normal in enumerate((0, cells // 3, cells // 3, cells // 3)):
        channels *= 2
        for index in range(normal + 1):
            halved, kind = kind is REDUCTION, NORMAL if index else REDUCTION
            cell = Cell(kind, last, before, channels, halved)
            model.add_module(f"cell{group}_{index}" if index else f"reduction{group}", cell)
            last, before = channels * len(kind.joined), last
    model.add_module("head", Head(last, num_classes))
    return model


class Cell(nn.Module):
    """Takes (last, before), or of the stem last for both; returns (out, last), each (n, c, h, w).

    `last`, `before`: their channels; `channels`: of a state; `halved`: last has half the size of before.
    """

    def __init__(self, kind: Genotype, last: int, before: int, channels: int, halved: bool) -> None:
        super().__init__()
        self.kind = kind
        self.last = _convolution(last, channels)
        self.before = Halving(before, channels) if halved else _convolution(before, channels)
        self.operations = nn.ModuleList(
            OPERATIONS[name](channels, 2 if kind is REDUCTION and state < 2 else 1)
            for state, name in chain(*kind.pairs)
        )

    def forward(self, tensors: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        last, before = (tensors, tensors) if isinstance(tensors, Tensor) else tensors
        states, operations = [self.last(last), self.before(before)], iter(self.operations)
        for pair in self.kind.pairs:
            one, other = (next(operations)(states[state]) for state, _ in pair)
            states.append(one + other)
        return torch.cat([states[number] for number in self.kind.joined], dim=1), last


class Halving(nn.Module):
    """Halves the size: a half of the channels sees the even pixels, the other the odd ones."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        form = {"std": before_relu(width), "kernel_size": 1, "stride": 2, "bias": False}
        self.even, self.odd = (NormalConvolution(channels, width // 2, **form) for _ in range(2))
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        out: Tensor = self.norm(torch.cat((self.even(x), self.odd(x[:, :, 1:, 1:])), dim=1))
        return out


class Head(nn.Module):
    """The classifier: (last, before) to logits (n, num_classes)."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.linear = NormalLinear(channels, num_classes, std=0.01)

    def forward(self, tensors: tuple[Tensor, Tensor]) -> Tensor:
        out: Tensor = self.linear(self.pool(tensors[0]).flatten(1))
        return out


def _convolution(
    channels: int, width: int, kernel: tuple[int, int] = (1, 1), stride: int = 1
) -> nn.Sequential:
    """ReLU, a convolution that keeps the size but for its stride, BatchNorm."""
    form = {"kernel_size": kernel, "padding": (kernel[0] // 2, kernel[1] // 2)}
    std = before_relu(width * kernel[0] * kernel[1])
    conv = NormalConvolution(channels, width, std=std, stride=stride, bias=False, **form)
    return stack(relu=nn.ReLU(), conv=conv, norm=nn.BatchNorm2d(width))


def _narrowed(channels: int, stride: int, *kernels: tuple[int, int]) -> nn.Sequential:
    """Convolutions of a quarter of the channels between two of 1x1."""
    narrow = channels // 4
    inner = {f"conv{n}": _convolution(narrow, narrow, kernel, stride) for n, kernel in enumerate(kernels, 1)}
    return stack(reduce=_convolution(channels, narrow), **inner, expand=_convolution(narrow, channels))
