"""GPT: the published sizes, what attention may see, and the start of training."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipetrain.config.build import build
from pipetrain.errors import ConfigError
from pipetrain.model.chain import Chain
from pipetrain.model.specs import Size, TensorSpec, ValueSpec
from pipetrain.models import gpt
from pipetrain.plan.cost_estimate import estimate
from pipetrain.plan.cut import refuse_cuts, shared_weights
from tests.support.cases import options_of

SMALL = {"depth": 2, "heads": 2, "width": 8, "sequence": 16, "vocabulary": 11}
ENTRY = ValueSpec((TensorSpec((16,), torch.int64),)).of(Size(3))  # a microbatch of 3 samples

# Parameters of GPT-2 with a tied head, by blocks: github.com/openai/gpt-2 and its weights.
PUBLISHED = {12: 124_439_808, 24: 354_823_168, 36: 774_030_080, 48: 1_557_611_200}


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def small(**changed) -> nn.Sequential:
    torch.manual_seed(0)
    return gpt(**(SMALL | changed))


def tokens(n: int, length: int = 16) -> torch.Tensor:
    return torch.randint(11, (n, length), generator=torch.Generator().manual_seed(1))


def test_configs_take_vocabulary_and_sequence_from_the_data():
    for name, blocks in zip(("gpt", "gpt_medium", "gpt_large", "gpt_xl"), PUBLISHED, strict=True):
        cfg = options_of([f"model={name}", "data=text", "data.block=64"])
        with torch.device("meta"):
            model = build(cfg, "model")
        assert parameters(model) == PUBLISHED[blocks] + (256 * 2 - 50257 + 64 - 1024) * cfg["model"]["width"]
        assert [name for name, _ in model.named_children()][-3:] == [f"block{blocks}", "norm", "head"]


def test_a_tied_head_has_no_weight_of_its_own():
    with torch.device("meta"):
        assert parameters(gpt(tied=True)) == PUBLISHED[12]
        assert parameters(gpt()) == PUBLISHED[12] + 50257 * 768
        assert parameters(gpt(sequence=128, vocabulary=3000)) == 89_762_304  # of the pipelining literature
    model = small(tied=True)
    chain = Chain(model)
    refuse_cuts(chain, estimate(model, ENTRY), [2])
    assert shared_weights(chain, [2]) == {"embedding.tokens.weight": (0, 1)}
    assert shared_weights(chain, []) == shared_weights(Chain(small()), [2]) == {}


@torch.no_grad()
def test_a_token_sees_itself_and_those_before_it_in_its_own_sample():
    """Of tokens of any length, and no layer writes its input."""
    model, one = small().double(), tokens(2)
    out = given = one[:, :7]
    for layer in model:
        before, given = out.clone(), out
        out = layer(given)
        assert torch.equal(given, before)
    torch.testing.assert_close(out, model(one)[:, :7])
    other = one.clone()
    other[0, 9] = (other[0, 9] + 1) % 11
    changed = (model(one) != model(other)).any(-1)
    assert not changed[0, :9].any()
    assert changed[0, 9:].all()
    assert not changed[1].any()
    assert len(model[0](torch.zeros(1, 16, dtype=torch.int64))[0].unique(dim=0)) == 16  # positions differ


@torch.no_grad()
def test_attention_is_that_of_the_paper():
    """Vaswani et al., 2017, equation 1, for each head."""
    attention, x = small()[1].attention.double(), torch.randn(2, 5, 8, dtype=torch.float64)
    queries, keys, values = attention.project(x).split(8, dim=-1)
    mask = torch.full((5, 5), -math.inf, dtype=torch.float64).triu(1)
    heads = []
    for part in (slice(0, 4), slice(4, 8)):
        scores = queries[..., part] @ keys[..., part].mT / math.sqrt(4)
        heads.append((scores + mask).softmax(-1) @ values[..., part])
    torch.testing.assert_close(attention(x), attention.contract(torch.cat(heads, -1)))


def test_weights_are_drawn_as_gpt_2_s_and_the_first_loss_is_that_of_even_odds():
    model = small(depth=8, width=128, vocabulary=500)
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            assert not tensor.any()
        elif "norm" not in name:
            std = 0.02 / 4 if name.endswith("contract.weight") else 0.02
            assert tensor.std().item() == pytest.approx(std, rel=0.1), name
    loss = functional.cross_entropy(model(tokens(4)).flatten(0, 1), tokens(4).flatten())
    assert loss.item() == pytest.approx(math.log(500), rel=0.02)
    model, x = small(dropout=0.5), tokens(2)
    assert not torch.equal(model(x), model(x))
    torch.testing.assert_close(model.eval()(x), small()(x))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"depth": 0}, "depth=0 must be a whole number of at least 1"),
        ({"heads": 3}, "model.width=8 must be a multiple of model.heads=3: change one of them"),
        ({"dropout": 1}, "model.dropout must be a fraction, at least 0 and less than 1; got 1"),
        ({"sequence": 8}, r"layer 0 \(embedding\).*16 tokens are more than .* sequence of 8"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_and_too_long_a_sample_before_the_start(wrong, says):
    with pytest.raises(ConfigError, match=says):
        estimate(small(**wrong), ENTRY)


def test_the_work_of_a_block_counts_its_attention():
    """Twice the multiplications: 12 width^2 a token in the linear layers, and 2 width a pair of tokens."""
    n, length, width = 3, 16, 8
    work = estimate(small(dropout=0.1), ENTRY)[1].flops
    assert work - n * length * width == 2 * n * length * 12 * width**2 + 2 * n * 2 * width * length**2
