"""A plain network of eight convolutions, to study what late gradients do to training.

BatchNorm hides much of it, as its layers do not mind the size of their weights: so it may have GroupNorm.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


def deep(norm: str = "group", depth: int = 8, width: int = 32, num_classes: int = 10) -> nn.Sequential:
    """Return `depth` 3x3 convolutions and a head: images (n, 3, 32, 32) to logits (n, num_classes).

    The images are averaged to 8x8 pixels first. Each convolution is a layer, and its `norm` (group or batch)
    with the ReLU another one, so that there are twice as many places to cut. Raises ValueError.
    """
    if norm not in ("group", "batch"):
        raise ValueError(f"norm={norm} must be group or batch")
    model = nn.Sequential()
    for index in range(1, depth + 1):
        convolution = nn.Conv2d(3 if index == 1 else width, width, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        first: dict[str, nn.Module] = {"pool": nn.AvgPool2d(4)} if index == 1 else {}
        model.add_module(f"conv{index}", nn.Sequential(OrderedDict({**first, "conv": convolution})))
        normed = nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(8, width)
        model.add_module(f"norm{index}", nn.Sequential(OrderedDict(norm=normed, relu=nn.ReLU())))
    head = {"mean": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "linear": nn.Linear(width, num_classes)}
    model.add_module("head", nn.Sequential(OrderedDict(head)))
    return model
