"""What a tensor looks like on the wire: codecs, each a pure pair of encode and decode.

What a tensor becomes has sizes that are known from its shape alone, so the receiver can post its receives
ahead and no header travels. A codec keeps nothing between two tensors: what it left out is kept, where error
feedback asks for that, by the channel (see coded.py). The bounds that are stated here are for finite tensors;
others are refused, because one infinity would make a step beside which all else is zero.

Sources: top-k with error feedback, Deep Gradient Compression (Lin et al., 2018); stochastic rounding to few
bits, QSGD (Alistarh et al., 2017).
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

from pipetrain.boundary import TensorSpec

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SCALES = ("tensor", "channel")
LEVELS = 127  # of int8 on either side of zero
INT32_MOST = 2**31 - 1


class NotFinite(ValueError):
    """A tensor with an infinity or NaN, which no lossy codec can carry."""


class Codec(ABC):
    """How floating-point tensors of one direction travel; all others travel as they are.

    With `error_feedback` what a message lost is added to the next one of its edge. `name`: what the records
    call it, if not by its class.
    """

    name = ""
    error_feedback = False

    def __str__(self) -> str:
        return self.name or type(self).__name__

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    @abstractmethod
    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Return what `encode` makes of a tensor of this spec."""

    @abstractmethod
    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return what travels; the tensor is left as it is. Raises NotFinite."""

    @abstractmethod
    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """Return a tensor of `spec` from what `encode` made of one."""


class Identity(Codec):
    """As it is."""

    name = "identity"

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """See Codec.wire_specs."""
        return (spec,)

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """See Codec.encode."""
        return (tensor,)

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """See Codec.decode."""
        return tensors[0]


class Half(Codec):
    """Rounded to `dtype`, fp16 or bf16; what has no more bits than that already keeps its own dtype.

    |x - decoded| <= 2^-11 |x| + 2^-25 for fp16 and 2^-8 |x| + 2^-134 for bf16. What is larger than the
    dtype's largest number (65504 for fp16) is clamped to it. Raises ValueError.
    """

    name = "half"

    def __init__(self, dtype: str = "fp16") -> None:
        if dtype not in ("fp16", "bf16"):
            raise ValueError(f"dtype={dtype} is unknown; choose one of fp16, bf16")
        self._cast = Cast(dtype)

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """See Codec.wire_specs."""
        return self._cast.wire_specs(spec)

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """See Codec.encode."""
        return self._cast.encode(tensor)

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """See Codec.decode."""
        return self._cast.decode(tensors, spec)


class Cast(Codec):
    """Rounded to a dtype by its short name, and clamped to its range; never to more bits than there are."""

    def __init__(self, dtype: str) -> None:
        self._dtype = DTYPES[dtype]

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """See Codec.wire_specs."""
        return (TensorSpec(spec.shape, self._narrower(spec.dtype)),)

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """See Codec.encode."""
        largest = _largest(tensor)
        _refuse_not_finite(largest)
        dtype = self._narrower(tensor.dtype)
        most = torch.finfo(dtype).max
        if tensor.dtype != dtype and largest.item() > most:
            tensor = tensor.clamp(-most, most)
        return (tensor.to(dtype),)

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """See Codec.decode."""
        return tensors[0].to(spec.dtype)

    def _narrower(self, dtype: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype.itemsize < dtype.itemsize else dtype


class Int8(Codec):
    """Whole numbers from -127 to 127 of a step: the largest absolute number of a tensor or channel over 127.

    A channel is an index of dimension 1; with fewer dimensions there is one step. |x - decoded| <= step / 2,
    and < step with `stochastic` rounding, which is right on average; besides that, the rounding of the
    tensor's own dtype. Steps travel in float32, of a float64 tensor in float64; none is smaller than that
    dtype's smallest normal number, so a tensor of zeros decodes to zeros. Stochastic rounding draws from
    torch's global generator. Raises ValueError.
    """

    name = "int8"

    def __init__(self, scale: str = "tensor", stochastic: bool = False, error_feedback: bool = False) -> None:
        if scale not in SCALES:
            raise ValueError(f"scale={scale} is unknown; choose one of {', '.join(SCALES)}")
        self._by_channel = scale == "channel"
        self._stochastic = _yes_or_no("stochastic", stochastic)
        self.error_feedback = _yes_or_no("error_feedback", error_feedback)

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """See Codec.wire_specs: the numbers, and the steps."""
        steps = spec.shape[1] if self._steps_by_channel(len(spec.shape)) else 1
        return TensorSpec(spec.shape, torch.int8), TensorSpec((steps,), _at_least_float32(spec.dtype))

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """See Codec.encode."""
        x = tensor.to(_at_least_float32(tensor.dtype))
        by_channel = self._steps_by_channel(x.dim())
        largest = _largest_by_channel(x) if by_channel else _largest(x).reshape(1)
        _refuse_not_finite(largest)
        finfo = torch.finfo(x.dtype)
        # Below the largest number over 127, so that 127 steps do not overflow.
        step = (largest / LEVELS).clamp(finfo.tiny, finfo.max * (1 - 2 * finfo.eps) / LEVELS)
        steps = x / _spread(step, x.dim())
        steps = (steps + torch.rand_like(steps)).floor_() if self._stochastic else steps.round_()
        return steps.clamp_(-LEVELS, LEVELS).to(torch.int8), step

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """See Codec.decode."""
        numbers, step = tensors
        return (numbers.to(step.dtype) * _spread(step, numbers.dim())).to(spec.dtype)

    def _steps_by_channel(self, dimensions: int) -> bool:
        return self._by_channel and dimensions > 1


class TopK(Codec):
    """The `fraction` of numbers that are largest in absolute value, with their places; the others are zeros.

    Of n numbers ceil(fraction n) travel, and one at least. No number that is left out is larger than one that
    travels, so |x - decoded|^2 <= (1 - fraction) |x|^2 over the tensor; those that travel are rounded to
    `values`, fp16 (clamped to 65504, see Half) or fp32. Places are int32 in the tensor's plain order, int64
    where there are more than 2^31 - 1. Raises ValueError.
    """

    name = "topk"

    def __init__(self, fraction: float = 0.01, values: str = "fp16", error_feedback: bool = True) -> None:
        if values not in ("fp16", "fp32"):
            raise ValueError(f"values={values} is unknown; choose one of fp16, fp32")
        self._sparse = _Sparse(_fraction(fraction), Cast(values))
        self.error_feedback = _yes_or_no("error_feedback", error_feedback)

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """See Codec.wire_specs: the places, and the values."""
        return self._sparse.wire_specs(spec)

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """See Codec.encode."""
        return self._sparse.encode(tensor)

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """See Codec.decode."""
        return self._sparse.decode(tensors, spec)


class TopKInt8(TopK):
    """As TopK, but the values that travel are those of Int8, with one step for all of them."""

    name = "topk_int8"

    def __init__(self, fraction: float = 0.01, stochastic: bool = False, error_feedback: bool = True) -> None:
        self._sparse = _Sparse(_fraction(fraction), Int8(stochastic=stochastic))
        self.error_feedback = _yes_or_no("error_feedback", error_feedback)


@dataclass(frozen=True, slots=True)
class _Sparse:
    """The largest numbers of a tensor: their places, and their values as another codec has them."""

    fraction: Fraction
    values: Codec

    def wire_specs(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        n = math.prod(spec.shape)
        kept = (math.ceil(self.fraction * n),)
        places = TensorSpec(kept, torch.int32 if n <= INT32_MOST else torch.int64)
        return places, *self.values.wire_specs(TensorSpec(kept, spec.dtype))

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        places, *_ = self.wire_specs(TensorSpec(tuple(tensor.shape), tensor.dtype))
        flat = tensor.reshape(-1)
        indices = _places_of_largest(flat, places.shape[0])
        return indices.to(places.dtype), *self.values.encode(flat[indices])

    def decode(self, tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        places, *values = tensors
        flat = torch.zeros(math.prod(spec.shape), dtype=spec.dtype, device=places.device)
        kept = TensorSpec(tuple(places.shape), spec.dtype)
        return flat.index_copy_(0, places.long(), self.values.decode(values, kept)).reshape(spec.shape)


def _places_of_largest(flat: Tensor, k: int) -> Tensor:
    """Return where the k largest absolute numbers are, in no order. NaN counts as the largest of all."""
    if flat.device.type != "cpu" or not 0 < k < len(flat):
        return torch.topk(flat.abs(), k, sorted=False).indices
    sizes = flat.abs().to(_at_least_float32(flat.dtype)).numpy()
    return torch.from_numpy(np.argpartition(sizes, len(sizes) - k)[-k:])  # a tenth of topk's time on a CPU


def _largest(x: Tensor) -> Tensor:
    """Return the largest absolute number, 0 of an empty tensor; it is not finite if any number is not."""
    if not x.numel():
        return x.new_zeros(())
    low, high = torch.aminmax(x)
    return torch.maximum(-low, high)


def _largest_by_channel(x: Tensor) -> Tensor:
    """As _largest, for each index of dimension 1."""
    if not x.numel():
        return x.new_zeros(x.shape[1])
    others = [dimension for dimension in range(x.dim()) if dimension != 1]
    return torch.maximum(-x.amin(others), x.amax(others))


def _refuse_not_finite(largest: Tensor) -> None:
    if not bool(largest.isfinite().all()):
        raise NotFinite("an infinity or NaN")


def _spread(step: Tensor, dimensions: int) -> Tensor:
    """Shape steps so that they multiply a tensor of so many dimensions, channel by channel."""
    return step.reshape([1] * dimensions if dimensions < 2 else [1, -1, *[1] * (dimensions - 2)])


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


def _fraction(fraction: float) -> Fraction:
    """Return a fraction exactly as it is written: 0.07 of 100 is 7, and not a little more."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 < fraction <= 1:
        raise ValueError(f"fraction={fraction} must be a number above 0 and at most 1")
    return Fraction(repr(fraction))


def _yes_or_no(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value} must be true or false")
    return value


@dataclass(frozen=True, slots=True)
class Codecs:
    """The codec of each direction: of activations, forward, and of gradients, backward."""

    forward: Codec = field(default_factory=Identity)
    backward: Codec = field(default_factory=Identity)

    @property
    def plain(self) -> bool:
        """Whether every message travels as it is."""
        return isinstance(self.forward, Identity) and isinstance(self.backward, Identity)

    def wire_bytes(self, specs: Sequence[TensorSpec], forward: bool) -> int:
        """Return the bytes on the wire of a message of tensors of these specs."""
        codec = self.forward if forward else self.backward
        return sum(wire.nbytes for spec in specs for wire in on_wire(codec, spec))


def on_wire(codec: Codec, spec: TensorSpec) -> tuple[TensorSpec, ...]:
    """Return what a tensor of a boundary becomes: whole numbers and truth values travel as they are."""
    return codec.wire_specs(spec) if spec.dtype.is_floating_point else (spec,)
