"""Corrections of late gradients against the reference: each equation, on several stages, and replicas."""

from __future__ import annotations

import pytest

from pipetrain.errors import ConfigError
from tests.support.cases import Case, compare, make_run
from tests.support.thread_ranks import run_in_threads

NORM = "model._target_=tests.support.models.with_norm"
TIED = "model._target_=tests.support.models.tied"
SGD = ("optim.momentum=0.9", "optim.lr=0.02")
PLAIN = "model._target_=tests.support.models.without_norm"  # before a norm a bias has but rounding errors,
ADAM = (PLAIN, "optim=adamw", "optim.lr=0.003", "optim.weight_decay=0")  # which Adam makes large
STRUCK = (
    "model._target_=tests.support.edge_case_models.struck",
    "on_nan=skip",
    "microbatches=1",
    "partition=[1,2]",
)
CONSTANT = ("lr_schedule=constant", "warmup=0")
MARE = ("correction=pipemare", "correction.pipemare.updates=3")
ALL = "correction=[pipemare,gap_aware,msnag]"
HYBRID = "correction=[hybrid,gap_aware,msnag]"
CASES = [
    Case("pipedream", 4, ("correction=spectrain", "microbatches=1", *SGD)),
    Case("pipedream", 2, ("correction=xpipe", "microbatches=3", *ADAM)),
    Case("pipedream_2bw", 4, ("correction=pipeoptim", "microbatches=4", "clip_grad_norm=0.1", *SGD)),
    Case("pipedream", 4, ("correction=msnag", "microbatches=2", "ema=0.9", *SGD)),
    Case("pipedream_2bw", 4, ("correction=msnag", "microbatches=4", PLAIN, "optim=muon")),
    Case("pipedream_2bw", 2, ("correction=msnag", "microbatches=3", *ADAM)),
    Case("pipedream", 4, ("correction=nesterov", "microbatches=1", *CONSTANT, *SGD)),
    Case("pipedream", 4, (*MARE, "microbatches=1", *ADAM)),
    Case("pipedream", 4, ("correction=gap_aware", "microbatches=1", *SGD)),
    Case("pipedream", 2, ("correction=gap_aware", "microbatches=3", "recompute=always", *SGD)),
    Case(
        "ssp", 4, (ALL, "correction.pipemare.updates=3", "microbatches=2", "schedule.buffer=[3,3,2,1]", *SGD)
    ),
    Case("v_async", 2, ("correction=[gap_aware,spectrain]", "microbatches=1", "partition=[1,2,3]", *SGD)),
    Case("v_async", 2, ("correction=msnag", "microbatches=4", "partition=[1,2,3]", "window=2", *SGD)),
    Case("pipedream", 3, ("correction=spectrain", "replicas=[2,1]", "microbatches=1", *SGD)),
    Case("pipedream", 5, (ALL, "correction.pipemare.updates=3", "replicas=[2,1,2]", "microbatches=3", *SGD)),
    Case("pipedream_2bw", 4, ("correction=[gap_aware,msnag]", "replicas=[3,1]", "microbatches=3", *SGD)),
    Case("pipedream", 4, (HYBRID, "correction.hybrid.share=0.4", "microbatches=1", *SGD)),
    Case("pipedream", 4, ("correction=hybrid", "correction.hybrid.first=false", "microbatches=1", *SGD)),
    Case(
        "pipedream_2bw",
        2,
        (
            "correction=msnag",
            "model._target_=tests.support.models.tied",
            "partition=[2]",
            "microbatches=4",
            *SGD,
        ),
    ),
    Case("pipedream", 2, ("correction=gap_aware", TIED, "partition=[2]", "microbatches=2", *SGD)),
    Case("pipedream", 3, ("correction=spectrain", *STRUCK, *SGD), 84),
    Case("pipedream", 3, ("correction=[gap_aware,msnag]", *STRUCK, *SGD, "optim.fused=true"), 84),
    Case("pipedream", 3, ("correction=nesterov", *CONSTANT, *STRUCK, *SGD), 84),
    Case("pipedream", 3, ("correction=xpipe", *STRUCK, "optim=adamw", "optim.weight_decay=0"), 84),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_corrected_run_is_that_of_its_equations(case: Case) -> None:
    state, figures = run_in_threads(case)
    compare(case, state, figures)


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 2), ("pipedream", 1)])
def test_without_a_delay_nothing_changes_to_the_last_bit(schedule: str, ranks: int) -> None:
    words = (NORM, "microbatches=2", "epochs=1")
    plain, _ = run_in_threads(Case(schedule, ranks, words, 24))
    for correction in ("[pipemare,gap_aware,msnag]", "spectrain", "nesterov"):
        state, _ = run_in_threads(Case(schedule, ranks, (*words, f"correction={correction}"), 24))
        assert all(state[name].equal(tensor) for name, tensor in plain.items())


@pytest.mark.parametrize(
    ("schedule", "words", "says"),
    [
        ("fbp", ("correction=msnag",), "fbp decides its order while it runs"),
        ("pipedream", ("correction=[msnag,spectrain]",), "both say which weights a forward reads"),
        (
            "pipedream",
            ("correction=pipemare", "correction.pipemare.updates=0"),
            "a whole number of at least 1",
        ),
        (
            "pipedream",
            ("correction=pipemare", TIED, "partition=[2]"),
            "stages that share a weight are not equally late",
        ),
    ],
)
def test_what_cannot_be_corrected_is_refused(schedule: str, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_run(Case(schedule, 2, words))
