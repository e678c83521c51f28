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

from pipetrain.config.build import make_model, make_optimizer, make_schedule, make_task
from pipetrain.model.chain import network_of
from pipetrain.model.specs import TensorSpec, Value, ValueSpec
from pipetrain.plan.cost_estimate import estimate
from pipetrain.plan.cut import refuse_cuts
from pipetrain.runtime.stage.optimizer_trial import try_optimizer
from pipetrain.tasks import Classification, LanguageModelling, Regression, Segmentation, Task
from tests.support.cases import options_of
from tests.support.refusals import ARGUMENTS, TARGETS, WORDS, changed, outcome, refusal


def model_of(*words: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    return make_model(options_of(["data=digits", *words]), seed, dtype)


def task_of(*words: str) -> Task:
    return make_task(options_of(["data=digits", *words]))


# The model


def drawn() -> nn.Sequential:
    """Draws with everything that draws."""
    model = nn.Sequential(nn.Linear(10, 10))
    model[0].weight.data[0, :3] = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
    return model


def test_weights_depend_on_the_seed_alone_and_a_dtype_converts_them():
    make = partial(model_of, "model._target_=tests.config.test_build.drawn")
    first = make(seed=3)[0].weight
    for generator in (torch.rand, np.random.rand, lambda n: random.random()):
        generator(7)
    assert torch.equal(first, make(seed=3)[0].weight)
    assert not (first == make(seed=4)[0].weight).any()
    assert torch.equal(first.double(), make(seed=3, dtype=torch.float64)[0].weight)


class Finds(nn.Linear):
    """Finds its own weight, and maybe a tensor of another layer, by a function that it was given."""

    def __init__(self, other: Callable[[], Tensor]) -> None:
        super().__init__(10, 10)
        self.mine, self.other = lambda: self.weight, other

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.mine() + self.other().mean()


def found_by_functions() -> nn.Sequential:
    norm = nn.BatchNorm1d(10)
    layers = [nn.Linear(10, 10), norm, Finds(partial(torch.ones, 1)), Finds(lambda: norm.running_mean)]
    return nn.Sequential(*layers)


def viewed() -> nn.Sequential:
    norm, other = nn.BatchNorm1d(10), nn.BatchNorm1d(10)
    other.running_mean = norm.running_mean.view(-1)
    return nn.Sequential(nn.Linear(10, 10), norm, other)


@pytest.mark.parametrize(("make", "cut"), [(found_by_functions, 3), (viewed, 2)])
def test_what_layers_share_is_seen_in_what_is_planned(make, cut):
    """A copy of functions would go on using the model, and tensors that share memory would be parted."""
    sample = ValueSpec((TensorSpec((10,), torch.float32),))
    model = network_of(make(), sample).spare()
    layers = estimate(model, ValueSpec((TensorSpec((2, 10), torch.float32),)))
    assert "shares its" in refusal(lambda: refuse_cuts(model, layers, [cut]))
    refuse_cuts(model, layers, [1])


# The schedule


def test_a_schedule_is_a_function_with_its_own_arguments():
    schedule = make_schedule(options_of(["data=digits", "schedule=interleaved_1f1b", "schedule.virtual=3"]))
    assert {action.stage for actions in schedule(2, 1, 4) for action in actions} == set(range(6))


# The task


def spread(outputs: Value, targets: Value) -> Tensor:
    return outputs.std()


def distance(outputs: Value, targets: Value, power: int = 1) -> Tensor:
    return (outputs - targets).abs().pow(power).mean()


TWO, ONE = torch.tensor([2.0, 2.0]), torch.tensor([1.0, -1.0])
DISTANCE = f"+loss._target_={__name__}.distance"


def test_each_task_of_conf_is_made():
    for name, kind, metrics in [
        ("classification", Classification, ["acc"]),
        ("segmentation", Segmentation, ["miou", "acc"]),
        ("language_modelling", LanguageModelling, ["ppl", "acc"]),
        ("regression", Regression, ["mse"]),
    ]:
        task = task_of(f"task={name}")
        assert type(task) is kind
        assert [metric.name for metric in task.metrics] == metrics
    scores, labels = torch.eye(3), torch.tensor([1, 2, 0])
    smoothed = nn.functional.cross_entropy(scores, labels, label_smoothing=0.3)
    assert task_of("label_smoothing=0.3").loss(scores, labels) == smoothed


def test_a_loss_is_a_function_or_the_class_of_a_module_weighted_as_it_averages():
    huber = ["+loss._target_=torch.nn.HuberLoss", "+loss.delta=1.5"]
    for words, value in [([DISTANCE, "+loss.power=2"], 5.0), (huber, (0.5 * 1 + 1.5 * (3 - 0.75)) / 2)]:
        task = task_of(*words)
        assert task.loss(TWO, ONE).item() == value
        assert (task.metrics, task.weight(ONE)) == ([], 2)
    ignoring = task_of("+loss._target_=torch.nn.CrossEntropyLoss", "+loss.ignore_index=1")
    assert ignoring.weight(torch.tensor([0, 1, 2, 1])) == 2


def test_metrics_by_name_are_functions_or_classes_and_replace_the_task_s():
    words = [f"+metrics.spread._target_={__name__}.spread", "+metrics.best._target_=pipetrain.tasks.Accuracy"]
    for more, kind in ([], Classification), ([DISTANCE], Task):
        task = task_of(*words, "+metrics.best.top=2", *more)
        assert type(task) is kind
        assert [metric.name for metric in task.metrics] == ["spread", "top2"]
        assert task.metrics[0].sums(TWO, ONE).tolist() == [0, 2]


# What cannot be

MAKERS: dict[str, Callable[[Any], Any]] = {
    "model": lambda cfg: make_model(cfg, 0, torch.float32),
    "schedule": make_schedule,
    "optim": lambda cfg: try_optimizer(make_optimizer(cfg), nn.Linear(2, 2), 1),
    "task": make_task,
}
L1 = "+loss._target_=torch.nn.L1Loss"


@pytest.mark.parametrize("group", ["model", "schedule", "optim"])
def test_a_group_without_a_target_is_refused(group):
    says = f"{group} needs a _target_: the dotted name of what builds it"
    assert refusal(lambda: MAKERS[group](changed(group, {"lr": 0.1}))) == says


@pytest.mark.parametrize(
    ("group", "words", "says"),
    [
        ("model", ["model._target_=no.such"], "model cannot be built: ImportError: Error loading 'no.such'"),
        ("model", ["model._target_=tests.support.models.not_a_module"], "must return an nn.Module, not list"),
        ("model", ["model._target_=torch.nn.Sequential"], "must return an nn.Module, not an empt"),
        ("model", ["+model.colour=red"], "vgg16 takes no colour; leave it out with ~model.colour"),
        ("model", ["model=mlp", "+model.widt=3"], "mlp takes no widt; did you mean width? If not, leave it"),
        ("model", ["model=mlp", "+model.width=x"], "model.width=x must be a whole number of at least 1"),
        (
            "model",
            ["model=gpt"],
            "model cannot be built: Interpolation key 'data.block' not found; choose another mode",
        ),
        (
            "schedule",
            ["schedule._target_=builtins.dict", "schedule._partial_=false"],
            "must be a function; i",
        ),
        (
            "task",
            ["task._target_=builtins.dict", "~task.label_smoothing"],
            "task must be a pipetrain.tasks.Task; got dict",
        ),
        (
            "task",
            ["task=regression", "label_smoothing=0.1"],
            "label_smoothing=0.1 has no effect on pipetrain",
        ),
        ("task", [L1, "label_smoothing=0.1"], "label_smoothing=0.1 has no effect on torch.nn.L1Loss, which"),
        ("task", ["+loss._target_=builtins.dict"], "loss must be a function; got dict"),
        ("task", [L1, "+loss.colour=red"], "loss cannot be built: torch.nn.L1Loss takes no colour; leave it"),
        ("task", ["+metrics.best=acc"], "metrics.best needs a _target_: the dotted name of what builds it"),
        ("task", ["+metrics=3"], "metrics=3 must be functions by name"),
    ],
)
def test_what_cannot_be_built_is_refused(group, words, says):
    assert says in refusal(lambda: MAKERS[group](options_of(["data=digits", *words])))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    st.sampled_from(["model", "schedule"]),
    st.one_of(st.sampled_from(TARGETS), WORDS),
    ARGUMENTS,
    st.booleans(),
)
def test_whatever_a_target_is_it_is_built_or_refused_in_one_line(group, target, arguments, partial):
    options = {"_partial_": partial} if group == "schedule" else {}
    made = outcome(lambda: MAKERS[group](changed(group, {"_target_": target, **options, **arguments})))
    if isinstance(made, str):
        assert "\n" not in made
    else:
        assert callable(made)
        assert group == "schedule" or len(made)
