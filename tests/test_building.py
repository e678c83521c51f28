"""What a `_target_` builds, and that whatever else it names is refused in one sentence."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipetrain.building import make_model, make_schedule, make_task
from pipetrain.network.chain import network_of
from pipetrain.network.values import TensorSpec, Value, ValueSpec
from pipetrain.plan.cut import refuse_cuts
from pipetrain.plan.estimate import estimate
from pipetrain.runtime.optimizer import make_optimizer
from pipetrain.tasks import Classification, LanguageModelling, Regression, Segmentation, Task
from tests.support.cases import config
from tests.support.refusals import ARGUMENTS, TARGETS, WORDS, changed, outcome, refusal

# The model


def same(a: nn.Sequential, b: nn.Sequential) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_weights_depend_on_the_seed_alone_and_a_dtype_converts_them():
    cfg = config(["data=digits", "model=mlp"])
    first = make_model(cfg, 3, torch.float32)
    torch.manual_seed(99)
    torch.randn(7)
    assert same(first, make_model(cfg, 3, torch.float32))
    assert not same(first, make_model(cfg, 4, torch.float32))
    double = make_model(cfg, 3, torch.float64)
    assert {p.dtype for p in double.parameters()} == {torch.float64}
    assert same(first.double(), double)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model._target_=no.such.thing"], "model cannot be built: ImportError: Error loading 'no.such.thin"),
        (
            ["model._target_=tests.support.models.not_a_module"],
            "tests.support.models.not_a_module must return an nn.Module, not list",
        ),
        (["model._target_=torch.nn.Sequential"], "torch.nn.Sequential must return an nn.Module, not an empt"),
        (["+model.colour=red"], "vgg16 takes no colour; leave it out with ~model.colour"),
        (["model=mlp", "+model.width=x"], "model.width=x must be a whole number of at least 1"),
        (["model=gpt"], "model needs data.block, which the configuration does not have: choose another mode"),
    ],
)
def test_a_model_that_cannot_be_is_refused(overrides, says):
    cfg = config(["data=digits", *overrides])
    assert says in refusal(lambda: make_model(cfg, 0, torch.float32))


@pytest.mark.parametrize("group", ["model", "schedule", "optim"])
def test_a_group_without_a_target_is_refused(group):
    make: dict[str, Any] = {
        "model": lambda cfg: make_model(cfg, 0, torch.float32),
        "schedule": make_schedule,
        "optim": lambda cfg: make_optimizer(cfg, nn.Linear(2, 2)),
    }
    cfg = changed(group, {"lr": 0.1})
    assert refusal(lambda: make[group](cfg)) == f"{group} needs a _target_: the dotted name of what builds it"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.one_of(st.sampled_from(TARGETS), WORDS), ARGUMENTS)
def test_whatever_a_model_is_it_is_built_or_refused_in_one_line(target, arguments):
    cfg = changed("model", {"_target_": target, **arguments})
    model = outcome(lambda: make_model(cfg, 0, torch.float32))
    if isinstance(model, str):
        assert "\n" not in model
    else:
        assert isinstance(model, nn.Sequential)
        assert len(model)


# One model for a process

IMAGE = ValueSpec((TensorSpec((3, 32, 32), torch.float32),))


class Finds(nn.Linear):
    """Finds its own weight, and maybe a tensor of another layer, by a function that it was given."""

    def __init__(self, other: Callable[[], Tensor]) -> None:
        super().__init__(10, 10)
        self.mine, self.other = lambda: self.weight, other

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.mine() + self.other().mean()


def counted(kind: str) -> nn.Sequential:
    norm, other = nn.BatchNorm1d(10), nn.BatchNorm1d(10)
    other.running_mean = norm.running_mean.view(-1)
    more = (
        [Finds(partial(torch.ones, 1)), Finds(lambda: norm.running_mean)] if kind == "functions" else [other]
    )
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10), norm, *more)


@pytest.mark.parametrize(("kind", "cut"), [("functions", 4), ("memory", 3)])
def test_what_layers_share_is_seen_in_what_is_planned(kind, cut):
    """A copy of functions would go on using the model, and tensors that share memory would be parted."""
    cfg = config(["data=digits", f"model._target_={__name__}.counted", f"+model.kind={kind}"])
    model = network_of(make_model(cfg, 3, torch.float32), IMAGE).spare()
    layers = estimate(model, ValueSpec((TensorSpec((2, 3, 32, 32), torch.float32),)))
    assert "shares its" in refusal(lambda: refuse_cuts(model, layers, [cut]))
    refuse_cuts(model, layers, [1])


def drawn() -> nn.Sequential:
    """Draws with everything that draws."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    model[1].weight.data[0, :3] = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
    return model


def test_whatever_draws_draws_from_the_seed():
    cfg = config(["data=digits", "model._target_=tests.test_building.drawn"])
    first, second = (make_model(cfg, 0, torch.float32) for _ in range(2))
    assert torch.equal(first[1].weight, second[1].weight)


# The schedule


def test_a_schedule_is_a_function_with_its_own_arguments():
    schedule = make_schedule(config(["data=digits", "schedule=interleaved_1f1b", "schedule.virtual=3"]))
    assert {action.stage for actions in schedule(2, 1, 4) for action in actions} == set(range(6))


def test_a_schedule_that_cannot_be_or_is_made_at_once_is_refused():
    cfg = config(["data=digits", "schedule._target_=no.such.thing"])
    assert refusal(lambda: make_schedule(cfg)).startswith(
        "schedule cannot be built: ImportError: Error loading"
    )
    cfg = changed("schedule", {"_target_": "builtins.dict"})
    assert refusal(lambda: make_schedule(cfg)) == (
        "schedule must be a function; its YAML needs `_partial_: true` beside `_target_`"
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.one_of(st.sampled_from(TARGETS), WORDS), ARGUMENTS, st.booleans())
def test_whatever_a_schedule_is_it_is_made_or_refused_in_one_line(target, arguments, partial):
    cfg = changed("schedule", {"_target_": target, "_partial_": partial, **arguments})
    schedule = outcome(lambda: make_schedule(cfg))
    if isinstance(schedule, str):
        assert "\n" not in schedule
    else:
        assert callable(schedule)


# The task


def task_of(*words: str) -> Task:
    return make_task(config(["data=digits", *words]))


def spread(outputs: Value, targets: Value) -> Tensor:
    return outputs.std()


def distance(outputs: Value, targets: Value, power: int = 1) -> Tensor:
    return (outputs - targets).abs().pow(power).mean()


TWO, ONE = torch.tensor([2.0, 2.0]), torch.tensor([1.0, -1.0])


@pytest.mark.parametrize(
    ("name", "kind", "metrics"),
    [
        ("classification", Classification, ["acc"]),
        ("segmentation", Segmentation, ["miou", "acc"]),
        ("language_modelling", LanguageModelling, ["ppl", "acc"]),
        ("regression", Regression, ["mse"]),
    ],
)
def test_each_task_of_conf_is_made(name, kind, metrics):
    task = task_of(f"task={name}")
    assert type(task) is kind
    assert [metric.name for metric in task.metrics] == metrics


def test_label_smoothing_reaches_the_task():
    scores, labels = torch.eye(3), torch.tensor([1, 2, 0])
    wanted = nn.functional.cross_entropy(scores, labels, label_smoothing=0.3)
    assert task_of("label_smoothing=0.3").loss(scores, labels) == wanted
    assert task_of().loss(scores, labels) != wanted


@pytest.mark.parametrize(
    ("target", "words", "value"),
    [
        (f"{__name__}.distance", ["+loss.power=2"], 5.0),
        ("torch.nn.HuberLoss", ["+loss.delta=1.5"], (0.5 * 1 + 1.5 * (3 - 0.75)) / 2),
    ],
)
def test_a_loss_is_a_function_or_the_class_of_a_module(target, words, value):
    task = task_of(f"+loss._target_={target}", *words)
    assert task.loss(TWO, ONE).item() == value
    assert (task.metrics, task.weight(ONE)) == ([], 2)


def test_a_loss_of_torch_is_weighted_as_it_averages():
    task = task_of("+loss._target_=torch.nn.CrossEntropyLoss", "+loss.ignore_index=1")
    assert task.weight(torch.tensor([0, 1, 2, 1])) == 2


def test_metrics_by_name_are_functions_or_classes_and_replace_the_task_s():
    words = [f"+metrics.spread._target_={__name__}.spread", "+metrics.best._target_=pipetrain.tasks.Accuracy"]
    words.append("+metrics.best.top=2")
    task = task_of(*words)
    assert isinstance(task, Classification)
    assert [metric.name for metric in task.metrics] == ["spread", "top2"]
    assert task.metrics[0].sums(TWO, ONE).tolist() == [0, 2]
    own = task_of(*words, f"+loss._target_={__name__}.distance")
    assert [metric.name for metric in own.metrics] == ["spread", "top2"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["task._target_=builtins.dict", "~task.label_smoothing"],
            "task must be a pipetrain.tasks.Task; got d",
        ),
        (["+task.colour=red"], "task cannot be built"),
        (["task=regression", "label_smoothing=0.1"], "label_smoothing=0.1 has no effect on pipetrain.tasks."),
        (
            ["+loss._target_=torch.nn.L1Loss", "label_smoothing=0.1"],
            "label_smoothing=0.1 has no effect on torch.nn.L1Loss, which has no such argument",
        ),
        (["loss=mse"], "loss needs a _target_: the dotted name of what builds it"),
        (["+loss._target_=builtins.dict"], "loss must be a function; got dict"),
        (["+loss._target_=torch.nn.L1Loss", "+loss.colour=red"], "loss cannot be built: "),
        (["+metrics.best=acc"], "metrics.best needs a _target_: the dotted name of what builds it"),
    ],
)
def test_a_task_that_cannot_be_is_refused(words, says):
    assert refusal(lambda: task_of(*words)).startswith(says)
