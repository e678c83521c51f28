"""Profiling before a run: what it measures together, what it must not disturb, and what it says."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from omegaconf import OmegaConf

from pipetrain.errors import ConfigError
from pipetrain.plan.blueprint import profile_conditions
from pipetrain.plan.profile import Profile
from pipetrain.plan.stages import Choice, Prediction
from pipetrain.runtime.mesh import World
from pipetrain.runtime.profiling import measure, verdict
from pipetrain.settings import Settings
from pipetrain.training.run import check_early
from tests.support.cases import config
from tests.support.jobs import profile_that_fails, profile_then_train
from tests.support.profiles import profile
from tests.support.worlds import run_world

pytestmark = pytest.mark.processes

WORDS = ["data=digits", "batch_size=12", "microbatches=4", "epochs=2", "timeout=60", "threads=1"]
CPU = torch.device("cpu")


def model(name: str) -> str:
    return f"model._target_=tests.support.models.{name}"


# Together


def test_a_run_by_measured_cuts_is_the_run_by_the_same_cuts_to_the_last_bit():
    (first, cuts), (second, others) = run_world(profile_then_train, 2, [*WORDS, model("dropping")])
    assert first == second
    assert cuts == others
    assert all(a < b for a, b in pairwise([0, *cuts, 5]))
    measured = Profile.from_json(json.loads(json.dumps(first)))
    assert measured.machine["ranks"] == 2
    assert measured.conditions["microbatch"] == 3
    assert len(measured.layers) == 5
    assert measured.latency_s + measured.s_per_byte > 0


def test_a_layer_that_fails_is_said_once_and_all_ranks_know():
    sentence = "layer 2 (2) of the model cannot be profiled: RuntimeError: no numbers"
    said = run_world(profile_that_fails, 2, [*WORDS, model("no_numbers")])
    assert said == [sentence, f"rank 1 goes on: {sentence}"]


# Alone


def test_alone_too_and_the_random_generator_is_put_back():
    cfg = config([*WORDS, model("dropping"), "partition=profile"])
    draft = check_early(cfg, "1f1b", 1)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    measured = measure(cfg, draft, World(), CPU, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert (measured.latency_s, measured.s_per_byte) == (0, 0)
    assert measured.machine == {
        "device": "cpu",
        "ranks": 1,
        "threads": 1,
        "torch": str(torch.__version__),
    }


# Conditions


def conditions_of(*words: str) -> dict:
    cfg = config([*WORDS, "model=mlp", *words])
    return dict(profile_conditions(Settings.composed(cfg, "1f1b", 1), cfg.optim))


def test_conditions_are_what_changes_what_is_measured():
    base = conditions_of()
    assert base == {
        "model": "mlp",
        "microbatch": 3,
        "dtype": "float32",
        "precision": "fp32",
        "memory_format": "auto",
        "optimizer": "SGD momentum=0.9 weight_decay=0.0005 fused=None",
    }
    for words in (["optim.lr=0.3"], ["seed=4"], ["epochs=9"], ["schedule=pipedream", "microbatches=4"]):
        assert conditions_of(*words) == base
    for word in ("dtype=float64", "optim.momentum=0", "optim=adamw", "microbatches=2", "model=vgg11"):
        assert conditions_of(word) != base


# A draft, and a file


def test_a_draft_is_cut_by_flops_until_there_are_times():
    words = [*WORDS, "model=mlp", "memory_limit=1e-9"]
    draft = check_early(config([*words, "partition=profile"]), "1f1b", 2)
    assert draft.cuts == check_early(config([*WORDS, "model=mlp"]), "1f1b", 2).cuts
    assert (draft.costs, draft.prediction) == (None, None)


def test_a_file_is_read_and_refused_before_anything_starts(tmp_path):
    file = tmp_path / "profile.json"

    def read(*words: str):
        cfg = config([*WORDS, "model=mlp", *words])
        OmegaConf.update(cfg, "partition", {"profile": str(file)}, merge=False)
        return check_early(cfg, "1f1b", 2)

    cfg = config([*WORDS, "model=mlp", "partition=profile"])
    measured = measure(cfg, check_early(cfg, "1f1b", 1), World(), CPU, None)
    file.write_text(json.dumps(measured.to_json()))
    plan = read()
    assert plan.prediction is not None
    assert plan.prediction.profile == measured
    assert read().cuts == plan.cuts
    for words, says in (
        (["model=vgg11"], "was taken with model=mlp, and this run has model=vgg11"),
        (["microbatches=2"], "was taken with microbatch=3, and this run has microbatch=6"),
        (["+model.depth=5"], "its layer 4 is hidden5 and returns 1536 bytes, and the model's is head"),
        (["+model.width=9"], "its layer 0 is hidden1 and returns 1536 bytes, and the model's is hidden1"),
        (
            ["memory_limit=1e-6"],
            "memory_limit=1e-06 is too small: the smallest with which 2 stages fit is 0.0",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            read(*words)


# What is said


def said(*not_fitting: str, **slowest: float) -> str:
    choices = {
        name: Choice([index], seconds, 0, name not in not_fitting)
        for index, (name, seconds) in enumerate(slowest.items())
    }
    return verdict(Prediction(profile([]), [], choices)).partition("a batch, by cuts: ")[2]


def test_the_verdict_says_what_was_beaten_and_what_was_not():
    assert said(profile=0.5, even=0.6, params=2, flops=1) == (
        "profile [0] 500.0, even [1] 600.0, params [2] 2000.0, flops [3] 1000.0: "
        "profile beats even, params and flops"
    )
    assert said(profile=0.5, even=0.5, params=2, flops=0.5).endswith(
        ": profile beats params, even is as good, flops is as good"
    )
    assert said(profile=0.5, even=0.7, params=2, flops=0.4).endswith(
        ": profile beats even and params, flops would be faster, but is ruled out"
    )
    assert said("even", "flops", profile=0.5, even=0.7, params=2, flops=0.4).endswith(
        ": profile beats params, even does not fit into memory_limit, flops does not fit into memory_limit"
    )
