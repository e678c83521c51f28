"""Weight versions: what a forward reads, what a step may overwrite, and where the storage goes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipetrain.runtime.buffers import Buffers
from pipetrain.runtime.weights import Weights

SGD = partial(torch.optim.SGD, lr=1.0)  # the peak, of which the step takes a share
OVERWRITTEN = "modified by an inplace operation"


class Scale(nn.Module):
    """x -> w x, so that a version can be read off its output."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([value]))
        self.w.scale = 1.0  # an attribute, which each version has

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.w, nn.Parameter)
        return self.w * self.w.scale * x


def versions_of(module: nn.Module, rate: float = 0.25) -> Weights:
    return Weights(module, SGD, lambda update: rate)


def forward(module: nn.Module, weights: Weights, version: int, x: Tensor | None = None) -> Tensor:
    with weights.installed(version):
        return module(torch.ones(1) if x is None else x)


def backward(weights: Weights, version: int, output: Tensor) -> None:
    weights.accumulate_on(version)
    with weights.installed(version):
        torch.autograd.backward([output], [torch.ones_like(output)])


def update(module: nn.Module, weights: Weights, keep: bool) -> None:
    """One microbatch of gradient 1, and a step: the weight falls by the rate."""
    backward(weights, weights.newest, forward(module, weights, weights.newest))
    weights.reduce()
    weights.step(keep)


def test_a_kept_version_is_read_beside_the_newest_and_another_is_gone():
    module = Scale(1.0)
    weights = versions_of(module)
    update(module, weights, keep=True)
    update(module, weights, keep=True)
    assert (weights.held, weights.newest, weights.updates) == (3, 2, 2)
    assert [forward(module, weights, version).item() for version in (0, 1, 2)] == [1.0, 0.75, 0.5]
    assert module.w.item() == 0.5  # outside, the module has the newest
    update(module, weights, keep=False)
    with pytest.raises(KeyError), weights.installed(2):
        pass


# Storage


def test_storage_goes_round_in_a_ring_and_none_is_new_after_the_warm_up():
    module = nn.Linear(8, 8)
    weights = versions_of(module, rate=0.0)
    places, values = [], []
    for n in range(12):  # as PipeDream does with three versions held
        weights.step(keep=True)
        if n >= 2:
            weights.release(n - 2)
        places.append({p.data_ptr() for p in module.parameters()})
        values.append(module.weight.detach().clone())
    assert set.union(*places[4:]) <= set.union(*places[:4])
    assert all(torch.equal(value, values[0]) for value in values)


def test_a_flush_schedule_moves_nothing():
    module = nn.Linear(8, 8)
    weights = versions_of(module)
    place = module.weight.data_ptr()
    for version in range(4):
        weights.step(keep=False)
        assert module.weight.data_ptr() == weights.leaves(version + 1)[0].data_ptr() == place


# Autograd


@pytest.mark.parametrize("kept", [False, True])
def test_autograd_refuses_a_version_that_was_not_kept_or_given_up_and_written_over(kept):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weights = versions_of(module)
    late = forward(module, weights, 0, torch.ones(2, 3, requires_grad=True))
    weights.step(keep=kept)
    if kept:
        weights.release(0)
        weights.step(keep=True)
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        late.backward(torch.ones_like(late))


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv1d(4, 4, 1)])
def test_a_kept_version_s_backward_is_over_its_own_weights(layer):
    """p.data = new would give a silently wrong input gradient for Conv."""
    module = nn.Sequential(layer, nn.Flatten(1)).double()
    weights = versions_of(module)
    x = torch.randn(2, 4, *([1] if isinstance(layer, nn.Conv1d) else []), dtype=torch.float64)
    plain, late = (x.clone().requires_grad_() for _ in range(2))
    (wanted,) = torch.autograd.grad(module(plain).square().sum(), plain)
    loss, first = (forward(module, weights, 0, given).square().sum() for given in (late, x))
    backward(weights, 0, first)
    weights.reduce()
    weights.step(keep=True)
    backward(weights, 0, loss)
    assert torch.equal(late.grad, wanted)


# Gradients


@pytest.mark.parametrize("optimizer", [partial(SGD, momentum=0.9), partial(torch.optim.AdamW, lr=1.0)])
def test_a_weight_that_has_its_first_gradient_late_is_stepped_by_a_fused_optimizer(optimizer):
    """As where a layer is left out at random; torch's fused SGD with momentum fails there."""
    ended = []
    for fused in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
        weights = Weights(module, partial(optimizer, fused=fused), lambda update: 0.1)
        for number in range(4):
            layers = module if number == 2 else module[0]
            output = forward(layers, weights, number, torch.ones(2, 3, dtype=torch.float64))
            backward(weights, number, output)
            weights.reduce()
            weights.step(keep=False)
        ended.append(module.state_dict())
    for name, tensor in ended[0].items():
        torch.testing.assert_close(ended[1][name], tensor, rtol=1e-12, atol=1e-12)


def test_statistics_are_written_in_a_forward_and_not_in_a_backward():
    module = nn.BatchNorm1d(2)
    buffers, x = Buffers(module), torch.randn(4, 2) + 3
    module(x)
    mean = module.running_mean.clone()
    with buffers.in_backward():
        module(x)  # what a layer that recomputes itself does
    assert (module.num_batches_tracked.item(), buffers.reruns) == (1, True)
    assert torch.equal(module.running_mean, mean)
    assert not torch.equal(mean, torch.zeros(2))


def test_a_checkpoint_without_an_average_begins_it_anew():
    module = nn.Linear(1, 1)
    weights = Weights(module, SGD, lambda update: 1.0, ema=0.5)
    update(module, weights, keep=False)
    assert weights.average().keys() == {"weight", "bias"}
    weights.load_average({})
    assert not weights.average()
