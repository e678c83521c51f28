"""The optimizer: tried out on what it will meet, before anything starts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pipetrain.errors import ConfigError
from pipetrain.runtime.optimizer import make_optimizer, prove_optimizer
from tests.support.cases import config
from tests.support.refusals import JUNK, changed, outcome, refusal

LINEAR = nn.Linear(2, 2)


def made(target: str, model: nn.Module = LINEAR, stages: int = 2, every: int | None = 1, **options: object):
    """Make an optimizer of one's own."""
    cfg = changed("optim", {"_target_": target, "_partial_": True, "lr": 0.1, **options})
    cfg.checkpoint.every = every
    return make_optimizer(cfg, model, stages)


class Jointly(torch.optim.SGD):
    """Divides all gradients by the largest: what a stage cannot know."""

    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        largest = max(float(g.abs().max()) for g in gradients)
        for g in gradients:
            g.div_(largest)
        return super().step(closure)


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


class Stores(torch.optim.SGD):
    """Remembers an object."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["thing"] = object()
        return super().step(closure)


class Alone(torch.optim.SGD):
    """Remembers something of no parameter."""

    def step(self, closure=None):
        self.state["count"] = 1
        return super().step(closure)


HERE = "tests.runtime.test_optimizer."


def test_one_that_needs_all_parameters_at_once_is_for_one_stage():
    assert refusal(lambda: made(f"{HERE}Jointly")) == (
        f"optim {HERE}Jointly lets the step of one parameter depend on others, and each of 2 "
        "stages sees its own alone: choose another optimizer, or one stage"
    )
    assert made(f"{HERE}Jointly", stages=1)
    assert "lets the step of one parameter depend on others" in refusal(lambda: made(f"{HERE}Clips"))


@pytest.mark.parametrize(
    ("name", "says"),
    [("Stores", "remembers values of type object, which a"), ("Alone", "remembers 'count' of no par")],
)
def test_what_cannot_be_saved_is_refused_where_there_are_checkpoints(name, says):
    assert says in refusal(lambda: made(f"{HERE}{name}"))
    assert made(f"{HERE}{name}", every=None)


def test_sparse_gradients_and_complex_weights_are_tried_too():
    embedding, spectrum = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3, dtype=torch.complex64)
    for model in (embedding, spectrum):
        factory = make_optimizer(config(["data=digits", "optim.weight_decay=0"]), model, 2)
        assert not factory(model.named_parameters()).defaults["fused"]
    assert make_optimizer(config(["data=digits"]), LINEAR, 2)(LINEAR.named_parameters()).defaults["fused"]
    says = refusal(lambda: make_optimizer(config(["data=digits"]), embedding, 2))
    assert says.startswith("optim cannot be built by torch.optim.SGD: ")  # weight decay wants dense gradients
    assert "sparse" in says


def test_one_for_matrices_alone_is_tried_on_what_the_model_has():
    assert made("torch.optim.Muon", nn.Linear(3, 3, bias=False))
    assert "2D" in refusal(lambda: made("torch.optim.Muon", LINEAR))


def test_float16_is_tried_with_gradients_that_it_can_hold():
    assert made("torch.optim.SGD", nn.Sequential(LINEAR, nn.Linear(2, 2).half()), momentum=0.9)


def test_from_python_an_unknown_option_is_said_as_python_says_it(capfd):
    with pytest.raises(ConfigError) as refused:
        prove_optimizer(lambda p: torch.optim.SGD(p, lrr=1), None, LINEAR, 2)
    assert str(refused.value).startswith("optim cannot be built by ")
    assert str(refused.value).endswith("unexpected keyword argument 'lrr'")
    assert capfd.readouterr() == ("", "")


def test_the_rate_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("LR", "0.25")
    made = grouped("optim.lr=${oc.env:LR}")(Net().named_parameters())
    assert made.param_groups[0]["lr"] == 0.25


def test_an_optimizer_is_built_anew_for_each_stage():
    factory = make_optimizer(config(["data=digits", "optim=sgd", "optim.momentum=0.5"]), LINEAR)
    a, b = (factory([("0", nn.Parameter(torch.zeros(2)))]) for _ in range(2))
    assert a is not b
    assert isinstance(a, torch.optim.SGD)
    assert (a.defaults["momentum"], a.defaults["weight_decay"], a.defaults["lr"]) == (0.5, 5e-4, 0.005)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.colour=red", "optim cannot be built: torch.optim.SGD takes no colour; leave it out with ~op"),
        ("optim.momentun=1", "optim cannot be built: torch.optim.SGD takes no momentun; did you mean mome"),
        ("optim._target_=torch.optim.Adam", "optim cannot be built: torch.optim.Adam takes no momentum; "),
        ("optim.momentum=-1", "optim cannot be built by torch.optim.SGD: Invalid momentum value: -1"),
        ("optim.momentum=x", "optim cannot be built by torch.optim.SGD: "),
        ("optim._target_=no.such.thing", "optim cannot be built: ImportError: Error loading 'no.such.thing'"),
        ("optim._partial_=false", "optim cannot be built: "),
        ("optim.fused=3", "optim.fused=3 must be true or false"),
        (
            "optim._target_=torch.nn.Linear",
            "optim cannot be built: torch.nn.Linear takes no lr; leave it out",
        ),
    ],
)
def test_an_optimizer_that_cannot_be_is_refused(override, says):
    assert refusal(lambda: make_optimizer(config(["data=digits", override]), LINEAR)).startswith(says)


# Parameter groups


class Net(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.norm, self.head = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2)


GROUPS = (
    "optim.groups.head.params='^head'",
    "optim.groups.head.lr=0.25",
    "optim.groups.norms_and_biases.weight_decay=0",
    "optim.weight_decay=0.5",
    "optim.lr=0.125",
)


def grouped(*words: str, model: nn.Module | None = None, stages: int = 2):
    return make_optimizer(config(["data=digits", *words]), model or Net(), stages)


@pytest.mark.parametrize("optim", ["sgd", "adamw"])
def test_a_parameter_is_of_the_first_group_that_takes_it(optim):
    model = Net()
    made = grouped(f"optim={optim}", *GROUPS)(model.named_parameters())
    names = {id(p): name for name, p in model.named_parameters()}
    found = {
        names[id(p)]: (group["lr"], group["weight_decay"], group["fused"])
        for group in made.param_groups
        for p in group["params"]
    }
    assert found == {
        "entry.weight": (0.125, 0.5, True),
        "entry.bias": (0.125, 0.0, True),
        "norm.weight": (0.125, 0.0, True),
        "norm.bias": (0.125, 0.0, True),
        "head.weight": (0.25, 0.5, True),
        "head.bias": (0.25, 0.5, True),
    }


def test_a_stage_has_the_groups_of_its_own_parameters_alone():
    factory = grouped(*GROUPS)
    entry = factory(nn.ModuleDict({"entry": nn.Conv2d(3, 4, 1)}).named_parameters())
    assert [(len(g["params"]), g["weight_decay"]) for g in entry.param_groups] == [(1, 0.5), (1, 0.0)]


def test_a_function_of_a_program_has_groups_too():
    def plain(params):
        return torch.optim.AdamW(params, 3e-4)

    model, groups = Net(), {"a": {"params": "bias$", "weight_decay": 0}}
    for chosen, wanted in ((None, [(6, 0.01)]), (groups, [(3, 0.01), (3, 0)])):
        made = prove_optimizer(plain, chosen, model, 2)(model.named_parameters())
        assert [(len(g["params"]), g["weight_decay"]) for g in made.param_groups] == wanted


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("optim.groups.a.params=tail",),
            "optim.groups.a has no parameter: none that is left by the groups before it is matched by "
            "params=tail; parameters have names such as entry.weight",
        ),
        (
            ("optim.groups.a.params=bias|norm", "optim.groups.norms_and_biases.weight_decay=0"),
            "optim.groups.norms_and_biases has no parameter: none that is left by the groups before it is a ",
        ),
        (
            ("optim.groups.a.weight_decay=0",),
            "optim.groups.a needs optim.groups.a.params=, a regular expression that its parameters' names",
        ),
        (
            ("optim.groups.a.params='('",),
            "optim.groups.a.params=( is no regular expression: missing ), unter",
        ),
        (
            ("optim.groups.a=3",),
            "optim.groups.a=3 must have options of the optimizer, such as optim.groups.a",
        ),
        (("optim.groups=3",), "optim.groups=3 must have a name for each group, with its options"),
        (
            ("optim.groups.norms_and_biases.weight_dekay=0",),
            "optim.groups.norms_and_biases.weight_dekay: torch.optim.SGD has no weight_dekay",
        ),
        (("optim.groups.norms_and_biases.lr=high",), "optim cannot be built by torch.optim.SGD: "),
    ],
)
def test_a_group_that_cannot_be_is_refused(words, says):
    assert refusal(lambda: grouped(*words)).startswith(says)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.sampled_from(["torch.optim.SGD", "torch.optim.AdamW"]),
    st.dictionaries(
        st.sampled_from(["lr", "momentum", "weight_decay", "eps", "nesterov", "foreach"]),
        JUNK,
        max_size=3,
    ),
)
def test_whatever_an_optimizer_is_it_is_built_or_refused_in_one_line(target, arguments):
    cfg = changed("optim", {"_target_": target, "_partial_": True, **arguments})
    factory = outcome(lambda: make_optimizer(cfg, LINEAR))
    if isinstance(factory, str):
        assert "\n" not in factory
    else:
        assert isinstance(factory([("0", nn.Parameter(torch.zeros(1)))]), torch.optim.Optimizer)
