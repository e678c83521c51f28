"""The optimizer, tried before anything starts. Junk in its place: test_building.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pipetrain.config.build import make_optimizer
from pipetrain.errors import ConfigError
from pipetrain.runtime.stage.optimizer_trial import trial_optimizer, try_optimizer
from pipetrain.trainer.arguments import read_optimizer
from tests.support.cases import options_of
from tests.support.refusals import changed, refusal

LINEAR = nn.Linear(2, 2)
HERE = "tests.runtime.stage.test_optimizer_trial."


def made(target: str, model: nn.Module = LINEAR, stages: int = 2, **options: object):
    """Make an optimizer of one's own."""
    cfg = changed("optim", {"_target_": target, "_partial_": True, "lr": 0.1, **options})
    return try_optimizer(make_optimizer(cfg), model, stages)


class Clips(torch.optim.SGD):
    """Clips all gradients together, where they are large."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 50.0)
        return super().step(closure)


class Rich(torch.optim.SGD):
    """Remembers a tree for each parameter, and a count in its group."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                past = state.get("past", [p.grad.clone(), (0, "none", None)])
                more = past[1][0] + 1, "some", {"x": 1.5, "y": True}
                state["past"] = [past[0] + p.grad / group["k"], more]
                p.grad = past[0]
        return super().step(closure)


def test_a_rate_by_the_number_of_a_parameter_is_refused_with_what_to_write_by_name():
    def slower(parameters):
        return torch.optim.SGD([{"params": [p], "lr": 0.5**n} for n, p in enumerate(parameters)], 0.1)

    model = nn.Sequential(LINEAR, nn.Linear(2, 2))
    says = refusal(lambda: try_optimizer(read_optimizer(slower, None), model, 2))
    assert "lets the step of one parameter depend on others, or on how many there are before it" in says
    assert says.endswith("and param_groups= (optim.groups) gives options by name")
    groups = {"mine": {"params": "1.weight", "lr": 0.25}}
    factory = try_optimizer(read_optimizer(lambda p: torch.optim.SGD(p, 0.1), groups), model, 2)
    taken = {group["lr"]: len(group["params"]) for group in factory(model.named_parameters()).param_groups}
    assert taken == {0.25: 1, 0.1: 3}
    assert try_optimizer(read_optimizer(slower, None), model, 1)


def test_an_optimizer_whose_step_looks_at_all_parameters_is_refused_over_several_stages():
    says = f"optimizer {HERE}Clips lets the step of one parameter depend on others, or on how many"
    assert refusal(lambda: made(f"{HERE}Clips")).startswith(says)
    assert made(f"{HERE}Clips", stages=1)


class EverySecond(torch.optim.SGD):
    """Steps at every second call, and keeps the gradients between, as where accumulating is wrapped."""

    calls = 0

    def step(self, closure=None):
        self.calls += 1
        return None if self.calls % 2 else super().step(closure)

    def zero_grad(self, set_to_none=True):
        if self.calls % 2 == 0:
            super().zero_grad(set_to_none)


def test_one_that_keeps_gradients_between_its_steps_is_refused_with_the_way_that_works():
    says = "optimizer EverySecond keeps gradients after a step, as one does that accumulates them, "
    assert refusal(lambda: made(f"{HERE}EverySecond", stages=1)).startswith(says)


class Sharp(torch.optim.SGD):
    """Takes a closure as torch's optimizers may, and needs it."""

    def step(self, closure=None):
        closure()
        return super().step()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharp])
def test_one_whose_step_needs_a_closure_is_refused_by_that(kind):
    with pytest.raises(ConfigError, match=f"^the step of {kind.__name__} needs a closure, which computes"):
        try_optimizer(read_optimizer(lambda p: kind(p, lr=0.1), None), LINEAR, 1)


@pytest.mark.parametrize("kind", [torch.optim.Adagrad, torch.optim.SGD])
def test_a_function_that_chooses_by_shape_is_given_the_true_ones(kind):
    """Also of parameters that fit in no memory, by an optimizer that makes its state only as it steps."""

    def by_shape(parameters):
        large, small = ([p for p in parameters if (min(p.shape) > 2) is large] for large in (True, False))
        if not large:
            raise ValueError("nothing is large")
        return kind([{"params": large, "lr": 0.25}, {"params": small}], 0.5)

    width, where = (10**6, "meta") if kind is torch.optim.SGD else (3, "cpu")
    with torch.device(where):
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2))
    factory = try_optimizer(read_optimizer(by_shape, None), model, 1)
    found = trial_optimizer(factory, model)[0].param_groups
    shapes = {group["lr"]: [tuple(p.shape) for p in group["params"]] for group in found}
    assert shapes == {0.25: [(width, width), (width,)], 0.5: [(2, width), (2,)]}
    with pytest.raises(ConfigError, match=r"optim cannot be built by .*: nothing is large"):  # on one of two
        try_optimizer(read_optimizer(by_shape, None), model, 2)


def test_it_is_tried_with_weights_and_gradients_such_as_the_model_s():
    embedding, spectrum = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3, dtype=torch.complex64)
    for model, fused in ((embedding, False), (spectrum, False), (LINEAR, True)):
        factory = try_optimizer(make_optimizer(options_of(["data=digits", "optim.weight_decay=0"])), model, 2)
        assert bool(factory(model.named_parameters()).defaults["fused"]) == fused
    says = refusal(lambda: try_optimizer(make_optimizer(options_of(["data=digits"])), embedding, 2))
    assert says.startswith("optim cannot be built by torch.optim.SGD: ")  # weight decay wants dense gradients
    assert "sparse" in says
    half = nn.Sequential(LINEAR, nn.Linear(2, 2).half())  # which cannot hold large gradients
    assert made("torch.optim.SGD", half, momentum=0.9)


# Parameter groups


class Net(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.norm, self.head = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2)


def grouped(*words: str):
    return try_optimizer(make_optimizer(options_of(["data=digits", *words])), Net(), 2)


@pytest.mark.parametrize("optim", ["sgd", "adamw"])
def test_a_parameter_is_of_the_first_group_that_takes_it(optim):
    groups = ["head.params='head.*'", "head.lr=0.25", "norms_and_biases.weight_decay=0"]
    words = [f"optim={optim}", "optim.weight_decay=0.5", "optim.lr=0.125"]
    model, factory = Net(), grouped(*words, *(f"optim.groups.{word}" for word in groups))
    names = {id(p): name for name, p in model.named_parameters()}
    found = {
        names[id(p)]: (group["lr"], group["weight_decay"], group["fused"])
        for group in factory(model.named_parameters()).param_groups
        for p in group["params"]
    }
    free, rest, head = (0.125, 0.0, True), (0.125, 0.5, True), (0.25, 0.5, True)
    assert found == {
        **dict.fromkeys(("entry.bias", "norm.weight", "norm.bias"), free),
        "entry.weight": rest,
        "head.weight": head,
        "head.bias": head,
    }
    entry = factory([(name, p) for name, p in model.named_parameters() if name.startswith("entry")])
    assert [(len(g["params"]), g["weight_decay"]) for g in entry.param_groups] == [(1, 0.5), (1, 0.0)]


def test_a_function_of_a_program_has_groups_too_and_its_mistakes_are_said_as_python_says_them():
    model, groups = Net(), {"a": {"params": ".*bias", "weight_decay": 0}}
    for chosen, wanted in ((None, [(6, 0.01)]), (groups, [(3, 0.01), (3, 0)])):
        factory = try_optimizer(read_optimizer(lambda p: torch.optim.AdamW(p, 3e-4), chosen), model, 2)
        found = factory(model.named_parameters()).param_groups
        assert [(len(g["params"]), g["weight_decay"]) for g in found] == wanted
    with pytest.raises(ConfigError, match=r"^optim cannot be built by .* unexpected keyword argument 'lrr'$"):
        try_optimizer(read_optimizer(lambda p: torch.optim.SGD(p, lrr=1), None), LINEAR, 2)


A, NORMS = "optim.groups.a", "optim.groups.norms_and_biases"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["optim.momentun=1"], "optim cannot be built: torch.optim.SGD takes no momentun; did you mean mome"),
        (["optim.momentum=-1"], "optim cannot be built by torch.optim.SGD: Invalid momentum value: -1"),
        (["optim._partial_=false"], "optim cannot be built: "),
        (["optim.lr=0"], "optim.lr=0 must be a finite number above 0"),
        (["~optim.lr"], "optim.lr=None must be a finite number above 0"),
        (["optim.fused=3"], "optim.fused=3 must be true or false"),
        ([f"{A}.params=tail"], f"{A} has no parameter: none that is left by the groups before it is matched"),
        # Not those whose names it is only a part of.
        ([f"{A}.params=head"], f"{A} has no parameter: none that is left by the groups before it is matched"),
        (
            [f"{A}.params='.*bias|norm.*'", f"{NORMS}.weight_decay=0"],
            f"{NORMS} has no parameter: none that is lef",
        ),
        ([f"{A}.weight_decay=0"], f"{A} needs {A}.params=, a regular expression that its parameters' names"),
        ([f"{A}.params='('"], f"{A}.params=( is no regular expression: missing ), unterminated"),
        ([f"{A}=3"], f"{A}=3 must have options of the optimizer, such as {A}.weight_decay=0"),
        (["optim.groups=3"], "optim.groups=3 must have a name for each group, with its options"),
        ([f"{NORMS}.weight_dekay=0"], f"{NORMS}.weight_dekay: torch.optim.SGD has no weight_dekay"),
    ],
)
def test_what_cannot_be_is_refused(words, says):
    assert refusal(lambda: grouped(*words)).startswith(says)
