"""Weight versions: what a step may overwrite, and where it lies. What they compute: test_equivalence."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipetrain.config.rate import LearningRate
from pipetrain.runtime.stage.parameter_store import ParameterStore
from pipetrain.runtime.stage.weight_versions import Weights

SGD = partial(torch.optim.SGD, lr=1.0)  # the peak, of which the step takes a share


class Scale(nn.Module):
    """x -> w x, with an attribute at w."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))
        self.w.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.w, nn.Parameter)
        return self.w * self.w.scale * x


def versions_of(module: nn.Module) -> Weights:
    return Weights(ParameterStore(module, SGD), LearningRate(lambda update: 0.25))


def forward(module: nn.Module, weights: Weights, version: int, x: Tensor) -> Tensor:
    with weights.store.installed(version):
        return module(x)


def updated(module: nn.Module, weights: Weights, x: Tensor, keep: bool = False) -> None:
    weights.accumulate_on(weights.store.newest)
    output = forward(module, weights, weights.store.newest, x)
    with weights.store.installed(weights.store.newest):
        output.backward(torch.ones_like(output))
    weights.reduce()
    weights.step(keep)


def test_storage_goes_round_in_a_ring_and_a_flush_schedule_moves_nothing():
    """As PipeDream holds three versions; none is new after the warm-up."""
    module, x = Scale(), torch.ones(8)
    weights = versions_of(module)
    places = []
    for n in range(12):
        updated(module, weights, x, keep=True)
        if n >= 2:
            weights.store.release(n - 2)
        places.append(module.w.data_ptr())
        held = [forward(module, weights, version, x)[0].item() for version in sorted(weights.store._versions)]
        assert held == [2 - version for version in range(max(0, n - 1), n + 2)]
    assert {*places[4:]} <= {*places[:4]}
    for version in weights.store.older():
        weights.store.release(version)
    for _ in range(3):
        updated(module, weights, x)
        assert module.w.data_ptr() == weights.store.leaves(weights.store.newest)[0].data_ptr() == places[-1]


@pytest.mark.parametrize("kept", [False, True])
def test_autograd_refuses_a_version_that_was_not_kept_or_given_up_and_written_over(kept):
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weights = versions_of(module)
    late = forward(module, weights, 0, torch.ones(2, 3, requires_grad=True))
    weights.step(keep=kept)
    if kept:
        weights.store.release(0)
        weights.step(keep=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.backward(torch.ones_like(late))


@pytest.mark.parametrize("optimizer", [partial(SGD, momentum=0.9), partial(torch.optim.AdamW, lr=1.0)])
def test_a_weight_that_has_its_first_gradient_late_is_stepped_by_a_fused_optimizer(optimizer):
    """As where a layer is left out at random; torch's fused SGD with momentum fails there."""
    ended = []
    for fused in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
        store = ParameterStore(module, partial(optimizer, fused=fused))
        weights = Weights(store, LearningRate(lambda update: 0.1))
        for number in range(4):
            updated(module if number == 2 else module[0], weights, torch.ones(2, 3, dtype=torch.float64))
        ended.append(module.state_dict())
    torch.testing.assert_close(*ended, rtol=1e-12, atol=1e-12)


class Kernels(TorchDispatchMode):
    """The operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_small_gradients_are_added_by_one_kernel_to_the_same_bits(monkeypatch):
    """A large gradient is added alone; a sparse one, and the want of one, do no harm."""
    monkeypatch.setattr("pipetrain.runtime.stage.parameter_store.SMALL_GRADIENT", 4 * 4 * 6)
    sums = []
    for at_once in (False, True):
        torch.manual_seed(0)
        layers = [nn.Embedding(3, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 7), nn.Linear(1, 1)]
        module, unused = nn.Sequential(*layers[:-1]), layers[-1]
        weights = versions_of(nn.Sequential(module, unused))
        for mb in range(3):
            layers[0].sparse = mb == 1
            weights.accumulate_on(0)
            with (
                weights.store.installed(0),
                weights.store.adding_at_once() if at_once else nullcontext(),
                Kernels() as seen,
            ):
                module(torch.tensor([mb, 1, 1])).square().sum().backward()
        assert seen.ran["add_"] == (1 if at_once else 7)
        weights.reduce()
        sums.append({name: grad.to_dense() for name, grad in weights.store.gradients().items()})
    assert len(sums[0]) == 7
    assert all(torch.equal(grad, sums[1][name]) for name, grad in sums[0].items())


def test_a_checkpoint_without_an_average_begins_it_anew():
    module = nn.Linear(1, 1)
    weights = Weights(ParameterStore(module, SGD), LearningRate(lambda update: 1.0), ema=0.5)
    weights.step(keep=False)
    assert weights.store.average().keys() == {"weight", "bias"}
    weights.load_average({})
    assert not weights.store.average()
