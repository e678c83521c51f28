"""What cannot be traced is refused in one sentence with a way out."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from pipetrain.errors import ConfigError
from pipetrain.model.specs import TensorSpec
from pipetrain.model.tracing.trace import trace
from tests.support.traced_comparison import assert_equal, example

Forward = Callable[..., Any]
OF = example((4,))


class Model(nn.Module):
    """A module whose forward is a function."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("masked", torch.tensor([True, False, False, True]))
        self.calls = 0
        self.scale = torch.ones(4)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


class Seven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 7


@torch.library.custom_op("pipetrain_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """An operator with a backward of its own, as MoE models of Hugging Face have."""
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 7)


def calls_an_operator(self: Model, x: Tensor) -> Tensor:
    return twice(self.layer(x))


def counts(self: Model, x: Tensor) -> Tensor:
    self.calls += 1
    return self.layer(x)


def writes_a_parameter(self: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.layer.weight.clamp_(-1, 1)
    return self.layer(x)


def trains_a_constant(self: Model, x: Tensor) -> Tensor:
    return self.layer(x) * self.scale.requires_grad_()


def draws_in_python(self: Model, x: Tensor) -> Tensor:
    return self.layer(x) if random.random() < 0.5 else x


def has_its_own_backward(self: Model, x: Tensor) -> Tensor:
    return Seven.apply(self.layer(x))


def returns_more_in_training(self: Model, x: Tensor) -> Any:
    return (self.layer(x), x) if self.training else self.layer(x)


HERE = r"at test_trace\.py:\d+"
REFUSED: list[tuple[Forward, str]] = [
    (
        lambda self, x: self.layer(x) if x.sum() > 0 else x,
        rf"decides on its data {HERE}, .*: .* torch\.where",
    ),
    (lambda self, x: self.layer(x).view(3, 2, 2), r"depends on the samples .*x\.shape\[0\]"),
    (writes_a_parameter, rf"writes layer\.weight in place {HERE}"),
    (trains_a_constant, "uses scale, a tensor that is trained"),
    (draws_in_python, "draws from Python's .*draw by torch"),
    (
        lambda self, x: self.layer(x) + torch.rand(4, generator=torch.Generator()),
        "makes a Generator when|argument of type: .*Generator",  # before torch 2.13
    ),
    (has_its_own_backward, "autograd Function Seven, whose backward"),
    (lambda self, x: None, "returns None, which is no tensor"),
    (lambda self, x: self.layer(x)[x[:, 0] > 0], "the model returns .* whose size depends on its data"),
    (returns_more_in_training, "something else in evaluation"),
    (lambda self, x: self.layer(x[:, :3]), rf"cannot be traced for float32\[4\] {HERE}: .*stays inside one"),
]


@pytest.mark.parametrize(("function", "sentence"), REFUSED)
def test_refused(function, sentence, capfd, caplog):
    """In one sentence; torch.export prints the graph so far, and logs, where it fails."""
    model = Model(function)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match=sentence) as refused:
        trace(model, OF)
    assert "\n" not in str(refused.value)
    assert tuple(capfd.readouterr()) == ("", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    # The model is as it was.
    assert model.training
    assert model.calls == 0
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)


def assigns_a_buffer(self: Model, x: Tensor) -> Tensor:
    self.seen = self.seen + x.mean(0)
    return self.layer(x) + self.seen


def writes_its_buffer(self: Model, x: Tensor) -> Tensor:
    y = self.layer(x)
    if self.training:
        self.seen.mul_(0.5).add_(y.detach().mean(0))
    return y + self.seen


def keeps_what_it_made(self: Model, x: Tensor) -> Tensor:
    self.kept = self.layer(x)
    return self.kept


def writes_a_view(self: Model, x: Tensor) -> Tensor:
    h = self.layer(x)
    first = h[:, 0]
    y = h + 1
    first.zero_()
    return h + y


def settles(self: Model, x: Tensor) -> Tensor:
    """As it is from the first run on."""
    self.calls, self.width = 3, x.shape[-1]
    return self.layer(x) * self.calls * self.width


def reads_a_number(self: Model, x: Tensor) -> Tensor:
    return self.layer(x) * x.sum().item()


def masks_by_its_buffer(self: Model, x: Tensor) -> Tensor:
    return self.layer(x).masked_fill(self.masked, 0)


def weighs_without_a_gradient(self: Model, x: Tensor) -> Tensor:
    y = self.layer(x)
    with torch.no_grad():
        shares = y.softmax(-1, dtype=torch.float64) + torch.arange(4, dtype=torch.float32)
    return y * shares.float()


CARRIED = [
    weighs_without_a_gradient,
    counts,
    assigns_a_buffer,
    settles,
    writes_its_buffer,
    keeps_what_it_made,
    writes_a_view,
    reads_a_number,
    masks_by_its_buffer,
    calls_an_operator,
]


@pytest.mark.parametrize("function", CARRIED)
def test_carried(function):
    assert assert_equal(Model(function), OF).names == ["layer"]


class Assigns(Model):
    """Assigns buffers before two layers: written in place, made anew, exchanged, and changed since."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: self.last(self.layer(self.before(x)).tanh()))
        self.last = nn.Linear(4, 4)
        for name in ("mean", "one", "other", "grown"):
            self.register_buffer(name, torch.arange(4.0))

    def before(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.one, self.other = self.other + self.mean, self.one * 2
        self.grown = grown = self.grown + self.seen
        grown.mul_(2)
        return x + self.mean[:1] + self.one


class Inner(nn.Module):
    """Assigns buffers of its own: one that it has read before, and two that it exchanges."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("mean", "one", "other"):
            self.register_buffer(name, torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        before, self.one, self.other = self.mean, self.other, self.one
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + before[:1] + self.mean + self.one


class AroundInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Inner(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.inner(self.first(x)))
        return y


def test_a_cut_may_lie_behind_a_buffer_that_is_assigned_also_by_a_submodule():
    assert assert_equal(Assigns(), OF).names == ["layer", "last"]
    assert assert_equal(AroundInner(), OF).names == ["first", "last"]


# Hooks, and what a forward keeps


def looks(module: nn.Module, *given: Any) -> None:
    given[-1][0].detach().mean()


def scales(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output if module.training else 2 * output


def hands_on(self: Model, x: Tensor) -> Tensor:
    y = self.layer(x)
    return y + self.found  # type: ignore[operator]


UNSEEN: list[tuple[str, Callable[[Model], object]]] = [
    ("looks, a hook of layer", lambda model: model.layer.register_forward_hook(looks)),
    ("looks, a hook of the model", lambda model: model.register_forward_pre_hook(looks)),
    ("looks, a hook of layer", lambda model: model.layer.register_full_backward_hook(looks)),
    (".*partial.*, a hook of layer", lambda model: model.layer.register_forward_hook(partial(looks))),
]


@pytest.mark.parametrize(("named", "attach"), UNSEEN)
def test_a_hook_that_training_would_not_call_is_refused(named, attach):
    model = Model(lambda self, x: self.layer(x))
    attach(model)
    with pytest.raises(ConfigError, match=rf"would never call {named}, .* nn\.Sequential .* its hooks"):
        trace(model, OF)


def test_hooks_that_change_what_a_mode_computes_or_hand_something_on_are_followed():
    model = Model(hands_on)
    model.layer.register_forward_hook(scales)
    model.layer.register_forward_hook(lambda module, args, output: setattr(model, "found", output))
    assert_equal(model, OF)


def test_hooks_of_torch_s_own_are_followed_in_silence():
    model = Model(lambda self, x: self.layer(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.layer)
    nn.utils.prune.l1_unstructured(model.layer, "bias", 0.5)
    assert not assert_equal(model, OF).set_attributes
    assert not assert_equal(Model(assigns_a_buffer), OF).set_attributes


class Logs(Model):
    def __init__(self) -> None:
        super().__init__(lambda self, x: self.layer(x))
        self.found, self.figures = list[Tensor](), {"norms": SimpleNamespace(last=0.0)}

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        self.calls += 1
        self.found.append(y.detach())
        self.figures["norms"].last = self.last = y.norm()
        self._cache = y
        return y


def test_what_a_forward_keeps_is_named_and_nothing_of_the_trace_is_left():
    model = Logs()
    assert {*trace(model, OF).set_attributes} == {"calls", "found", "figures.norms.last", "last"}
    assert (model.calls, model.found, model.figures["norms"].last) == (0, [], 0.0)
    assert not {"last", "_cache"} & vars(model).keys()


class Open(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.layer(x)


def test_inputs_that_the_forward_does_not_take_are_refused():
    for of, says in (
        (example((4,), names=("z",)), "a dict of z: missing a required argument: 'x'; choose and name"),
        (example((4,), (4,)), "2 without names: too many positional arguments; choose and name"),
    ):
        with pytest.raises(ConfigError, match=f"the forward of Open cannot take the data's inputs, {says}"):
            trace(Open(), of)
    trace(Open(), example((4,), names=("x",)))


class OwnLoss(nn.Module):
    """Computes its loss of logits and labels, which it changes before."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.function = nn.Embedding(9, 9), function

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.function(self.embed(ids), labels)


def flat(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def masked(logits: Tensor, labels: Tensor) -> Tensor:
    counts = labels != -1
    each = cross_entropy(logits.mT, labels.clamp(min=0), reduction="none")
    return (each * counts).sum() / counts.sum()


@pytest.mark.parametrize(
    ("function", "ignored", "shifted"),
    [
        (flat, -100, False),
        (partial(flat, ignore_index=0), 0, False),
        (lambda logits, labels: flat(logits[:, :-1], labels[:, 1:]), -100, True),
        (
            lambda logits, labels: flat(logits, pad(labels, (0, 1), value=-1)[:, 1:], ignore_index=-1),
            -1,
            True,
        ),
        (lambda logits, labels: flat(logits[:, 1:], labels[:, : labels.shape[1] - 1]), -100, False),
        (masked, -100, False),
        (lambda logits, labels: masked(logits[:, :-1], labels[:, 1:]), -100, True),
    ],
)
def test_which_labels_count_in_a_loss_of_the_model_s_own(function, ignored, shifted):
    of = replace(example((5,), (5,), names=("ids", "labels")), specs=(TensorSpec((5,), torch.int64),) * 2)
    assert trace(OwnLoss(function), of).labels(1, -100) == (ignored, shifted)
