"""Channels that wrap another channel, and the one that encodes messages.

Error feedback (Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD", 2019): the sender keeps the error of each message and adds it to the next one of the same edge
and shape, so that sum(decoded) = sum(x) - residual. Evaluations are not encoded: they measure the weights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipetrain.codec import Codec, Codecs, Identity, NotFinite, on_wire
from pipetrain.errors import TrainingStopped
from pipetrain.network.boundary import TensorSpec
from pipetrain.runtime.channel import Channel, Message
from pipetrain.schedule.actions import Edge, Tie

Slot = tuple[Edge, int, tuple[int, ...]]
"""The key of a residual: the edge, the tensor's number in the message, and its shape."""


class WrappedChannel:
    """A channel that forwards to another one the messages that `travels` returns; a base class."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def travels(self, message: Message) -> Message:
        return message

    @property
    def ordered(self) -> bool:
        return self._channel.ordered

    @property
    def waited(self) -> float:
        return self._channel.waited

    @property
    def coded(self) -> float:
        return self._channel.coded

    @property
    def carried(self) -> int:
        return self._channel.carried

    def expect(self, messages: Sequence[Message], watched: bool = False) -> None:
        self._channel.expect([*map(self.travels, messages)], watched)

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        self._channel.send(self.travels(message), tensors)

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        return self._channel.recv(self.travels(message))

    def forget(self, mb: int) -> None:
        self._channel.forget(mb)

    def drain(self) -> None:
        self._channel.drain()

    def arrived(self, message: Message) -> bool:
        return self._channel.arrived(self.travels(message))

    def room(self, message: Message) -> bool:
        return self._channel.room(self.travels(message))

    def wait(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        self._channel.wait([*map(self.travels, receives)], [*map(self.travels, sends)])

    def buffers(self) -> list[tuple[Sequence[int], Tensor]]:
        return self._channel.buffers()

    def check(self) -> None:
        self._channel.check()

    def tell_norms(self, squares: Mapping[int, Tensor], stages: int) -> None:
        self._channel.tell_norms(squares, stages)

    def hear_norms(self) -> Tensor:
        return self._channel.hear_norms()

    def tell_tied(self, tie: Tie, stage: int, numbers: Tensor, ranks: int) -> None:
        self._channel.tell_tied(tie, stage, numbers, ranks)

    def hear_tied(self, tie: Tie) -> Tensor:
        return self._channel.hear_tied(tie)


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


class CodedChannel(WrappedChannel):
    """Encodes and decodes the messages of `channel` with the codec of each direction.

    `channels_last`: four-dimensional tensors arrive with their channels innermost. On a GPU `coded` has only
    the launch of encoding and decoding.
    """

    def __init__(
        self, channel: Channel, codecs: Codecs, feedback: Feedback, channels_last: bool = False
    ) -> None:
        super().__init__(channel)
        self._codecs = codecs
        self._feedback = feedback
        self._channels_last = channels_last
        self._wire: dict[tuple[bool, tuple[TensorSpec, ...]], tuple[TensorSpec, ...]] = {}
        self._coded = 0.0

    @property
    def coded(self) -> float:
        return self._coded

    def travels(self, message: Message) -> Message:
        key = _is_forward(message), message.specs
        if key not in self._wire:
            codec = self._codec(message)
            self._wire[key] = tuple(wire for spec in message.specs for wire in on_wire(codec, spec))
        return replace(message, specs=self._wire[key])

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Encode and send. Raises TrainingStopped for a tensor that its codec cannot encode."""
        codec = self._codec(message)
        if not isinstance(codec, Identity):
            start = time.perf_counter()
            try:
                tensors = self._encode(codec, message, tensors)
            except NotFinite as error:
                direction = "forward" if _is_forward(message) else "backward"
                raise TrainingStopped(
                    f"{message.what} from stage {message.src} to stage {message.dst} has {error}, which "
                    f"codec {codec} cannot carry; try a lower optim.lr, or a warmup, or "
                    f"codec.{direction}=identity, with which on_nan=skip can leave such an update out"
                ) from error
            self._coded += time.perf_counter() - start
        super().send(message, tensors)

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        arrived, codec = super().recv(message), self._codec(message)
        if isinstance(codec, Identity):
            return arrived
        start, pieces, decoded = time.perf_counter(), iter(arrived), []
        for spec in message.specs:
            wire = [next(pieces) for _ in on_wire(codec, spec)]
            tensor = codec.decode(wire, spec) if spec.dtype.is_floating_point else wire[0]
            if self._channels_last and tensor.dim() == 4:
                tensor = tensor.contiguous(memory_format=torch.channels_last)
            decoded.append(tensor)
        self._coded += time.perf_counter() - start
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
