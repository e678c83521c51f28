"""Layers that begin with normal weights of a given deviation and with biases of 0."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn


class _Normal(nn.Module):
    weight: Tensor

    def __init__(self, *sizes: int, std: float, **options: Any) -> None:
        self.std = std
        super().__init__(*sizes, **options)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if (bias := getattr(self, "bias", None)) is not None:
            nn.init.zeros_(bias)


class NormalLinear(_Normal, nn.Linear):
    """A linear layer; `std`: of its weights."""


class NormalEmbedding(_Normal, nn.Embedding):
    """An embedding; `std`: of its weights."""


class NormalConvolution(_Normal, nn.Conv2d):
    """A convolution; `std`: of its weights."""


class NormalTransposed(_Normal, nn.ConvTranspose2d):
    """A transposed convolution; `std`: of its weights."""


def before_relu(fan: int) -> float:
    """Return the deviation of weights before a ReLU, for `fan` inputs of an output, or outputs of an input.

    Source: He et al., "Delving deep into rectifiers", 2015.
    """
    return math.sqrt(2) / math.sqrt(fan)


def stack(**layers: nn.Module) -> nn.Sequential:
    """Return layers under their names."""
    return nn.Sequential(OrderedDict(layers))
