"""What an optimizer remembers comes back from tensors as it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipetrain.runtime.stage.optimizer_state import OptimizerState
from tests.model.test_packing import TREES, equal


def sgd() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    weight = nn.Parameter(torch.zeros(2))
    return weight, torch.optim.SGD([weight], lr=0.1, momentum=0.5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(state=st.dictionaries(st.text(), TREES, max_size=3), option=TREES)
def test_any_tree_and_any_option_come_back(state, option):
    weight, optimizer = sgd()
    memory = OptimizerState(optimizer)
    optimizer.state[weight] = state
    optimizer.param_groups[0]["k"] = option
    tensors = memory.tensors_of(weight)
    assert not any(tensor.is_complex() for tensor in tensors)
    other, again = sgd()
    OptimizerState(again).restore(other, tensors)
    assert equal(again.state[other], state)
    assert equal(again.param_groups[0]["k"], option)


def layouts() -> dict[str, Tensor]:
    """Tensors that lie in memory otherwise than new ones do, and some that do not."""
    numbers = torch.arange(12.0)
    behind = torch.empty(17)[5:].copy_(numbers)  # whose address is no multiple of what is aligned
    return {
        "plain": numbers.view(4, 3).clone(),
        "transposed": numbers.view(3, 4).t(),
        "unaligned": behind.view(4, 3),
        "unaligned vector": behind,
        "both": behind.view(3, 4).t(),
        "columns": torch.empty(4, 8)[:, 2:5].copy_(numbers.view(4, 3)),
        "permuted": numbers.view(1, 2, 6).permute(2, 0, 1),
        "complex": torch.view_as_complex(numbers.view(3, 2, 2).clone()).t(),
        "expanded": torch.ones(1).expand(4, 3),
        "step": torch.tensor(3.0),
        "none": torch.empty(0, 3),
    }


@pytest.mark.parametrize("of", ["rows", "columns"])
def test_a_tensor_lies_in_memory_as_before(of):
    """Sums and products round otherwise in another layout, and at another address."""

    def made(order: str) -> tuple[nn.Parameter, torch.optim.Optimizer]:
        weight = nn.Parameter(torch.zeros(4, 3) if order == "rows" else torch.zeros(3, 4).t())
        return weight, torch.optim.SGD([weight], lr=0.1)

    weight, optimizer = made(of)
    memory, kept = OptimizerState(optimizer), layouts()
    optimizer.state[weight] = {**kept, "like it": torch.zeros_like(weight.data)}
    saved = [tensor.contiguous().clone() for tensor in memory.tensors_of(weight)]
    for order in ("rows", "columns"):
        other, again = made(order)
        OptimizerState(again).restore(other, saved)
        state = again.state[other]
        assert state.pop("like it").stride() == other.stride()  # in another layout of the weight too
        expanded = state["expanded"]
        assert torch.equal(expanded, torch.ones(4, 3))
        for name in kept.keys() - {"expanded"}:
            assert torch.equal(state[name], kept[name]), name
            at = [t.data_ptr() % 64 if t.numel() else 0 for t in (state[name], kept[name])]
            usual = order != of and name == ("plain" if of == "rows" else "transposed")  # as the weight was
            assert usual or state[name].stride() == kept[name].stride(), name
            assert at[0] == at[1], name


def test_options_that_a_person_set_are_not_remembered_and_what_cannot_be_told_is_named():
    weight, optimizer = sgd()
    memory = OptimizerState(optimizer)
    optimizer.param_groups[0]["lr"] = 3.0  # the schedule's
    other = nn.Parameter(torch.zeros(2))
    again = torch.optim.SGD([other], lr=0.1, momentum=0.9)
    OptimizerState(again).restore(other, memory.tensors_of(weight))
    assert (again.param_groups[0]["momentum"], again.param_groups[0]["lr"]) == (0.9, 0.1)
    for thing, says in ((object(), "type object"), ([{1: len}], "type builtin_function")):
        optimizer.state[weight] = {"thing": thing}
        with pytest.raises(TypeError, match=says):
            memory.tensors_of(weight)
