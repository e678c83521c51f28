"""A network of sixteen equal convolutions, to study what late gradients do to training at depth.

BatchNorm hides much of it, as its layers do not mind the size of their weights: so it may have GroupNorm.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

LAYERS = 16


def deep(norm: str = "group", width: int = 24, num_classes: int = 10, pool: int = 4) -> nn.Sequential:
    """Return sixteen 3x3 convolutions and a head: images (n, 3, 32, 32) to logits (n, num_classes).

    `norm`: group or batch; `pool`: the pixels averaged first, along each side. Raises ValueError.
    """
    if norm not in ("group", "batch"):
        raise ValueError(f"norm={norm} must be group or batch")
    model = nn.Sequential()
    for index in range(LAYERS):
        parts: dict[str, nn.Module] = {} if index else {"pool": nn.AvgPool2d(pool)}
        convolution = nn.Conv2d(width if index else 3, width, 3, padding=1, bias=False)
        nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
        parts["conv"] = convolution
        parts["norm"] = nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(4, width)
        parts["relu"] = nn.ReLU()
        model.add_module(f"conv{index + 1}", nn.Sequential(OrderedDict(parts)))
    head = {"mean": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "linear": nn.Linear(width, num_classes)}
    model.add_module("head", nn.Sequential(OrderedDict(head)))
    return model
