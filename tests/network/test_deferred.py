"""The tensors of a record are those of the factory, whichever of them are made."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipetrain import ConfigError
from pipetrain.models import gpt
from pipetrain.network.factory import build
from pipetrain.network.materialise import named_tensors
from tests.support.live import Live


def constants() -> nn.Module:
    """A module without random numbers, made in many ways."""
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(16.0).view(4, 4))
        layer.weight[1:3, ::2] *= 2
        layer.weight.view(-1)[3::4].fill_(7)
        layer.weight.addmm_(layer.weight, torch.eye(4))
    layer.bias.data = torch.from_numpy(np.linspace(0, 1, 4, dtype=np.float32)).clone()
    layer.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())
    layer.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
    layer.register_buffer("complex", torch.conj(torch.complex(torch.ones(3), torch.arange(3.0))))
    return layer.double()


def test_they_are_what_the_factory_makes():
    model, record = build(constants, 0)
    made = record.tensors(named_tensors(model))
    for name, tensor in named_tensors(constants()).items():
        assert torch.equal(made[name], tensor), name
        assert made[name].stride() == tensor.stride()


@pytest.fixture(scope="module")
def transformer():
    model, record = build(lambda: gpt(depth=2, heads=2, width=8, sequence=5, vocabulary=11, tied=True), 3)
    return record, record.tensors(named_tensors(model))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_they_are_the_same_whichever_others_are_made(transformer, data):
    record, whole = transformer
    torch.manual_seed(data.draw(st.integers(0, 9)))
    state = torch.get_rng_state()
    for name, tensor in record.tensors(data.draw(st.sets(st.sampled_from(sorted(whole))))).items():
        assert torch.equal(tensor, whole[name])
    assert torch.equal(torch.get_rng_state(), state)


def test_they_are_drawn_as_the_factory_says_and_by_the_seed(transformer):
    _, whole = transformer
    assert whole["block1.expand.weight"].std() == pytest.approx(0.02, rel=0.2)  # which gpt() gives it last
    assert whole["block1.contract.weight"].std() == pytest.approx(0.01, rel=0.2)
    assert not torch.equal(whole["block1.expand.weight"], whole["block2.expand.weight"])
    other = build(lambda: gpt(depth=2, heads=2, width=8, sequence=5, vocabulary=11), 4)[1]
    assert not torch.equal(other.tensors(["head.weight"])["head.weight"], whole["embedding.tokens.weight"])


def test_those_that_share_memory_still_do():
    def factory():
        flat = torch.randn(8)
        layer = nn.Linear(2, 2, bias=False)
        layer.weight = nn.Parameter(flat[:4].view(2, 2))
        layer.register_buffer("behind", flat[4:])
        return layer

    made = build(factory, 0)[1].tensors(["weight", "behind"])
    assert made["weight"].untyped_storage()._cdata == made["behind"].untyped_storage()._cdata


def test_only_what_is_wanted_takes_memory():
    model, record = build(lambda: nn.Sequential(*(nn.Linear(64, 64) for _ in range(10))), 0)
    with Live() as live:
        made = record.tensors([name for name in named_tensors(model) if name.startswith("3.")])
    held = sum(tensor.nbytes for tensor in made.values())
    assert held <= live.peak <= held + 1024


def test_a_tensor_without_values_is_refused_unless_it_has_no_elements():
    def factory():
        layer = nn.Linear(2, 2)
        layer.register_buffer("none", torch.empty(0, 3))
        layer.register_buffer("statistics", torch.empty(3))
        return layer

    model, record = build(factory, 0)
    record.prove(["weight", "bias", "none"])
    with pytest.raises(ConfigError, match=r"statistics of the model has no values .* or give weights="):
        record.prove(named_tensors(model))


def test_weights_that_are_loaded_within_are_refused(tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")

    def factory():
        layer = nn.Linear(2, 2)
        layer.load_state_dict(torch.load(tmp_path / "weights.pt"))
        return layer

    record = build(factory, 0)[1]
    with pytest.raises(ConfigError, match="give weights= in place of loading them there"):
        record.tensors(["weight"])


def test_an_outer_tensor_that_changed_since_is_refused():
    outer = torch.ones(2, 2)

    def factory():
        layer = nn.Linear(2, 2)
        with torch.no_grad():
            layer.weight.copy_(outer)
        return layer

    record = build(factory, 0)[1]
    assert record.tensors(["weight"])["weight"].sum() == 4
    outer.zero_()
    with pytest.raises(ConfigError, match="that the model's factory has used was changed since"):
        record.tensors(["weight"])


def test_the_digest_tells_other_making_apart():
    def factory(low: float, constant: float):
        layer = nn.Linear(2, 2)
        nn.init.uniform_(layer.weight, low, 1)
        layer.register_buffer("constant", torch.tensor([constant]))
        return layer

    digests = [build(lambda c=c: factory(*c), 0)[1].digest for c in ((0, 1), (0, 1), (0.5, 1), (0, 2))]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
