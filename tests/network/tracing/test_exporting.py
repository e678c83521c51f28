"""What cannot be traced is refused in one sentence, with the place and a way out."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipetrain.errors import ConfigError
from pipetrain.network.tracing.trace import trace
from tests.support.tracing import assert_equal, example

Forward = Callable[[Any, Tensor], Any]


class Model(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.calls = 0
        self.history: list[int] = []
        self.scale = torch.ones(4)
        self._function = function

    def forward(self, x: Tensor) -> Any:
        return self._function(self, x)


class Seven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 7


def decides(self: Model, x: Tensor) -> Tensor:
    return self.layer(x) if x.sum() > 0 else x


def fixes_the_batch(self: Model, x: Tensor) -> Tensor:
    return self.layer(x).view(3, 2, 2)


def counts(self: Model, x: Tensor) -> Tensor:
    self.calls += 1
    return self.layer(x)


def remembers(self: Model, x: Tensor) -> Tensor:
    self.history.append(1)
    return self.layer(x)


def assigns_a_buffer(self: Model, x: Tensor) -> Tensor:
    self.seen = self.seen + x.mean(0)
    return self.layer(x) + self.seen


def writes_a_parameter(self: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.layer.weight.clamp_(-1, 1)
    return self.layer(x)


def writes_a_constant(self: Model, x: Tensor) -> Tensor:
    self.scale.add_(1)
    return self.layer(x) * self.scale


def draws_in_python(self: Model, x: Tensor) -> Tensor:
    return self.layer(x) if random.random() < 0.5 else x


def has_its_own_backward(self: Model, x: Tensor) -> Tensor:
    return Seven.apply(self.layer(x))


def hooks_a_tensor(self: Model, x: Tensor) -> Tensor:
    y = self.layer(x)
    y.register_hook(lambda gradient: gradient * 2)
    return y


def recomputes_by_a_function(self: Model, x: Tensor) -> Tensor:
    return checkpoint(self.layer, x, use_reentrant=True)


def returns_a_number(self: Model, x: Tensor) -> Any:
    return self.layer(x), x.shape[0]


def returns_an_object(self: Model, x: Tensor) -> Any:
    return SimpleNamespace(logits=self.layer(x))


def returns_nothing(self: Model, x: Tensor) -> None:
    self.layer(x)


def returns_what_it_chooses(self: Model, x: Tensor) -> Tensor:
    return self.layer(x)[x[:, 0] > 0]


def returns_more_in_training(self: Model, x: Tensor) -> Any:
    return (self.layer(x), x) if self.training else self.layer(x)


def fails(self: Model, x: Tensor) -> Tensor:
    return self.layer(x[:, :3])


HERE = r"at test_exporting\.py:\d+"
REFUSED: dict[Forward, str] = {
    decides: rf"decides on its data {HERE}, .* torch\.where, or make the model an nn\.Sequential",
    fixes_the_batch: rf"fixes the number of samples {HERE}: write no number, .* but x\.shape\[0\] as",
    counts: rf"changes its attribute calls {HERE} when it runs.* in a buffer",
    remembers: r"changes its attribute history when it runs",
    assigns_a_buffer: rf"assigns seen anew {HERE}, .*self\.seen\.copy_",
    writes_a_parameter: r"writes layer\.weight in place .*let the optimizer change parameters",
    writes_a_constant: r"writes scale in place .*register it as a buffer",
    draws_in_python: r"draws from Python's or NumPy's random numbers.*draw by torch",
    has_its_own_backward: rf"autograd Function Seven {HERE}, whose backward a trace would leave out",
    hooks_a_tensor: rf"registers a hook on a tensor {HERE}",
    recomputes_by_a_function: rf"autograd Function CheckpointFunction {HERE}",
    returns_a_number: r"returns SymInt .*: return tensors only",
    returns_an_object: r"returns what is no tensor, types\.SimpleNamespace: return tensors only",
    returns_nothing: r"returns no tensor: return what the loss takes",
    returns_what_it_chooses: r"size of what the model returns depends on its data",
    returns_more_in_training: r"returns something else in evaluation than in training",
    fails: rf"Model cannot be traced for float32\[4\] {HERE}: RuntimeError: .*stays inside one",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_refused(function: Forward, capfd: pytest.CaptureFixture[str]):
    model = Model(function)
    with pytest.raises(ConfigError, match=REFUSED[function]) as refused:
        trace(model, example((4,)))
    assert "\n" not in str(refused.value)
    assert model.training
    assert (model.calls, len(model.history) > 2) == (0, False)
    assert capfd.readouterr().err == ""
    # Nothing that was watched stays changed.
    x = torch.ones(2, requires_grad=True)
    Seven.apply(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [7, 7]


def test_nothing_else_is_printed(capfd, caplog):
    """torch.export prints the graph so far, and logs, where it fails."""
    with pytest.raises(ConfigError):
        trace(Model(decides), example((4,)))
    assert tuple(capfd.readouterr()) == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("of", "given"),
    [
        (example((4,), names=("z",)), "a dict of z: missing a required argument: 'x'"),
        (example((4,), (4,)), "2 without names: too many positional arguments"),
    ],
)
def test_inputs_that_the_forward_does_not_take_are_refused(of, given):
    sentence = f"the forward of Model cannot take the data's inputs, {given}; choose and name them as it does"
    with pytest.raises(ConfigError, match=sentence):
        trace(Model(decides), of)


def test_an_input_that_only_keywords_of_any_name_would_take_is_refused():
    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, **others: Tensor) -> Tensor:
            return self.layer(x)

    trace(Open(), example((4,), names=("x",)))
    with pytest.raises(
        ConfigError,
        match=r"takes mask of the inputs by .* name each of them in its signature, or leave it out of",
    ):
        trace(Open(), example((4,), (4,), names=("x", "mask")))


def test_a_backward_hook_is_refused():
    model = Model(lambda self, x: self.layer(x))
    model.layer.register_full_backward_hook(lambda module, before, behind: None)
    with pytest.raises(ConfigError, match=r"layer has a backward hook, .*: remove it, or make the model an"):
        trace(model, example((4,)))


def test_a_mask_that_torch_looks_at_is_refused_with_the_argument_that_helps():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 8, batch_first=True), 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x, mask=torch.zeros(3, 3))

    with pytest.raises(ConfigError, match=r"looks at the values of its mask .*: pass is_causal beside mask"):
        trace(Masked(), example((3, 4)))


def test_a_trained_tensor_that_is_no_parameter_is_refused():
    model = Model(lambda self, x: self.layer(x) * self.scale)
    model.scale.requires_grad_()
    with pytest.raises(ConfigError, match=r"trains scale, which is no parameter of it: make it an nn\.Param"):
        trace(model, example((4,)))


def writes_its_buffer(self: Model, x: Tensor) -> Tensor:
    y = self.layer(x)
    if self.training:
        self.seen.mul_(0.5).add_(y.detach().mean(0))
    return y + self.seen


def keeps_what_it_made(self: Model, x: Tensor) -> Tensor:
    self.kept = self.layer(x)
    return self.kept


def reads_a_number(self: Model, x: Tensor) -> Tensor:
    return self.layer(x) * x.sum().item()


def writes_a_view(self: Model, x: Tensor) -> Tensor:
    h = self.layer(x)
    first = h[:, 0]
    y = h + 1
    first.zero_()
    return h + y


def completes_itself(self: Model, x: Tensor) -> Tensor:
    if not hasattr(self, "width"):
        self.width = x.shape[-1]
    return self.layer(x) * self.width


def settles(self: Model, x: Tensor) -> Tensor:
    self.calls = 3  # as it is from the first run on
    return self.layer(x) * self.calls


CARRIED = [settles, writes_its_buffer, keeps_what_it_made, reads_a_number, writes_a_view, completes_itself]


@pytest.mark.parametrize("function", CARRIED, ids=lambda function: function.__name__)
def test_carried(function: Forward):
    network = assert_equal(Model(function), example((4,)))
    assert len(network.names) == 1
