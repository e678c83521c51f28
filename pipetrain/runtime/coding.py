"""Encodes messages before they travel.

Error feedback (Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD", 2019): the sender keeps the error of each message and adds it to the next one of the same edge
and shape, so that sum(decoded) = sum(x) - residual. Evaluations are not encoded: they measure the weights.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipetrain.codec import Codec, Codecs, Identity, NotFinite, on_wire
from pipetrain.errors import TrainingStopped
from pipetrain.network.values import TensorSpec
from pipetrain.runtime.channel import Message
from pipetrain.schedule.actions import Edge

Slot = tuple[Edge, int, tuple[int, ...]]
"""The key of a residual: the edge, the tensor's number in the message, and its shape."""


class Feedback:
    """The residuals of one rank's edges, in the tensor's dtype, or float32 for 16-bit tensors."""

    def __init__(self) -> None:
        self.residuals: dict[Slot, Tensor] = {}

    def owed(self, slot: Slot, tensor: Tensor) -> Tensor:
        """Return a tensor plus its residual, in the residual's dtype."""
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        residual = self.residuals.get(slot)
        return tensor if residual is None else tensor + residual

    def keep(self, slot: Slot, corrected: Tensor, decoded: Tensor) -> None:
        """Keep the error `corrected` - `decoded` as the residual."""
        self.residuals[slot] = corrected - decoded


class Coding:
    """Encodes and decodes messages with the codec of each direction.

    `channels_last`: four-dimensional tensors are decoded with their channels innermost. `seconds`: what that
    took so far; on a GPU only the launch of it.
    """

    def __init__(self, codecs: Codecs, feedback: Feedback, channels_last: bool = False) -> None:
        self._codecs = codecs
        self._feedback = feedback
        self._channels_last = channels_last
        self._wire: dict[tuple[bool, tuple[TensorSpec, ...]], tuple[TensorSpec, ...]] = {}
        self.seconds = 0.0

    def on_wire(self, message: Message) -> Message:
        """Return a message as it travels."""
        key = _is_forward(message), message.specs
        if key not in self._wire:
            codec = self._codec(message)
            self._wire[key] = tuple(wire for spec in message.specs for wire in on_wire(codec, spec))
        return replace(message, specs=self._wire[key])

    def encode(self, message: Message, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what travels. Raises TrainingStopped for a tensor that its codec cannot encode."""
        codec = self._codec(message)
        if isinstance(codec, Identity):
            return tensors
        start = time.perf_counter()
        try:
            encoded = self._encode(codec, message, tensors)
        except NotFinite as error:
            direction = "forward" if _is_forward(message) else "backward"
            raise TrainingStopped(
                f"{message.what} from stage {message.src} to stage {message.dst} has {error}, which "
                f"codec {codec} cannot carry; try a lower optim.lr, or a warmup, or "
                f"codec.{direction}=identity, with which on_nan=skip can leave such an update out"
            ) from error
        self.seconds += time.perf_counter() - start
        return encoded

    def decode(self, message: Message, arrived: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the tensors of a message from what has arrived."""
        codec = self._codec(message)
        if isinstance(codec, Identity):
            return arrived
        start, pieces, decoded = time.perf_counter(), iter(arrived), []
        for spec in message.specs:
            wire = [next(pieces) for _ in on_wire(codec, spec)]
            tensor = codec.decode(wire, spec) if spec.dtype.is_floating_point else wire[0]
            if self._channels_last and tensor.dim() == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            decoded.append(tensor)
        self.seconds += time.perf_counter() - start
        return tuple(decoded)

    def _codec(self, message: Message) -> Codec:
        return self._codecs.forward if _is_forward(message) else self._codecs.backward

    def _encode(self, codec: Codec, message: Message, tensors: Sequence[Tensor]) -> list[Tensor]:
        wire: list[Tensor] = []
        for number, (spec, tensor) in enumerate(zip(message.specs, tensors, strict=True)):
            tensor = tensor.detach()
            if not spec.dtype.is_floating_point:
                wire.append(tensor)
            elif not codec.error_feedback:
                wire += codec.encode(tensor)
            else:
                slot = message.edge, number, spec.shape
                corrected = self._feedback.owed(slot, tensor)
                encoded = codec.encode(corrected.to(spec.dtype))
                self._feedback.keep(slot, corrected, codec.decode(encoded, spec))
                wire += encoded
        return wire


def _is_forward(message: Message) -> bool:
    return message.src < message.dst
