"""Codecs by themselves: sizes as said, errors within the bounds that are stated, infinities refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipetrain.codec import (
    Codec,
    Codecs,
    Half,
    Identity,
    Int8,
    NotFinite,
    Threshold,
    TopK,
    TopKInt8,
    on_wire,
)
from pipetrain.errors import ConfigError
from pipetrain.model.specs import TensorSpec, specs_of

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
DTYPES = [FP64, FP32, FP16, BF16]
UNIT = {FP64: 2.0**-53, FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}  # relative error of rounding
TINIEST = {FP64: 5e-324, FP32: 2.0**-149, FP16: 2.0**-24, BF16: 2.0**-133}
CODECS: list[Codec] = [
    Identity(),
    Half("fp16"),
    Half("bf16"),
    Int8(),
    Int8(scale="channel"),
    Int8(stochastic=True),
    Int8(scale="channel", stochastic=True),
    TopK(0.1, "fp16"),
    TopK(0.3, "fp32"),
    TopK(1.0, "fp32"),
    TopKInt8(0.1),
    TopKInt8(0.5, stochastic=True),
    Threshold(0.5, 0.2),
    Threshold(0.01, 1.0, "fp32"),
]
SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def fill(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """A finite tensor of a kind; the magnitudes of `wide` go through all that the dtype has."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=FP64)
    finfo = torch.finfo(dtype)
    if kind == "zeros":
        x = torch.zeros(shape, dtype=FP64)
    elif kind == "constant":
        x = torch.full(shape, float(torch.randn((), generator=generator)), dtype=FP64)
    elif kind == "wide":
        low, high = math.log2(finfo.smallest_normal) - 10, math.log2(finfo.max)
        exponent = low + (high - low) * torch.rand(shape, generator=generator, dtype=FP64)
        x = x.sign() * torch.exp2(exponent)
    elif kind == "largest":
        x = x.sign() * finfo.max
    elif kind == "tiniest":
        x = (3 * x).round() * TINIEST[dtype]
    return x.clamp(finfo.min, finfo.max).to(dtype)


@st.composite
def tensors(draw) -> Tensor:
    kind = draw(st.sampled_from(["normal", "zeros", "constant", "wide", "largest", "tiniest"]))
    x = fill(kind, draw(SHAPES), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    if x.dim() == 4 and draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    elif x.dim() and draw(st.booleans()):
        x = x.flip(0).transpose(0, -1)  # not in plain order
    return x


def spec_of(x: Tensor) -> TensorSpec:
    return specs_of([x])[0]


def through(codec: Codec, x: Tensor) -> Tensor:
    """What arrives; checks what each codec has to keep to."""
    before = x.clone()
    wire = codec.encode(x)
    assert specs_of(wire) == tuple(codec.wire_specs(spec_of(x)))
    assert torch.equal(x, before), "the tensor was changed"
    back = codec.decode(wire, spec_of(x))
    assert spec_of(back) == spec_of(x)
    assert bool(back.isfinite().all())
    return back


def wide(x: Tensor) -> Tensor:
    return x.to(FP64)


hypothetically = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def within(back: Tensor, x: Tensor, bound: Tensor | float) -> None:
    """Hold the error against a bound; float64's own error of working it out is let through."""
    error = (wide(back) / 2 - wide(x) / 2).abs() * 2  # halves: of float64's largest numbers, too
    assert bool((error <= bound * (1 + 2.0**-40)).all()), (error - bound).max()


# What every codec keeps to


@settings(hypothetically, max_examples=200)
@given(codec=st.sampled_from(CODECS), x=tensors())
def test_sizes_are_as_said_zeros_stay_and_nothing_grows(codec, x):
    torch.manual_seed(0)
    back = through(codec, x)
    assert bool((back[x == 0] == 0).all())
    largest = wide(x).abs().max() if x.numel() else 0.0
    assert bool((wide(back).abs() <= largest * (1 + 2.0**-7) + 2.0**-24).all())


@hypothetically
@given(
    codec=st.sampled_from(CODECS[1:]),
    x=tensors().filter(lambda x: x.numel()),
    bad=st.sampled_from([math.inf, -math.inf, math.nan]),
    at=st.integers(0, 10**6),
)
def test_one_infinity_or_nan_anywhere_is_refused(codec, x, bad, at):
    x = x.contiguous()
    x.view(-1)[at % x.numel()] = bad
    with pytest.raises(NotFinite, match="an infinity or NaN"):
        codec.encode(x)


def test_codecs_are_equal_by_what_they_do():
    for codec in CODECS:
        assert [codec == other for other in CODECS] == [codec is other for other in CODECS]
    assert Int8() == Int8("tensor")
    assert hash(TopK(0.1)) == hash(TopK(0.1))


# The bounds


@hypothetically
@given(x=tensors(), dtype=st.sampled_from(["fp16", "bf16"]))
def test_half_rounds_and_clamps(x, dtype):
    back, target = through(Half(dtype), x), {"fp16": FP16, "bf16": BF16}[dtype]
    if x.dtype.itemsize == 2:
        assert torch.equal(back, x)
        return
    most = torch.finfo(target).max
    clamped = wide(x).clamp(-most, most)
    within(
        back, clamped.to(back.dtype), UNIT[target] * wide(x).abs() * (1 + UNIT[FP32]) + TINIEST[target] / 2
    )


@hypothetically
@given(x=tensors(), by_channel=st.booleans(), stochastic=st.booleans())
def test_int8_is_within_half_a_step_or_one(x, by_channel, stochastic):
    torch.manual_seed(1)
    codec = Int8("channel" if by_channel else "tensor", stochastic)
    back = through(codec, x)
    if not x.numel():
        return
    size, over = wide(x).abs(), [d for d in range(x.dim()) if not (by_channel and x.dim() > 1 and d == 1)]
    step = (size.amax(over, keepdim=True) if over else size) / 127
    work = x.dtype if x.dtype.itemsize >= 4 else FP32
    step = step.clamp(min=torch.finfo(work).smallest_normal)
    rounding = 2 * UNIT[x.dtype] * size + TINIEST[x.dtype] + 300 * UNIT[work] * step
    within(back, x, step * (1.0 if stochastic else 0.5) + rounding)


def test_stochastic_rounding_is_right_on_average_and_repeats_with_the_seed():
    x = torch.linspace(-1, 1, 101)
    codec = Int8(stochastic=True)
    torch.manual_seed(3)
    many = torch.stack([through(codec, x) for _ in range(500)])
    torch.manual_seed(3)
    assert torch.equal(many[0], through(codec, x))
    deviation = 0.5 / 127 / 500**0.5  # at most, of a mean
    assert float((many.mean(0) - x).abs().max()) < 5 * deviation
    assert float((many.std(0)).max()) > 0.4 / 127


@hypothetically
@given(x=tensors(), fraction=st.sampled_from([1e-6, 0.01, 0.07, 0.5, 1.0]))
def test_topk_carries_the_largest_and_drops_no_larger_ones(x, fraction):
    codec = TopK(fraction, "fp32")
    places, values = codec.encode(x)
    n = x.numel()
    kept = math.ceil(round(fraction * n, 9)) if n else 0
    assert (places.dtype, len(places), len(values)) == (torch.int32, kept, kept)
    assert len(set(places.tolist())) == kept
    back, flat = through(codec, x), x.reshape(-1)
    dropped = torch.ones(n, dtype=torch.bool)
    dropped[places.long()] = False
    assert bool((back.reshape(-1)[dropped] == 0).all())
    if kept:
        least = flat[~dropped].abs().min()
        assert bool((flat[dropped].abs() <= least).all())
        narrow = FP32 if x.dtype == FP64 else x.dtype
        most = torch.finfo(narrow).max
        assert torch.equal(
            back.reshape(-1)[~dropped], flat[~dropped].clamp(-most, most).to(narrow).to(x.dtype)
        )
    lost = wide(flat[dropped]) / torch.finfo(x.dtype).max
    whole = wide(flat) / torch.finfo(x.dtype).max
    assert float((lost**2).sum()) <= (1 - fraction) * float((whole**2).sum()) * (1 + 1e-9) + 1e-300


@hypothetically
@given(x=tensors(), fraction=st.sampled_from([0.01, 0.3, 1.0]))
def test_topk_int8_is_int8_of_what_topk_carries(x, fraction):
    places, numbers, step = TopKInt8(fraction).encode(x)
    assert (places.dtype, numbers.dtype, step.shape) == (torch.int32, torch.int8, (1,))
    kept = x.reshape(-1)[places.long()]
    back = through(TopKInt8(fraction), x).reshape(-1)[places.long()]
    assert torch.equal(back, through(Int8(), kept))


@hypothetically
@given(
    x=tensors(), threshold=st.sampled_from([1e-3, 0.3, 0.5, 1.0]), capacity=st.sampled_from([0.01, 0.3, 1.0])
)
def test_threshold_carries_what_reaches_it_the_largest_first_and_no_more_than_it_has_room_for(
    x, threshold, capacity
):
    codec, n = Threshold(threshold, capacity, "fp32"), x.numel()
    places, values = codec.encode(x)
    room = math.ceil(round(capacity * n, 9))
    assert (places.dtype, len(places), len(values)) == (torch.int32, room, room)
    assert len(set(places.tolist())) == room
    sizes = x.abs().reshape(-1).sort(descending=True).values
    reach = int((sizes >= threshold * sizes[0]).sum()) if n else 0
    sizes[min(reach, room) :] = 0
    most = torch.finfo(FP32).max
    assert torch.equal(
        through(codec, x).abs().reshape(-1).sort(descending=True).values,
        sizes.clamp(max=most).to(FP32).to(x.dtype) if x.dtype == FP64 else sizes,
    )


def test_a_threshold_s_message_is_as_large_whatever_reaches_it():
    few, many = torch.ones(10), torch.ones(10)
    few[1:] = torch.linspace(-0.45, 0.45, 9)
    for x, sent in ((few, 1), (-few, 1), (many, 3), (0 * few, 0)):
        places, values = Threshold(0.5, 0.3).encode(x)
        assert (len(places), len(values), int((values != 0).sum())) == (3, 3, sent)
    assert torch.equal(through(Threshold(0.5, 0.3), few), few * (few == 1))


@pytest.mark.parametrize("codec", [TopK(2 / 100_003), Threshold(0.5, 0.001)])
def test_a_place_over_65504_is_exact(codec):
    """In half precision it would not be: that is how the record's top-k overflowed."""
    x = torch.zeros(100_003)
    x[[70_001, 99_999]] = torch.tensor([1.0, -2.0])
    assert torch.equal(through(codec, x), x)


# Bytes, and what cannot be


def test_the_bytes_of_resnet18_s_boundary():
    boundary = TensorSpec((64, 128, 16, 16), FP32)
    for codec, nbytes in {
        Identity(): 2**23,
        Half(): 2**22,
        Int8(): 2**21 + 4,
        Int8("channel"): 2**21 + 4 * 128,
        TopK(0.01): 6 * 20_972,
        TopK(0.01, "fp32"): 8 * 20_972,
        TopKInt8(0.01): 5 * 20_972 + 4,
        Threshold(): 6 * 41_944,
        Threshold(0.1, 0.01, "fp32"): 8 * 20_972,
    }.items():
        assert Codecs(backward=codec).wire_bytes([boundary], forward=False) == nbytes
        assert Codecs(backward=codec).wire_bytes([boundary], forward=True) == 2**23
        for dtype in (torch.int64, torch.uint8, torch.bool):  # travel as they are
            assert on_wire(codec, TensorSpec((3,), dtype)) == (TensorSpec((3,), dtype),)


def test_as_many_travel_as_the_fraction_says_as_it_is_written():
    """In floating point 0.07 * 100 is 7.000000000000001, and 8 would travel."""
    specs = TopK(0.07).wire_specs(TensorSpec((100,), FP32))
    assert specs == (TensorSpec((7,), torch.int32), TensorSpec((7,), FP16))
    places, _ = TopK(0.5).wire_specs(TensorSpec((2**16, 2**16), FP32))
    assert places == TensorSpec((2**31,), torch.int64)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Half("fp8"), "dtype=fp8 must be one of fp16, bf16, fp32"),
        (lambda: Int8("row"), "scale=row must be one of tensor, channel"),
        (lambda: Int8(stochastic="yes"), "stochastic=yes must be true or false"),
        (lambda: TopK(values="bf16"), "values=bf16 must be one of fp16, fp32"),
        (lambda: TopKInt8(error_feedback=1), "error_feedback=1 must be true or false"),
        (lambda: TopKInt8(math.nan), "fraction=nan must be a number above 0 and at most 1"),
        (lambda: Threshold(0), "threshold=0 must be a number above 0 and at most 1"),
        (lambda: Threshold(1.5), "threshold=1.5 must be a number above 0 and at most 1"),
        (lambda: Threshold(capacity="all"), "capacity=all must be a number above 0 and at most 1"),
        (lambda: Threshold(values="int8"), "values=int8 must be one of fp16, fp32"),
        (lambda: Threshold(error_feedback="no"), "error_feedback=no must be true or false"),
    ],
)
def test_a_wrong_value_is_refused(make, says):
    with pytest.raises(ConfigError, match=f"^{says}$"):
        make()
