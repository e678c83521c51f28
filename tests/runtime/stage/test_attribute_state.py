"""What optimizers and layers keep in attributes comes back. In a training: users/test_saving.py."""

from __future__ import annotations

from collections import Counter, deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingWarmRestarts, MultiStepLR

from pipetrain.config.parameter_groups import ChainedOptimizer
from pipetrain.runtime.stage.attribute_state import AttributeState
from pipetrain.runtime.stage.optimizer_state import OptimizerState

Saved = dict[str, list[Tensor]]


class Wrapper(torch.optim.Optimizer):
    """Another optimizer's groups and its own state, with that optimizer in an attribute."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state = {}

    def step(self, closure: Any = None) -> None:
        self.base.step()


class Total:
    """Of what has been counted, and who counts."""

    def __init__(self, of: Any) -> None:
        self.of, self.number, self.how = of, 0, len


class Noisy(torch.optim.SGD):
    """Adds noise of its own generator, and less of it the more losses there were."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        self.generator = torch.Generator().manual_seed(0)
        self.norms: deque[float] = deque(maxlen=2)
        self.seen: Counter[int] = Counter()
        self.state["total"], self.total = 0, Total(self)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad += torch.randn(p.shape, generator=self.generator) / (1 + sum(self.norms))
                self.norms.append(p.grad.norm().item())
                self.seen[p.dim()] += 1
                self.state["total"] += 1
                self.total.number += 1
                p.grad *= self.state["total"] % 5 + self.seen[2] + self.total.number
        super().step(closure)


class Own(torch.optim.Adam):
    """Has in its state_dict what no attribute shows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 0.1)
        hidden = [0]
        self.hidden = lambda: hidden

    def step(self, closure: Any = None) -> None:
        self.hidden()[0] += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.grad *= self.hidden()[0]
        super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.hidden()[0]}

    def load_state_dict(self, state: Any) -> None:
        self.hidden()[0] = state.pop("steps")
        super().load_state_dict(state)


class Lookahead(torch.optim.Optimizer):
    """Has another optimizer's groups, and tells both states in a form of its own."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.SGD(parameters, 0.1, momentum=0.9)
        self.weights, self.defaults = parameters, self.base.defaults
        self.state = {p: {"slow": p.detach().clone()} for p in parameters}

    param_groups = property(lambda self: self.base.param_groups)

    def step(self, closure: Any = None) -> None:
        self.base.step()
        for weight, state in self.state.items():
            weight.data.add_(state["slow"].lerp_(weight.data, 0.5))

    def state_dict(self) -> dict[str, Any]:
        slow = {(0, n): self.state[p] for n, p in enumerate(self.weights) if p in self.state}
        return {"slow": slow, "base": self.base.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        if len(state["slow"]) != len(self.weights):
            raise ValueError("a state of other weights")
        self.base.load_state_dict(state["base"])
        self.state = dict(zip(self.weights, state["slow"].values(), strict=True))


def wrapped(parameters: Any) -> torch.optim.Optimizer:
    return Wrapper(torch.optim.SGD(parameters, 0.1, momentum=0.9))


def several(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return ChainedOptimizer([Noisy([first]), Own(others)])


def owners(optimizer: Any) -> dict[str, Any]:
    scheduler = ChainedScheduler(
        [MultiStepLR(optimizer, [2, 4], 0.5), CosineAnnealingWarmRestarts(optimizer, 3)], optimizer
    )
    parts = {f"part {n}": part for n, part in enumerate(getattr(optimizer, "parts", ()))}
    return {"optimizer": optimizer, **parts, "scheduler": scheduler}


class Training:
    """Two weights, an optimizer, and a scheduler of it."""

    def __init__(self, make: Any) -> None:
        torch.manual_seed(0)
        self.weights = {"a": nn.Parameter(torch.rand(2, 3)), "b": nn.Parameter(torch.rand(3))}
        self.optimizer = make([*self.weights.values()])
        self.owners = owners(self.optimizer)
        self.attributes = AttributeState(self.owners, self.weights)
        self.state = OptimizerState(self.optimizer, None, {"params"})

    def step(self) -> None:
        for weight in self.weights.values():
            weight.grad = torch.sin(3 * weight.detach())
        self.optimizer.step()
        self.owners["scheduler"].step()

    def saved(self) -> tuple[list[Tensor], list[list[Tensor]], Saved]:
        state = [[t.clone() for t in self.state.tensors_of(weight)] for weight in self.weights.values()]
        trees = {path: [t.clone() for t in tree] for path, tree in self.attributes.changed().items()}
        return [weight.detach().clone() for weight in self.weights.values()], state, trees

    def load(self, weights: list[Tensor], state: list[list[Tensor]], trees: Saved) -> None:
        self.attributes.restore({path: [tree] for path, tree in trees.items()})
        for weight, values, of in zip(self.weights.values(), weights, state, strict=True):
            weight.data.copy_(values)
            self.state.restore(weight, of)


@pytest.mark.parametrize("make", [Noisy, Own, Lookahead, wrapped, several, partial(torch.optim.SGD, lr=0.1)])
def test_an_optimizer_goes_on_as_it_would_have(make, caplog):
    whole, again = Training(make), Training(make)
    groups = [*map(id, again.optimizer.param_groups)]
    for _ in range(3):
        whole.step()
    again.load(*whole.saved())
    assert [*map(id, again.optimizer.param_groups)] == groups  # which a program and a scheduler hold
    assert again.saved()[2].keys() == whole.saved()[2].keys()
    for _ in range(3):
        whole.step()
        again.step()
    for one, other in zip(whole.weights.values(), again.weights.values(), strict=True):
        assert torch.equal(one, other)
    begun = Training(make)
    again.load(*begun.saved())  # of before the first step
    for training in (begun, again):
        training.step()
    assert all(map(torch.equal, begun.weights.values(), again.weights.values()))
    again.load(*whole.saved())
    assert again.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    assert not caplog.messages


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.rate, self.sizes, self.table = 0.5, [1], np.zeros(2)
        self.seen = self.same = self.shown = None
        self.function = len

    def work(self) -> None:
        self.sizes.append(2)
        self.table[0] += 1
        self.seen, self.same = self.weight.detach().t(), [self.weight, self.bias]
        self.shape = self.weight.shape
        self.shown = self.weight * 2  # of the last forward, with its graph


def layers(layer: nn.Module) -> AttributeState:
    return AttributeState({"layer 0": layer}, dict(layer.named_parameters()))


def test_of_a_layer_what_has_changed_and_can_be_kept_is_and_the_rest_is_said_once(caplog):
    layer, other = Layer(), Layer()
    other.rate = 0.25  # given otherwise
    of, again = layers(layer), layers(other)
    assert not of.changed()
    layer.work()
    trees = of.changed()
    assert {path.rpartition("/")[2] for path in trees} == {"sizes", "table", "seen", "same", "shape"}
    assert not caplog.messages
    again.restore({path: [tree] for path, tree in trees.items()})
    assert (other.rate, other.sizes, other.table.tolist(), other.shape) == (0.25, [1, 2], [1, 0], (2, 2))
    assert torch.equal(other.seen, layer.weight.t())
    assert other.seen.stride() == (1, 2)
    assert other.same[0] is other.weight
    layer.function = sum
    for _ in range(2):
        assert of.changed().keys() == trees.keys()
    assert caplog.messages == [
        "pipetrain: layer 0.function is a builtin_function_or_method, which no checkpoint keeps"
    ]
    layer.function = 3  # what it was at the start could not be kept
    of.restore({})
    assert (layer.function, layer.sizes) == (3, [1])


def test_other_stages_take_what_was_the_same_on_all_and_what_is_of_their_weights(caplog):
    saved = []
    for name, steps in (("a", 1), ("b", 2)):
        weight = nn.Parameter(torch.rand(2))
        owner = torch.optim.SGD([weight], 0.1)
        of = AttributeState({"optimizer": owner}, {name: weight})
        owner.count, owner.steps, owner.slow = 7, steps, {weight: torch.full((2,), float(steps))}
        saved.append(of.changed())
    weights = {name: nn.Parameter(torch.rand(2)) for name in "ba"}
    both = torch.optim.SGD(weights.values(), 0.1)
    AttributeState({"optimizer": both}, weights).restore(
        {path: [one[path] for one in saved] for path in saved[0]}
    )
    assert both.count == 7
    assert {name: both.slow[weight].tolist() for name, weight in weights.items()} == {
        "a": [1, 1],
        "b": [2, 2],
    }
    assert not hasattr(both, "steps")
    says = "pipetrain: optimizer.steps is of each stage, and the stages are others: it begins anew"
    assert caplog.messages == [says]
