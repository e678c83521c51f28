"""Encodes the messages between ranks by codecs, with error feedback.

Error feedback (Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD", 2019): the sender keeps the error of each message and adds it to the next one of the same edge
and shape, so that sum(decoded) = sum(x) - residual. Evaluations are not encoded: they measure the weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipetrain.codec import Codec, Codecs, Identity, NotFinite, on_wire
from pipetrain.errors import TrainingStopped
from pipetrain.model.specs import TensorSpec
from pipetrain.runtime.comm.message import Message
from pipetrain.schedule.actions import Edge

Slot = tuple[Edge, int, tuple[int, ...]]
"""The key of a residual: the edge, the tensor's number in the message, and its shape."""


class Coding:
    """Encodes and decodes one rank's messages with the codec of each direction.

    `channels_last`: four-dimensional tensors are decoded with their channels innermost.
    """

    def __init__(self, codecs: Codecs, channels_last: bool = False) -> None:
        self._codecs = codecs
        self._channels_last = channels_last
        self.residuals: dict[Slot, Tensor] = {}
        """What is owed to later messages, in the tensor's dtype, or float32 for 16-bit tensors."""
        self.seconds = 0.0
        """The time of encoding and decoding so far; on a GPU of its launches."""

    def restore(self, residuals: dict[Slot, Tensor]) -> None:
        """Go on with what was owed when a checkpoint was saved."""
        self.residuals = residuals

    def specs(self, edge: Edge, plain: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of a message as it travels."""
        return tuple(wire for spec in plain for wire in on_wire(self._codecs.for_edge(edge), spec))

    def encode(self, message: Message, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what travels. Raises TrainingStopped for a tensor that its codec cannot encode."""
        codec = self._codecs.for_edge(message.edge)
        if isinstance(codec, Identity):
            return tensors
        start, wire = time.perf_counter(), list[Tensor]()
        try:
            for number, tensor in enumerate(tensors):
                slot = message.edge, number, tuple(tensor.shape)
                wire += self._encode(codec, slot, tensor.detach())
        except NotFinite as error:
            direction = "forward" if message.src < message.dst else "backward"
            raise TrainingStopped(
                f"{message.name} from stage {message.src} to stage {message.dst} has {error}, which "
                f"codec {codec} cannot carry; try a lower optim.lr, or a warmup, or "
                f"codec.{direction}=identity, with which on_nan=skip can leave such an update out"
            ) from error
        self.seconds += time.perf_counter() - start
        return wire

    def decode(self, message: Message, arrived: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        codec = self._codecs.for_edge(message.edge)
        if isinstance(codec, Identity):
            return arrived
        start, pieces = time.perf_counter(), iter(arrived)
        decoded = tuple(self._decode(codec, pieces, spec) for spec in message.plain)
        self.seconds += time.perf_counter() - start
        return decoded

    def _encode(self, codec: Codec, slot: Slot, tensor: Tensor) -> Sequence[Tensor]:
        if not tensor.is_floating_point():
            return (tensor,)
        if not codec.error_feedback:
            return codec.encode(tensor)
        owed = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        owed = owed + self.residuals.get(slot, 0)
        encoded = codec.encode(owed.to(tensor.dtype))
        self.residuals[slot] = owed - codec.decode(encoded, TensorSpec(slot[2], tensor.dtype))
        return encoded

    def _decode(self, codec: Codec, pieces: Iterator[Tensor], spec: TensorSpec) -> Tensor:
        wire = [next(pieces) for _ in on_wire(codec, spec)]
        tensor = codec.decode(wire, spec) if spec.dtype.is_floating_point else wire[0]
        last = self._channels_last and tensor.dim() == 4
        return tensor.contiguous(memory_format=torch.channels_last) if last else tensor
