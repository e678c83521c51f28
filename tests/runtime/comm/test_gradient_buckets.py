"""Buckets of gradients: which, in which order they are told, and how they come back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipetrain.errors import TrainingStopped
from pipetrain.runtime.comm import gradient_buckets as buckets
from pipetrain.runtime.comm.gradient_buckets import (
    buckets_of,
    flat_gradients,
    gradient_counts,
    reduce_when_finished,
    set_gradients,
    split_sums,
)
from pipetrain.runtime.stage.split_backward import Deferred


def test_buckets_go_from_the_last_weight_to_the_first_and_what_fills_none_comes_last(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", 48)
    matrix, vector = torch.zeros(2, 3), torch.zeros(100)  # 24 bytes
    weights = {"a": matrix, "b": vector, "c": matrix, "d": matrix, "e": vector, "f": matrix, "g": matrix}
    assert [*map(list, buckets_of(weights))] == [["g", "f"], ["d", "c"], ["a", "b", "e"]]
    large = {"a": matrix, "b": torch.zeros(20, 3), "c": matrix}
    assert [*map(list, buckets_of(large))] == [["c", "b"], ["a"]]


def weight(number: float) -> nn.Parameter:
    return nn.Parameter(torch.full((1, 1), number))


def told_while(backward, *names: str, **leaves: nn.Parameter) -> list[list[float]]:
    """Return the buckets of names that are told within a backward, and then those told at its end."""
    told: list[Tensor] = []
    with reduce_when_finished([{name: leaves[name] for name in some} for some in names], told.append):
        backward()
        told.append(torch.zeros(0))
    return [numbers.tolist() for numbers in told]


def test_a_bucket_is_told_when_it_is_finished_and_those_before_it_in_whatever_order_autograd_goes():
    a, b, c = weight(2.0), weight(3.0), weight(5.0)
    assert told_while((a * (b * c)).backward, "cb", "a", a=a, b=b, c=c) == [[6.0, 10.0], [15.0], []]
    a, b, c = weight(2.0), weight(3.0), weight(5.0)
    seen = []
    b.register_post_accumulate_grad_hook(lambda leaf: seen.append("b"))
    told = told_while((b * (a * c)).backward, "a", "b", "c", a=a, b=b, c=c)
    assert (seen, told) == (["b"], [[15.0], [10.0], [6.0], []])


def test_what_a_backward_does_not_reach_is_told_at_its_end_with_all_behind_it_and_hooks_are_gone():
    a, b, c = weight(2.0), weight(3.0), weight(5.0)
    assert told_while((a * c).backward, "c", "b", "a", a=a, b=b, c=c) == [[2.0], [], [0.0], [5.0]]
    assert not any(leaf._post_accumulate_grad_hooks for leaf in (a, b, c))


def test_a_weight_that_gets_its_gradient_by_several_backwards_is_refused():
    """As by torch.utils.checkpoint's, inside of another: its bucket may be told with the first part alone."""
    a = weight(2.0)
    with pytest.raises(TrainingStopped, match=r"give torch\.utils\.checkpoint use_reentrant=False"):
        told_while(lambda: [(a * number).backward() for number in (1, 2)], "a", a=a)


def test_a_gradient_that_no_stage_has_stays_none_and_a_stage_may_leave_the_update_out():
    stages = [{name: nn.Parameter(torch.zeros(2)) for name in "ab"} for _ in range(2)]
    stages[0]["b"].grad = torch.ones(2)
    skips = (None, torch.tensor(0.0))
    sums = sum(
        torch.cat([*flat_gradients(one), *gradient_counts(one, skip)])
        for one, skip in zip(stages, skips, strict=True)
    )
    for weights in stages:
        set_gradients(weights, *split_sums(weights, sums))
    assert [weights["a"].grad for weights in stages] == [None, None]
    assert [weights["b"].grad.tolist() for weights in stages] == [[1, 1]] * 2
    for some in (stages[0], {}):  # a stage without weights tells that too
        assert torch.cat(gradient_counts(some, torch.tensor(1.0))).isnan().all()
    assert gradient_counts({}, None) == []


def test_a_sparse_gradient_is_refused():
    layer = nn.Embedding(3, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(TrainingStopped, match=r"of e, which ranks add up, is sparse: .*sparse=False"):
        flat_gradients({"e": layer.weight})


def test_the_second_half_of_a_backward_tells_buckets_on_its_way_too():
    layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))
    a, b = layers.parameters()
    deferred = Deferred([a, b])
    with deferred:
        output = layers(torch.ones(1, 2, requires_grad=True))
    deferred.input_half([a, b], [output], [torch.ones(1, 2)])
    told = told_while(deferred.weight_half, "b", "a", a=a, b=b)
    assert told == [b.grad.flatten().tolist(), a.grad.flatten().tolist(), []]


@pytest.mark.parametrize("copies", [False, True])
def test_gradients_of_channels_last_travel_in_the_order_of_their_memory(copies: bool) -> None:
    """And come back in it: the optimizer's kernels, too, copy nothing one by one."""
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_()
    weight.grad = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
    gradient, (numbers,) = weight.grad, flat_gradients({"w": weight})
    assert numbers.data_ptr() == gradient.data_ptr()
    sums = torch.cat([2 * numbers, torch.ones(1)])
    set_gradients({"w": weight}, *split_sums({"w": weight}, sums), copies=copies)
    assert torch.equal(weight.grad, 2 * gradient)
    assert weight.grad.is_contiguous(memory_format=torch.channels_last)
    assert (weight.grad.data_ptr() == sums.data_ptr()) is not copies
