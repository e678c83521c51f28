"""Messages over a channel that encodes: what arrives, what is kept back; and training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from pipetrain.codec import Codec, Codecs, Half, Int8, Threshold, TopK, TopKInt8
from pipetrain.errors import TrainingStopped
from pipetrain.model.specs import specs_of
from pipetrain.runtime.comm.collectives import World
from pipetrain.runtime.comm.message import Message
from pipetrain.runtime.comm.process_groups import ProcessGroups
from pipetrain.runtime.message_coding import Coding
from tests.support import DEADLINE_S
from tests.support.cases import Case
from tests.support.models import Signs
from tests.support.process_ranks import in_world
from tests.support.thread_ranks import run_in_threads

CPU = torch.device("cpu")


def exchange_coded(world: World, store: Store, all_codecs: Sequence[Codecs]) -> int:
    """Two ranks send each other images, channels innermost, through each pair of codecs, and check them."""
    groups = ProcessGroups(world, [(0,), (1,)], [((0, 1), (0, 1)), ((1, 0), (1, 0))], CPU, store, DEADLINE_S)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    x = x.contiguous(memory_format=torch.channels_last)
    for codecs in all_codecs:
        channel, coding, plain = groups.channel(1, True), Coding(codecs, True), specs_of([x])
        ends = (0, 1), (1, 0)
        out, back = (
            Message(*end, 0, coding.specs(end, plain), end, plain)
            for end in (ends if world.rank == 0 else ends[::-1])
        )
        channel.expect([back] * 2)
        for _ in range(2):
            channel.send(out, coding.encode(out, [x]))
            (arrived,) = coding.decode(back, channel.recv(back))
        channel.drain()
        codec, residual = codecs.for_edge(back.edge), torch.zeros_like(x)
        for _ in range(2):  # what the other rank did
            owed = x + residual if codec.error_feedback else x
            decoded = codec.decode(codec.encode(owed), plain[0])
            residual = owed - decoded
        assert torch.equal(arrived, decoded)
        assert arrived.is_contiguous(memory_format=torch.channels_last)
    groups.close()
    return len(all_codecs)


class StopCheck:
    """Both ends of stage 0 on rank 0 and stage 1 on rank 1."""

    def __init__(self, codecs: Codecs, channels_last: bool = False) -> None:
        self.codings = [Coding(codecs, channels_last) for _ in range(2)]

    def up(self, *tensors: Tensor, mb: int = 0, source: int = 0) -> tuple[Tensor, ...]:
        """Send an activation and return what arrives."""
        plain, target = specs_of(tensors), 1 - source
        specs = self.codings[source].specs((source, target), plain)
        message = Message(source, target, mb, specs, (source, target), plain)
        wire = tuple(self.codings[source].encode(message, tensors))
        assert specs_of(wire) == specs
        return self.codings[target].decode(message, wire)

    def down(self, *tensors: Tensor, mb: int = 0) -> tuple[Tensor, ...]:
        """Likewise a gradient."""
        return self.up(*tensors, mb=mb, source=1)


def test_a_message_arrives_in_its_own_dtype_and_layout_and_whole_numbers_as_they_are():
    index, mask = torch.arange(7), torch.tensor([True, False])
    for codec in (Half(), Int8("channel"), TopK(0.5), TopKInt8(0.5), Threshold(0.1, 0.5)):
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            x = torch.randn(2, 3, 4, 5).to(dtype).contiguous(memory_format=torch.channels_last)
            arrived = StopCheck(Codecs(forward=codec), channels_last=True).up(index, x, mask)
            assert specs_of(arrived) == specs_of([index, x, mask])
            assert torch.equal(arrived[0], index)
            assert torch.equal(arrived[2], mask)
            y = arrived[1]
            assert y.is_contiguous(memory_format=torch.channels_last)
            torch.testing.assert_close(y[y != 0], x[y != 0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("bad", "codec"), [(math.inf, TopK()), (math.nan, Int8()), (-math.inf, Half())])
def test_what_is_not_finite_is_refused_with_the_message_s_name(bad, codec):
    ends = StopCheck(Codecs(codec, codec))
    says = "the activation of microbatch 7 from stage 0 to stage 1 has an infinity or NaN, which codec"
    with pytest.raises(TrainingStopped, match=f"^{says} .* or codec.forward=identity"):
        ends.up(torch.tensor([1.0, bad]), mb=7)
    with pytest.raises(TrainingStopped, match=r"the gradient of microbatch 2 .* or codec.backward=identity"):
        ends.down(torch.tensor([bad]), mb=2)


# Error feedback


FED_BACK: list[Codec] = [
    TopK(0.3),
    TopK(0.1, "fp32"),
    TopKInt8(0.3),
    Threshold(0.5, 0.2),
    Threshold(0.1, 1.0, "fp32"),
    Int8(error_feedback=True),
    Signs(0.5),
]


KEPT = {torch.float64: torch.float64, torch.float32: torch.float32}  # the residual's dtype


KEPT |= dict.fromkeys((torch.float16, torch.bfloat16), torch.float32)


numbers = st.lists(st.lists(st.integers(-1000, 1000), min_size=6, max_size=6), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(codec=st.sampled_from(FED_BACK), sent=numbers, dtype=st.sampled_from([*KEPT]))
def test_what_arrives_adds_up_to_what_was_meant_but_for_the_residual(codec, sent, dtype):
    ends = StopCheck(Codecs(forward=codec))
    xs = [torch.tensor(x, dtype=dtype) / 8 for x in sent]
    arrived = [ends.up(x)[0].double() for x in xs]
    (residual,) = ends.codings[0].residuals.values()
    assert residual.dtype == KEPT[dtype]
    meant = sum(x.double() for x in xs)
    torch.testing.assert_close(
        sum(arrived) + residual, meant, rtol=0, atol=2e4 * torch.finfo(KEPT[dtype]).eps
    )


def test_residuals_are_of_an_edge_a_tensor_and_a_shape():
    ends = StopCheck(Codecs(TopK(0.5), TopK(0.5)))
    ends.up(torch.tensor([4.0, 1.0]), torch.tensor([2.0, 8.0]))
    ends.up(torch.tensor([4.0, 1.0, 2.0, 8.0]), torch.zeros(0))
    ends.down(torch.tensor([16.0, 3.0]))
    kept = {slot: residual.tolist() for slot, residual in ends.codings[0].residuals.items()}
    assert kept == {
        ((0, 1), 0, (2,)): [0.0, 1.0],
        ((0, 1), 1, (2,)): [2.0, 0.0],
        ((0, 1), 0, (4,)): [0.0, 1.0, 2.0, 0.0],
        ((0, 1), 1, (0,)): [],
    }


# Training


WORDS = ("model._target_=tests.support.models.without_norm", "microbatches=2", "epochs=1")


SAME = [f"codec.{way}._target_=tests.support.models.Same" for way in ("forward", "backward")]


def test_a_codec_that_changes_nothing_trains_as_none_and_an_evaluation_is_not_encoded():
    wanted, (plain,) = run_in_threads(Case("interleaved_1f1b", 2, WORDS))
    state, (coded,) = run_in_threads(Case("interleaved_1f1b", 2, (*WORDS, *SAME)))
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
    assert (coded.trained, coded.evaluated) == (plain.trained, plain.evaluated)
    still = (*WORDS, "optim.lr=1e-9")
    _, (plain,) = run_in_threads(Case("gpipe", 2, still))
    _, (coded,) = run_in_threads(Case("gpipe", 2, (*still, "codec.forward=topk")))
    assert coded.evaluated["loss"] == pytest.approx(plain.evaluated["loss"], rel=1e-6)
    assert abs(coded.trained["loss"] / plain.trained["loss"] - 1) > 1e-4


@pytest.mark.processes
def test_codecs_over_gloo(ranks):
    codecs = [
        Codecs(Half(), TopKInt8(0.2)),
        Codecs(Int8("channel"), TopK(0.1)),
        Codecs(Half(), Threshold(0.5, 0.1)),
    ]
    assert ranks(in_world, exchange_coded, codecs) == [len(codecs)] * 2
