"""Some layers get their numbers, and the rest of the model stays as it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipetrain import ConfigError
from pipetrain.network.chain import Chain
from pipetrain.network.factory import build
from pipetrain.network.materialise import cast_exactly, materialise, named_tensors


class Given:
    """Values of some tensors."""

    def __init__(self, **values):
        self.values = {name.replace("_", "."): value for name, value in values.items()}

    def prove(self, names):
        pass

    def tensors(self, names):
        return {name: self.values[name] for name in names if name in self.values}


def network_of(factory, values=None):
    model, record = build(factory, 0)
    network = Chain(model)
    network.values = values or record
    return network, record


def test_only_the_layers_asked_for_get_their_numbers():
    network, record = network_of(lambda: nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(4))))
    materialise(network, [1, 2])
    held = {name for name, tensor in named_tensors(network.model).items() if not tensor.is_meta}
    assert {name.split(".")[0] for name in held} == {"1", "2"}
    assert network.values is None
    for name, tensor in record.tensors(held).items():
        assert torch.equal(named_tensors(network.model)[name], tensor)
        assert type(named_tensors(network.model)[name]) in (nn.Parameter, torch.Tensor)


def test_a_tensor_of_another_layer_may_be_named():
    network, _ = network_of(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
    materialise(network, [1], ["0.running_mean"])
    assert not network.model[0].running_mean.is_meta
    assert network.model[0].running_var.is_meta


def test_what_is_shared_stays_shared_and_keeps_its_attributes():
    def factory():
        model = nn.Sequential(nn.Embedding(5, 4), nn.Identity(), nn.Linear(4, 5, bias=False))
        model[2].weight = model[0].weight
        model[0].weight.kind = "tied"
        model[2].also = [model[0].weight.requires_grad_(False)]
        return model

    network, _ = network_of(factory)
    materialise(network, [2])
    weight = network.model[2].weight
    assert weight is network.model[0].weight is network.model[2].also[0]
    assert (weight.kind, weight.requires_grad, weight.is_meta) == ("tied", False, False)


def test_a_model_with_numbers_is_overwritten_in_place():
    network = Chain(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    weight, before = network.model[1].weight, network.model[1].bias.clone()
    network.values = Given(**{"1_weight": torch.full((2, 2), 3.0), "0_weight": torch.zeros(2, 2)})
    materialise(network, [1])
    assert network.model[1].weight is weight
    assert weight.sum() == 12
    assert torch.equal(network.model[1].bias, before)
    assert network.model[0].weight.any()


def test_numbers_become_the_dtype_of_the_model_but_are_not_rounded():
    network, _ = network_of(lambda: nn.Sequential(nn.Linear(1, 1).double()))
    network.model[0].bias.data = network.model[0].bias.float()
    tenth = torch.full((1,), 0.1, dtype=torch.float64)
    network.values = Given(**{"0_weight": tenth.float().view(1, 1), "0_bias": tenth})
    with pytest.raises(ConfigError, match=r"0.bias of the model is float64, and .* would round"):
        materialise(network, [0])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_cast_is_exact_or_refused(device):
    one = torch.full((2,), 0.1, device=device)
    assert cast_exactly("one", one, torch.float64).dtype == torch.float64
    assert cast_exactly("one", one, torch.float32) is one
    with pytest.raises(ConfigError, match="one of the model is float64, and dtype=float32 would round it"):
        cast_exactly("one", one.double() + (torch.pi if device == "cpu" else 0), torch.float32)
