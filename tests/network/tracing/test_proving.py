"""A trace that does not compute what its module does is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipetrain.errors import ConfigError
from pipetrain.network.tracing.proving import prove
from pipetrain.network.tracing.trace import trace
from tests.support.tracing import example, tokens


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (self.factor if torch.is_grad_enabled() else 1.0)


def test_another_output_is_refused():
    model = Scaled()
    network = trace(model, example((4,)))
    prove(network, example((4,)))
    model.factor = 2.0
    with pytest.raises(
        ConfigError, match=r"output 0 \(layer \S+\) of the model in training .* its trace \(\w+\["
    ):
        prove(network, example((4,)))


def test_another_gradient_is_refused():
    model = Scaled()
    network = trace(model, example((4,)))
    model.layer.weight.requires_grad_(False)
    network.modules[0].get_parameter("layer.weight").requires_grad_(False)
    prove(network, example((4,)))  # the same tensor in both
    model.layer.register_forward_hook(lambda module, given, output: output.detach() + 0 * module.bias)
    with pytest.raises(
        ConfigError, match=r"the gradient of layer\.bias of the model in training is not that"
    ):
        prove(network, example((4,)))


class Remembers(nn.Module):
    """Adds what it has made of the microbatch before."""

    before: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + (0 if self.before is None else self.before.mean())
        self.before = y.detach()
        return y


def test_a_tensor_that_is_kept_for_the_next_forward_is_refused():
    """torch.export leaves a tensor without numbers there."""
    with pytest.raises(
        ConfigError, match=r"output 0 \(layer \S+\) of the model in training .* its trace \(\w+\["
    ):
        trace(Remembers(), example((4,)))


class Lookup(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)


def test_whole_numbers_are_those_that_the_model_takes():
    trace(Lookup(1), tokens("ids"))  # takes no 1
    with pytest.raises(
        ConfigError, match=r"the model cannot take ids int64\[2, 8\]: RuntimeError: index_select"
    ):
        trace(Lookup(0), tokens("ids"))


class Overwritten(nn.Module):
    """Writes what its own backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        y = self.layer(h)
        h.mul_(2)
        return h + y


def test_what_one_process_cannot_train_either_is_said_so():
    with pytest.raises(
        ConfigError, match=r"cannot train on float32\[2, 4\] in one process either: one of the"
    ):
        trace(Overwritten(), example((4,)))


class AsksForADtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.last(y * 2 if y.dtype == torch.bfloat16 else y)


def test_a_model_that_asks_for_a_dtype_is_refused_under_autocast_alone():
    trace(AsksForADtype(), example((4,)))
    with pytest.raises(
        ConfigError, match=r"output 0 \(layer \S+\) of the model in training .* its trace \(\w+\["
    ):
        trace(AsksForADtype(), example((4,)), autocast=True)
