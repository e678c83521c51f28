"""What the configuration may say, and that whatever else it says is refused in one sentence."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf
from torch import nn

from pipetrain.building import make_model, make_schedule
from pipetrain.config import conf_dir, read_settings, share_of_cores, whole_number
from pipetrain.errors import ConfigError
from pipetrain.optimizer import make_optimizer
from pipetrain.schedule.actions import ScheduleError
from tests.support.cases import config

SCALARS = ["stages", "partition", "microbatches", "window", "buffer_size", "timeout", "batch_size", "epochs"]
SCALARS += ["lr_schedule", "optim.lr", "warmup", "label_smoothing", "seed", "device", "dtype", "threads"]
SCALARS += ["memory_limit", "data.workers", "data.drop_last", "trace", "codec", "codec.forward"]

LINEAR = nn.Linear(2, 2)
WORDS = st.text("abcxyz019 _-.,:/[]{}'\"=é", max_size=8)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-100, 10**9),
    st.floats(),
    WORDS,
    st.lists(st.one_of(st.integers(-9, 99), st.booleans(), WORDS, st.none()), max_size=3),
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=2),
)


@cache
def _composed(*overrides: str) -> DictConfig:
    return config(["data=digits", *overrides])


def changed(key: str, value: Any, *overrides: str) -> DictConfig:
    cfg = _composed(*overrides).copy()
    OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    return cfg


def refusal(action: Any) -> str:
    """What an action is refused with: one line."""
    with pytest.raises((ConfigError, ScheduleError)) as error:
        action()
    said = str(error.value)
    assert said
    assert "\n" not in said
    return said


def outcome(action: Any) -> Any:
    """What an action gives, or the text that it is refused with."""
    try:
        return action()
    except ConfigError as error:
        return str(error) or "nothing"


# Reading the scalars


def test_settings_are_what_was_configured():
    read = read_settings(config(["data=digits", "model=mlp", "partition=[2]", "seed=7"]), "1f1b", 2)
    assert (read.model, read.schedule, read.ranks, read.partition) == ("mlp", "1f1b", 2, [2])
    assert (read.batch_size, read.microbatches, read.window, read.buffer_size) == (64, 4, 1, 2)
    assert (read.epochs, read.lr_schedule, read.lr, read.warmup) == (6, "cosine", 0.005, 0.05)
    assert (read.seed, read.device, read.dtype, read.threads) == (7, "auto", torch.float32, None)
    assert (read.workers, read.drop_last, read.label_smoothing, read.timeout) == (0, False, 0.0, 300.0)


def test_ranks_are_the_processes_or_on_paper_the_stages():
    assert read_settings(changed("stages", None), "1f1b", 3).ranks == 3
    assert read_settings(changed("stages", 3), "1f1b", 3).ranks == 3
    assert read_settings(changed("stages", 5), "1f1b", None).ranks == 5
    assert read_settings(changed("stages", None), "1f1b", None).ranks == 2


def test_a_trace_is_of_no_window_of_all_or_of_the_first_ones():
    assert read_settings(changed("trace", False), "1f1b", 2).trace == 0
    assert read_settings(changed("trace", True), "1f1b", 2).trace == sys.maxsize
    assert read_settings(config(["data=digits", "+trace.windows=3"]), "1f1b", 2).trace == 3


def test_too_few_processes_are_refused_with_the_way_to_start_more():
    assert refusal(lambda: read_settings(changed("stages", 4), "1f1b", 2)) == (
        "stages=4 needs 4 processes and there are 2; start torchrun with --nproc_per_node=4 "
        "(or NPROC=4 ./launch.sh), or leave stages out"
    )


def test_an_unset_optimizer_follows_the_recipe_and_the_rate_its_shape():
    read = read_settings(config(["data=cifar10", "optim=adamw"]), "1f1b", 1)
    assert (read.lr, read.epochs) == (0.001, 150)
    constant = read_settings(config(["data=digits", "lr_schedule=constant", "warmup=0"]), "1f1b", 1)
    assert [constant.rate(3)(update) for update in range(3)] == [0.005] * 3


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("codec.forward", None, "codec.forward must be a codec's name, or have a _target_"),
        ("codec.backward", "half", "codec.backward must be a codec's name, or have a _target_"),
        ("codec", 3, "codec.forward must be a codec's name, or have a _target_"),
        ("codec.forward", {"_target_": "builtins.dict"}, "codec.forward: builtins.dict must be a pipetrain."),
        ("codec.forward", {"_target_": "no.such"}, "codec.forward cannot be built: Error locating target"),
        (
            "codec.backward",
            {"_target_": "pipetrain.runtime.codec.TopK", "fraction": "x"},
            "codec.backward.fraction=x must be a number above 0 and at most 1",
        ),
        (
            "codec.backward",
            {"_target_": "tests.support.codecs.Raises"},
            "codec.backward cannot carry float32[2, 3, 4]: ZeroDivisionError: mine",
        ),
        (
            "codec.backward",
            {"_target_": "tests.support.codecs.Lies"},
            "codec.backward encodes float32[2, 3, 4] to float32[2, 3, 4], and should to float16[2, 3, 4]",
        ),
        (
            "codec.backward",
            {"_target_": "tests.support.codecs.Forgets"},
            "codec.backward decodes float32[2, 3, 4] to float16[2, 3, 4], and should to float32[2, 3, 4]",
        ),
        ("stages", 0, "stages=0 must be a whole number of at least 1 or null"),
        ("stages", True, "stages=True must be a whole number of at least 1 or null"),
        ("microbatches", 0, "microbatches=0 must be a whole number of at least 1"),
        ("microbatches", None, "microbatches=None must be a whole number of at least 1"),
        ("microbatches", 3, "microbatches=3 does not divide batch_size=64; choose a divisor"),
        ("window", 0, "window=0 must be a whole number of at least 1 or null"),
        ("window", 1.0, "window=1.0 must be a whole number of at least 1 or null"),
        ("buffer_size", 0, "buffer_size=0 must be a whole number of at least 1"),
        ("timeout", 0, "timeout=0 must be a finite number above 0"),
        ("timeout", "soon", "timeout=soon must be a number"),
        ("timeout", float("inf"), "timeout=inf must be a finite number above 0"),
        ("batch_size", 0, "batch_size=0 must be a whole number of at least 1"),
        ("batch_size", "64", "batch_size=64 must be a whole number of at least 1"),
        ("epochs", -1, "epochs=-1 must be a whole number of at least 1"),
        ("lr_schedule", "sine", "lr_schedule=sine is unknown; choose one of constant, cosine, one_cycle"),
        ("optim.lr", 0, "optim.lr=0 must be a finite number above 0"),
        ("optim.lr", float("nan"), "optim.lr=nan must be a finite number above 0"),
        ("optim.lr", None, "optim.lr=None must be a number"),
        ("warmup", 1, "warmup=1 is a share of all updates; choose it from 0 to below 1"),
        ("warmup", -0.1, "warmup=-0.1 is a share of all updates"),
        ("label_smoothing", 1, "label_smoothing=1 must be from 0 to below 1"),
        ("label_smoothing", -0.5, "label_smoothing=-0.5 must be from 0 to below 1"),
        ("seed", -1, "seed=-1 must be a whole number of at least 0"),
        ("device", "tpu", "device=tpu is unknown; choose one of auto, cpu, cuda"),
        ("dtype", "float16", "dtype=float16 is unknown; choose one of float32, float64"),
        ("threads", 0, "threads=0 must be a whole number of at least 1 or null"),
        ("threads", 100_000, "threads=100000 must be at most "),
        ("data.workers", 100_000, "data.workers=100000 must be at most "),
        ("data.workers", -1, "data.workers=-1 must be a whole number of at least 0"),
        ("data.drop_last", "maybe", "data.drop_last=maybe must be true or false"),
        ("trace", 3, "trace=3 must be true or false; trace.windows=4 traces the first 4 windows"),
        ("trace", None, "trace=None must be true or false"),
        ("trace", {"steps": 3}, "trace={'steps': 3} must be true or false"),
        ("trace", {"windows": 0}, "trace.windows=0 must be a whole number of at least 1"),
        ("trace", {"windows": True}, "trace.windows=True must be a whole number of at least 1"),
        ("partition", 8, "partition=8 must be a strategy's name or a list of layer numbers such as [8]"),
        ("partition", ["a"], "must be a strategy's name or a list of layer numbers such as [8]"),
        ("partition", [True], "must be a strategy's name or a list of layer numbers such as [8]"),
        ("partition", None, "must be a strategy's name or a list of layer numbers such as [8]"),
        ("partition", {"file": "x"}, "must be a strategy's name or a list of layer numbers such as [8]"),
        ("partition", {"profile": ""}, "partition.profile= must name the profile.json of a run"),
        ("partition", {"profile": None}, "partition.profile=None must name the profile.json of a run"),
        ("partition", {"profile": 3}, "partition.profile=3 must name the profile.json of a run"),
        ("memory_limit", 0, "memory_limit=0 must be a finite number above 0"),
        ("memory_limit", "much", "memory_limit=much must be a number"),
        ("memory_limit", 4, "memory_limit=4 needs to know what a stage holds: choose partition=profile with"),
    ],
)
def test_a_value_that_cannot_be_is_refused(key, value, says):
    assert says in refusal(lambda: read_settings(changed(key, value), "1f1b", None))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(SCALARS), JUNK)
def test_whatever_a_scalar_says_it_is_read_or_refused_in_one_line(key, value):
    read = outcome(lambda: read_settings(changed(key, value), "1f1b", None))
    if isinstance(read, str):
        assert "\n" not in read
    else:  # then it may be trusted
        assert read.batch_size % read.microbatches == 0
        assert min(read.batch_size, read.microbatches, read.buffer_size, read.epochs, read.ranks) >= 1
        assert 0 < read.timeout < float("inf")
        assert 0 < read.rate(10)(5) <= read.lr < float("inf")
        assert 0 <= read.label_smoothing < 1


def test_whole_number():
    cfg = OmegaConf.create({"a": {"b": 3}, "none": None, "half": 2.5, "yes": True})
    assert whole_number(cfg, "a.b", 3) == 3
    assert whole_number(cfg, "none", 1, optional=True) is None
    for key, low in (("a.b", 4), ("none", 1), ("half", 1), ("yes", 0), ("absent", 0)):
        assert f"{key}=" in refusal(lambda key=key, low=low: whole_number(cfg, key, low))


# The model


def same(a: nn.Sequential, b: nn.Sequential) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("model", ["mlp", "vgg11", "resnet18"])
def test_weights_depend_on_the_seed_alone(model):
    cfg = config(["data=digits", f"model={model}"])
    first = make_model(cfg, 3, torch.float32)
    torch.manual_seed(99)
    torch.randn(7)
    assert same(first, make_model(cfg, 3, torch.float32))
    assert not same(first, make_model(cfg, 4, torch.float32))


def test_nothing_but_the_model_and_the_seed_changes_the_weights():
    first = make_model(config(["data=digits", "model=mlp"]), 3, torch.float32)
    others = ["partition=[1]", "partition=even", "schedule=pipedream", "batch_size=16", "stages=4", "seed=5"]
    for override in others:
        cfg = config(["data=digits", "model=mlp", override])
        assert same(first, make_model(cfg, 3, torch.float32)), override


def test_dtype_is_a_conversion_of_the_same_weights():
    cfg = config(["data=digits", "model=mlp"])
    single, double = (make_model(cfg, 3, dtype) for dtype in (torch.float32, torch.float64))
    for a, b in zip(single.parameters(), double.parameters(), strict=True):
        assert b.dtype is torch.float64
        assert torch.equal(a.double(), b)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model._target_=no.such.thing"], "model cannot be built: Error locating target 'no.such.thing'"),
        (
            ["model._target_=tests.support.models.not_sequential"],
            "must return an nn.Sequential of the layers",
        ),
        (["model._target_=torch.nn.Sequential"], "of the layers to cut between, not an empty one"),
        (["+model.colour=red"], "vgg16 takes no colour; leave it out with ~model.colour"),
        (["model=mlp", "+model.depth=1"], "model mlp needs depth >= 2"),
        (["model=mlp", "+model.width=x"], "model cannot be built"),
    ],
)
def test_a_model_that_cannot_be_is_refused(overrides, says):
    cfg = config(["data=digits", *overrides])
    assert says in refusal(lambda: make_model(cfg, 0, torch.float32))


@pytest.mark.parametrize("group", ["model", "schedule", "optim"])
def test_a_group_without_a_target_is_refused(group):
    make = {
        "model": lambda cfg: make_model(cfg, 0, torch.float32),
        "schedule": make_schedule,
        "optim": lambda cfg: make_optimizer(cfg, LINEAR),
    }[group]
    cfg = changed(group, {"lr": 0.1})
    assert refusal(lambda: make(cfg)) == f"{group} needs a _target_: the dotted name of what builds it"


TARGETS = ["pipetrain.models.mlp", "pipetrain.models", "torch.nn.Sequential", "torch.nn.Linear", "math.pi"]
TARGETS += ["builtins.dict", "builtins.len", "torch.optim.SGD", "pipetrain.schedule.programs.gpipe", "a.b"]
ARGUMENTS = st.dictionaries(
    st.sampled_from(["depth", "width", "num_classes", "lr", "momentum", "virtual", "colour"]),
    st.one_of(st.integers(-2, 12), WORDS, st.none(), st.floats(-1, 2), st.booleans()),
    max_size=2,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.one_of(st.sampled_from(TARGETS), WORDS), ARGUMENTS)
def test_whatever_a_model_is_it_is_built_or_refused_in_one_line(target, arguments):
    cfg = changed("model", {"_target_": target, **arguments})
    model = outcome(lambda: make_model(cfg, 0, torch.float32))
    if isinstance(model, str):
        assert "\n" not in model
    else:
        assert isinstance(model, nn.Sequential)
        assert len(model)


# The optimizer


def test_an_optimizer_is_built_anew_for_each_stage():
    factory = make_optimizer(config(["data=digits", "optim=sgd", "optim.momentum=0.5"]), LINEAR)
    a, b = (factory([nn.Parameter(torch.zeros(2))]) for _ in range(2))
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
        ("optim._target_=no.such.thing", "optim cannot be built: Error locating target 'no.such.thing'"),
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


@settings(max_examples=150, deadline=None, derandomize=True)
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
        assert isinstance(factory([nn.Parameter(torch.zeros(1))]), torch.optim.Optimizer)


# The schedule


def test_a_schedule_is_a_function_with_its_own_arguments():
    schedule = make_schedule(config(["data=digits", "schedule=interleaved_1f1b", "schedule.virtual=3"]))
    assert {action.stage for actions in schedule(2, 1, 4) for action in actions} == set(range(6))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("schedule._target_=no.such.thing", "schedule cannot be built: Error locating target"),
        ("schedule._partial_=false", "schedule cannot be built: "),
        ("schedule._target_=math.pi", "schedule cannot be built: "),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(override, says):
    assert refusal(lambda: make_schedule(config(["data=digits", override]))).startswith(says)


def test_what_is_made_at_once_is_no_schedule():
    cfg = changed("schedule", {"_target_": "builtins.dict"})
    assert refusal(lambda: make_schedule(cfg)) == (
        "schedule must be a function; its YAML needs `_partial_: true` beside `_target_`"
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.one_of(st.sampled_from(TARGETS), WORDS), ARGUMENTS, st.booleans())
def test_whatever_a_schedule_is_it_is_made_or_refused_in_one_line(target, arguments, partial):
    cfg = changed("schedule", {"_target_": target, "_partial_": partial, **arguments})
    schedule = outcome(lambda: make_schedule(cfg))
    if isinstance(schedule, str):
        assert "\n" not in schedule
    else:
        assert callable(schedule)


# The rest


def test_the_name_of_a_target():
    cfg = OmegaConf.create({"target": "a.b.vgg16", "name": "${name_of:${target}}"})
    assert cfg.name == "vgg16"


def test_conf_lies_where_the_commands_find_it():
    assert conf_dir().is_absolute()
    assert (conf_dir() / "config.yaml").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="counts the cores that this process may use")
def test_cores_are_shared_and_never_none(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert [share_of_cores(n) for n in (1, 2, 3, 8, 100)] == [8, 4, 2, 1, 1]
