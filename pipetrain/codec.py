"""Codecs: pure pairs of encode and decode, for tensors on the wire.

The sizes of an encoded tensor follow from its shape, so the receiver can post its receives ahead, without
headers. A codec has no state: for error feedback runtime/message_coding.py holds the error. The bounds hold
for finite tensors; others are refused, as an infinite step would make all other numbers zero.

Sources: top-k with error feedback, Deep Gradient Compression (Lin et al., 2018); stochastic rounding to few
bits, QSGD (Alistarh et al., 2017); a threshold with error feedback, Strom, "Scalable Distributed DNN
Training Using Commodity GPU Cloud Computing" (2015).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from pipetrain.model.specs import TensorSpec
from pipetrain.rules import BOOL, number, one_of

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
LEVELS = 127  # int8 values on either side of zero
_FRACTION = number("a number above 0 and at most 1", lambda value: 0 < value <= 1)


class NotFinite(ValueError):
    """A tensor with an infinity or NaN, which no lossy codec can encode."""


class Codec(ABC):
    """Encodes the floating-point tensors of one direction; others are sent unchanged.

    `error_feedback`: the error of a message is added to the next message on its edge. `name`: in the records,
    if not the name of the class.
    """

    name = ""
    error_feedback = False

    def __str__(self) -> str:
        return self.name or type(self).__name__

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    @abstractmethod
    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Return the specs of the encoded tensors."""

    @abstractmethod
    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors to send; `tensor` is not changed. Raises NotFinite."""

    @abstractmethod
    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """Return a tensor of `spec` from its encoded form."""


class Identity(Codec):
    """Sends tensors unchanged."""

    name = "identity"

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (spec,)

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        return tensors[0]


class Half(Codec):
    """Rounds to `dtype`: fp16, bf16, or fp32 for float64 tensors; a dtype of no more bits is unchanged.

    |x - decoded| <= 2^-11 |x| + 2^-25 for fp16 and 2^-8 |x| + 2^-134 for bf16. Numbers above the dtype's
    largest one (65504 for fp16) are clamped to it. Raises ValueError.
    """

    name = "half"

    def __init__(self, dtype: str = "fp16") -> None:
        self._dtype = DTYPES[one_of(*DTYPES).read("dtype", dtype)]

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec(spec.shape, self._narrower(spec.dtype)),)

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        dtype = self._narrower(tensor.dtype)
        _largest(tensor)  # refuses what is not finite
        if dtype != tensor.dtype:
            most = torch.finfo(dtype).max
            clamped = tensor.clamp(-most, most)
            tensor = clamped + 0 * tensor if tensor.is_cuda else clamped  # an infinity arrives as NaN
        return (tensor.to(dtype),)

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        return tensors[0].to(spec.dtype)

    def _narrower(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype.itemsize < dtype.itemsize else dtype


class Int8(Codec):
    """Integers from -127 to 127 times a step: the largest absolute number of a tensor or channel over 127.

    A channel is an index of dimension 1; with fewer dimensions there is one step. |x - decoded| <= step / 2,
    and < step with `stochastic` rounding, which is unbiased and draws from torch's global generator; in
    addition, the rounding of the tensor's own dtype. Steps are sent in float32, for a float64 tensor in
    float64, and are at least that dtype's smallest normal number, so zeros decode to zeros. Raises
    ValueError.
    """

    name = "int8"

    def __init__(self, scale: str = "tensor", stochastic: bool = False, error_feedback: bool = False) -> None:
        self._by_channel = one_of("tensor", "channel").read("scale", scale) == "channel"
        self._stochastic = BOOL.read("stochastic", stochastic)
        self.error_feedback = BOOL.read("error_feedback", error_feedback)

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        steps = spec.shape[1] if self._by_channel and len(spec.shape) > 1 else 1
        return TensorSpec(spec.shape, torch.int8), TensorSpec((steps,), _at_least_float32(spec.dtype))

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        x = tensor.to(_at_least_float32(tensor.dtype))
        limits = torch.finfo(x.dtype)
        most = limits.max * (1 - 2 * limits.eps) / LEVELS  # so that 127 steps do not overflow
        step = (_largest(x, self._by_channel and x.dim() > 1) / LEVELS).clamp(limits.tiny, most)
        steps = x / _spread(step, x.dim())
        steps = (steps + torch.rand_like(steps)).floor_() if self._stochastic else steps.round_()
        return steps.clamp_(-LEVELS, LEVELS).to(torch.int8), step

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        numbers, step = tensors
        return (numbers.to(step.dtype) * _spread(step, numbers.dim())).to(spec.dtype)


class TopK(Codec):
    """Sends the `fraction` of the numbers with the largest absolute value, with positions; others become 0.

    Of n numbers ceil(fraction n) are sent, at least one, so |x - decoded|^2 <= (1 - fraction) |x|^2 over the
    tensor, apart from rounding to `values`, fp16 (clamped to 65504, see Half) or fp32. Positions in the
    flattened tensor are int32, or int64 if there are more than 2^31 - 1. Raises ValueError.
    """

    name = "topk"

    def __init__(self, fraction: float = 0.01, values: str = "fp16", error_feedback: bool = True) -> None:
        self._fraction = Fraction(repr(_FRACTION.read("fraction", fraction)))  # as written: 0.07 of 100 is 7
        self._values: Codec = Half(one_of("fp16", "fp32").read("values", values))
        self.error_feedback = BOOL.read("error_feedback", error_feedback)

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        n = math.prod(spec.shape)
        shape = (math.ceil(self._fraction * n),)
        places = TensorSpec(shape, torch.int32 if n < 2**31 else torch.int64)
        return places, *self._values.wire_specs(TensorSpec(shape, spec.dtype))

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        places, *_ = self.wire_specs(TensorSpec(tuple(tensor.shape), tensor.dtype))
        flat = tensor.reshape(-1)
        indices = _places_of_largest(flat, places.shape[0])
        return indices.to(places.dtype), *self._values.encode(self._passing(flat[indices]))

    def _passing(self, largest: Tensor) -> Tensor:
        """Return what is sent of the largest numbers [k], which are in any order."""
        return largest

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        places, *values = tensors
        flat = torch.zeros(math.prod(spec.shape), dtype=spec.dtype, device=places.device)
        sent = TensorSpec(tuple(places.shape), spec.dtype)
        return flat.index_copy_(0, places.long(), self._values.decode(values, sent)).reshape(spec.shape)


class TopKInt8(TopK):
    """Like TopK, with values encoded as by Int8, with one step for all."""

    name = "topk_int8"

    def __init__(self, fraction: float = 0.01, stochastic: bool = False, error_feedback: bool = True) -> None:
        super().__init__(fraction, error_feedback=error_feedback)
        self._values = Int8(stochastic=stochastic)


class Threshold(TopK):
    """Sends the numbers of at least `threshold` times the largest absolute one, as TopK does.

    A message's size is fixed: it has room for the `capacity` of the numbers. If more reach the threshold, the
    largest are sent, and if fewer, zeros fill it. Where all fit, |x - decoded| <= threshold max |x|, apart
    from rounding to `values`. Raises ValueError.
    """

    name = "threshold"

    def __init__(
        self,
        threshold: float = 0.5,
        capacity: float = 0.02,
        values: str = "fp16",
        error_feedback: bool = True,
    ) -> None:
        super().__init__(_FRACTION.read("capacity", capacity), values, error_feedback)
        self._threshold = _FRACTION.read("threshold", threshold)

    def _passing(self, largest: Tensor) -> Tensor:
        return largest.masked_fill(largest.abs() < self._threshold * _largest(largest), 0)


def _places_of_largest(flat: Tensor, k: int) -> Tensor:
    """Return the positions of the k largest absolute numbers, in any order."""
    if flat.is_cuda or not 0 < k < len(flat):
        return torch.topk(flat.abs(), k, sorted=False).indices
    sizes = flat.abs().to(_at_least_float32(flat.dtype)).numpy()
    return torch.from_numpy(np.argpartition(sizes, len(sizes) - k)[-k:])  # a tenth of topk's time on a CPU


def _largest(x: Tensor, by_channel: bool = False) -> Tensor:
    """Return the largest absolute number [1], or one for each index of dimension 1.

    Raises NotFinite. On a GPU, where that would make the host wait, the result is NaN instead.
    """
    if not x.numel():
        return x.new_zeros(x.shape[1] if by_channel else 1)
    reduced = [dimension for dimension in range(x.dim()) if not (by_channel and dimension == 1)]
    largest = torch.maximum(-x.amin(reduced), x.amax(reduced)).reshape(-1)
    if not largest.is_cuda and not all(map(math.isfinite, largest.tolist())):
        raise NotFinite("an infinity or NaN")
    return largest + 0 * largest


def _spread(step: Tensor, dimensions: int) -> Tensor:
    """Reshape steps to multiply a tensor of `dimensions` dimensions, channel by channel."""
    return step.reshape([1] * dimensions if dimensions < 2 else [1, -1, *[1] * (dimensions - 2)])


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


@dataclass(frozen=True, slots=True)
class Codecs:
    """The codecs of activations (forward) and of gradients (backward)."""

    forward: Codec = field(default_factory=Identity)
    backward: Codec = field(default_factory=Identity)

    def for_edge(self, edge: tuple[int, int]) -> Codec:
        return self.forward if edge[0] < edge[1] else self.backward

    @property
    def plain(self) -> bool:
        return isinstance(self.forward, Identity) and isinstance(self.backward, Identity)

    def wire_bytes(self, specs: Sequence[TensorSpec], forward: bool) -> int:
        """Return the bytes on the wire of a message with these specs."""
        codec = self.forward if forward else self.backward
        return sum(wire.nbytes for spec in specs for wire in on_wire(codec, spec))


def on_wire(codec: Codec, spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Return the specs of a tensor on the wire; integers and booleans are not encoded."""
    return codec.wire_specs(spec) if spec.dtype.is_floating_point else (spec,)
