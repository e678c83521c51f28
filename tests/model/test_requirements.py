"""Which models are taken as they are, and which are refused before anything starts."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipetrain.model.requirements import own_dtype, require_module, tensor_attributes
from tests.support.refusals import refusal


class Marked(nn.Parameter):
    """Behaves otherwise than a plain one."""


class Extra(nn.Module):
    """Keeps something beside its tensors."""

    def get_extra_state(self) -> str:
        return "seen"

    def set_extra_state(self, state: str) -> None:
        """Nothing to do."""


def subclass() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].weight = Marked(model[0].weight.data)
    return model


def shared_memory() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].weight = nn.Parameter(model[0].weight.data[:2])
    return model


def parallel() -> nn.Sequential:
    layer = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(layer)  # its own wants a process group
    layer.module = nn.Linear(2, 2)
    return nn.Sequential(nn.Linear(2, 2), layer)


def taken(model: nn.Module, dtype: torch.dtype | None = torch.float32) -> nn.Module:
    require_module(model, "a model must be", dtype)
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (subclass(), "parameter 0.weight of the model is a Marked, and each weight version would be a pl"),
        (shared_memory(), "parameter 1.weight of the model shares memory with 0.weight: use one nn.Para"),
        (nn.Sequential(nn.Linear(2, 2), Extra()), "the model keeps 1._extra_state in its state_dict, which"),
        (parallel(), "1 is a DistributedDataParallel, which adds up gradients by itself: give the module in"),
        (nn.Sequential(), "a model must be an nn.Module, not an empty nn.Sequential"),
        (nn.Sequential(nn.LazyLinear(2)), "parameter 0.weight of the model is a Uninit"),
        (nn.Sequential(nn.ReLU()), "the model has no parameter to train: let one require a gradient"),
    ],
)
def test_what_a_pipeline_would_leave_out_is_refused(model, says):
    assert refusal(lambda: taken(model)).startswith(says)


# The run's dtype


class Tables(nn.Module):
    """A complex table, a weight, whole numbers; two names for one buffer."""

    def __init__(self, dtype: str = "float32", value: float = 0.1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("rope", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("ids", torch.arange(3))
        self.register_buffer("table", torch.full((3,), value, dtype=getattr(torch, dtype)))
        self.register_buffer("same", self.table)


def test_a_cast_loses_nothing_and_parts_nothing_or_is_refused():
    plain, (layer,) = Tables(), taken(nn.Sequential(Tables()), torch.float64)
    assert layer.weight.dtype == torch.complex128
    assert torch.equal(layer.rope, plain.rope.to(torch.complex128))
    assert bool(layer.weight.imag.abs().sum() > 0)
    assert layer.ids.dtype == torch.int64
    assert layer.table.dtype == torch.float64
    assert layer.same is layer.table
    says = "0.table of the model is float64, and dtype=float32 would round it: choose dtype=float64, or"
    assert refusal(lambda: taken(nn.Sequential(Tables("float64")))).startswith(says)
    for value, dtype in ((0.1, torch.float64), (0.5, torch.float32), (torch.nan, torch.float32)):
        (layer,) = taken(nn.Sequential(Tables("float64", value)), dtype)
        assert layer.table.dtype == dtype


# What is read of it


def test_its_dtype_is_that_of_all_its_parameters_and_tensors_in_attributes_are_found_in_collections_too():
    assert own_dtype(nn.Linear(2, 2).double()) is torch.float64
    assert own_dtype(nn.Linear(2, 2).half()) is None
    assert own_dtype(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())) is None
    layer = nn.Linear(2, 2)
    layer.table, layer.more = torch.ones(2), {"a": [torch.zeros(1)], "weight": layer.weight}
    assert set(tensor_attributes(nn.Sequential(layer))) == {"0.table", "0.more['a'][0]"}
