"""A channel whose messages are encoded: maps each message to what travels, over any other channel.

Error feedback (Seide et al., "1-Bit Stochastic Gradient Descent", 2014; Karimireddy et al., "Error Feedback
Fixes SignSGD", 2019): what a message lost is kept by its sender and added to the next one of the same edge
and shape, so that what arrives adds up to what was meant, but for the last residual: sum(decoded) = sum(x) -
residual. Evaluation does not come through here: what is evaluated is the weights, not the wire.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pipetrain.boundary import TensorSpec
from pipetrain.codec import Codec, Codecs, Identity, NotFinite, on_wire
from pipetrain.errors import TrainingStopped
from pipetrain.runtime.channel import Channel, Edge, Message

Slot = tuple[Edge, int, tuple[int, ...]]
"""Whose residual: the edge, the number of the tensor in the message, its shape."""


class Feedback:
    """The residuals of one rank's edges: what their receivers have not been told yet.

    In the tensor's dtype, of 16-bit tensors in float32.
    """

    def __init__(self) -> None:
        self.residuals: dict[Slot, Tensor] = {}

    def owed(self, slot: Slot, tensor: Tensor) -> Tensor:
        """Return a tensor with the residual added, in the residual's dtype."""
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        residual = self.residuals.get(slot)
        return tensor if residual is None else tensor + residual

    def keep(self, slot: Slot, owed: Tensor, decoded: Tensor) -> None:
        """Keep what the receiver of `decoded` was not told of what it was owed."""
        self.residuals[slot] = owed - decoded


class CodedChannel:
    """Encodes what `channel` sends and decodes what it receives, by the codec of each direction.

    With `channels_last` four-dimensional tensors arrive with their channels innermost. Codecs look for
    infinities, so on a GPU each message makes the host wait for the device. What is decoded there is only
    launched, and its time is not in `coded`.
    """

    def __init__(
        self, channel: Channel, codecs: Codecs, feedback: Feedback, channels_last: bool = False
    ) -> None:
        self._channel = channel
        self._codecs = codecs
        self._feedback = feedback
        self._channels_last = channels_last
        self._on_wire: dict[tuple[bool, tuple[TensorSpec, ...]], tuple[TensorSpec, ...]] = {}
        self._coded = 0.0

    @property
    def bound(self) -> int:
        """See Channel."""
        return self._channel.bound

    @property
    def waited(self) -> float:
        """See Channel."""
        return self._channel.waited

    @property
    def coded(self) -> float:
        """See Channel."""
        return self._coded

    @property
    def carried(self) -> int:
        """See Channel."""
        return self._channel.carried

    def expect(self, messages: Sequence[Message], watched: bool = False) -> None:
        """See Channel.expect."""
        self._channel.expect([self._encoded(message) for message in messages], watched)

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """See Channel.send. Raises TrainingStopped for a tensor that its codec cannot carry."""
        codec = self._codec(message)
        if not isinstance(codec, Identity):
            if any(t.is_cuda for t in tensors):  # encoding waits for it anyhow, and is not to be charged
                torch.cuda.current_stream().synchronize()
            start = time.perf_counter()
            numbered = enumerate(zip(message.specs, tensors, strict=True))
            try:
                tensors = [wire for n, pair in numbered for wire in self._encode(codec, message, n, *pair)]
            except NotFinite as error:
                raise self._refusal(codec, message, error) from error
            self._coded += time.perf_counter() - start
        self._channel.send(self._encoded(message), tensors)

    def recv(self, message: Message) -> tuple[Tensor, ...]:
        """See Channel.recv."""
        arrived = self._channel.recv(self._encoded(message))
        codec = self._codec(message)
        if isinstance(codec, Identity):
            return arrived
        start, left, tensors = time.perf_counter(), list(arrived), []
        for spec in message.specs:
            pieces = [left.pop(0) for _ in on_wire(codec, spec)]
            decoded = codec.decode(pieces, spec) if spec.dtype.is_floating_point else pieces[0]
            tensors.append(self._laid_out(decoded))
        self._coded += time.perf_counter() - start
        return tuple(tensors)

    def forget(self, mb: int) -> None:
        """See Channel.forget."""
        self._channel.forget(mb)

    def drain(self) -> None:
        """See Channel.drain."""
        self._channel.drain()

    def arrived(self, message: Message) -> bool:
        """See Channel.arrived."""
        return self._channel.arrived(self._encoded(message))

    def room(self, message: Message) -> bool:
        """See Channel.room."""
        return self._channel.room(self._encoded(message))

    def wait(self, receives: Sequence[Message], sends: Sequence[Message]) -> None:
        """See Channel.wait."""
        self._channel.wait([*map(self._encoded, receives)], [*map(self._encoded, sends)])

    def _codec(self, message: Message) -> Codec:
        return self._codecs.forward if _is_forward(message) else self._codecs.backward

    def _encoded(self, message: Message) -> Message:
        """Return the message that travels."""
        key = _is_forward(message), message.specs
        if key not in self._on_wire:
            codec = self._codec(message)
            self._on_wire[key] = tuple(wire for spec in message.specs for wire in on_wire(codec, spec))
        return replace(message, specs=self._on_wire[key])

    def _encode(
        self, codec: Codec, message: Message, number: int, spec: TensorSpec, tensor: Tensor
    ) -> tuple[Tensor, ...]:
        tensor = tensor.detach()
        if not spec.dtype.is_floating_point:
            return (tensor,)
        if not codec.error_feedback:
            return codec.encode(tensor)
        slot = message.edge, number, spec.shape
        owed = self._feedback.owed(slot, tensor)
        wire = codec.encode(owed.to(spec.dtype))
        self._feedback.keep(slot, owed, codec.decode(wire, spec))
        return wire

    def _laid_out(self, tensor: Tensor) -> Tensor:
        if self._channels_last and tensor.dim() == 4:
            return tensor.contiguous(memory_format=torch.channels_last)
        return tensor

    @staticmethod
    def _refusal(codec: Codec, message: Message, error: NotFinite) -> TrainingStopped:
        direction = "forward" if _is_forward(message) else "backward"
        return TrainingStopped(
            f"{message.name} from stage {message.src} to stage {message.dst} has {error}, which codec "
            f"{codec} cannot carry; try a lower optim.lr, or a warmup, or "
            f"codec.{direction}=identity, with which on_nan=skip can leave such an update out"
        )


def _is_forward(message: Message) -> bool:
    return message.src < message.dst
