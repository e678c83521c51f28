"""A factory runs as on the CPU, but its model has no numbers; what cannot be recorded is refused."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from pipetrain import ConfigError
from pipetrain.network.factory import build
from pipetrain.network.materialise import named_tensors


def linear(change=lambda layer: None):
    def factory():
        layer = nn.Linear(3, 3)
        change(layer)
        return nn.Sequential(layer)

    return factory


def test_the_model_is_that_of_the_factory_without_its_numbers():
    def factory():
        norm, head = nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False)
        norm.weight.kind = "norm"
        return nn.Sequential(nn.Linear(3, 4), norm, head).double()

    model, _ = build(factory, 0)
    real = factory()
    assert str(model) == str(real)
    for name, tensor in named_tensors(real).items():
        mine = named_tensors(model)[name]
        assert mine.is_meta
        assert type(mine) is type(tensor)
        assert (mine.shape, mine.dtype, mine.stride()) == (tensor.shape, tensor.dtype, tensor.stride())
        assert mine.requires_grad == tensor.requires_grad
        assert vars(mine) == vars(tensor)


def test_what_is_tied_stays_tied_wherever_it_is_kept():
    def factory():
        model = nn.Sequential(nn.Embedding(5, 4), nn.LSTM(4, 4), nn.Linear(4, 5))
        model[2].weight = model[0].weight
        model[1].also = [model[0].weight]
        return model

    model, _ = build(factory, 0)
    assert model[2].weight is model[0].weight is model[1].also[0]
    assert model[1]._flat_weights[0] is model[1].weight_ih_l0


def test_numbers_are_there_for_who_looks_at_them_and_for_tensors_of_no_registry():
    def keep(layer):
        layer.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        layer.wide = bool(layer.weight.abs().sum() > 0)
        layer.where = torch.nonzero(torch.tensor([0, 1, 1])).flatten().tolist()
        layer.scale = torch.arange(3) * 2

    model, _ = build(linear(keep), 0)
    assert (model[0].rates, model[0].wide, model[0].where) == ([0, 0.5, 1], True, [1, 2])
    assert model[0].scale.tolist() == [0, 2, 4]


def test_pythons_and_numpys_generators_are_seeded_and_left_as_they_were():
    def draw(layer):
        layer.drawn = random.random(), np.random.rand()

    random.seed(5)
    before = random.getstate()
    assert build(linear(draw), 1)[0][0].drawn == build(linear(draw), 1)[0][0].drawn
    assert build(linear(draw), 1)[0][0].drawn != build(linear(draw), 2)[0][0].drawn
    assert random.getstate() == before


def test_a_model_that_is_there_already_stays_as_it_is():
    there = nn.Sequential(nn.Linear(2, 2))
    model, record = build(lambda: there, 0)
    assert model is there
    assert not record.tensors(["0.weight"])


OUTSIDE = nn.Linear(3, 3)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(3)


def own_generator(layer):
    nn.init.normal_(layer.weight, generator=torch.Generator())


def view(layer):
    layer.part = layer.weight[:2]


@pytest.mark.parametrize(
    ("factory", "sentence"),
    [
        (lambda: 3, "factory must return an nn.Module, not int"),
        (linear(own_generator), "draws from a generator of its own .aten.normal_.* leave out generator="),
        (linear(lambda layer: nn.init.zeros_(OUTSIDE.weight)), "changes a tensor that was made outside"),
        (linear(lambda layer: OUTSIDE.weight.data.zero_()), "changes a tensor that was made outside of it"),
        (linear(lambda layer: layer.weight.detach().numpy()), "factory, which .* failed: RuntimeError: .num"),
        (linear(view), "0.part of the model shares the memory of a parameter"),
        (linear(lambda layer: torch.ones(2).to_sparse()), "makes a tensor of layout torch.sparse_coo"),
        (Plain, "scale of the model is a tensor, but neither .* register it as a buffer"),
    ],
)
def test_what_cannot_be_recorded_is_refused_in_one_sentence(factory, sentence):
    with pytest.raises(ConfigError, match=sentence) as raised:
        build(factory, 0)
    assert "\n" not in str(raised.value)
