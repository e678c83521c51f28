"""Codecs of one's own: what a user might write, and what they might get wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipetrain.codec import Codec
from pipetrain.model.specs import TensorSpec


class Same(Codec):
    """Changes nothing, but is not the identity that needs no coded channel."""

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (spec,)

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.clone(),)

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        return tensors[0]


class Signs(Codec):
    """A bool a number: whether it is positive."""

    error_feedback = True

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec(spec.shape, torch.bool),)

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor > 0,)

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        return (tensors[0].to(spec.dtype) * 2 - 1) * self._scale


class Raises(Same):
    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        raise ZeroDivisionError("mine")


class Lies(Same):
    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec(spec.shape, torch.float16),)


class Forgets(Lies):
    """Leaves a message in the dtype in which it travelled."""

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.half(),)
