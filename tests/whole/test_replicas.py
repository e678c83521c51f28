"""Replicas against the reference: every schedule with a fixed order, over even, uneven and shared ranks."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipetrain.errors import ConfigError
from pipetrain.runtime.comm import gradient_buckets as buckets
from pipetrain.schedule.actions import ScheduleError
from tests.support.cases import SCHEDULES, Case, compare, make_run
from tests.support.thread_ranks import run_in_threads

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
NORM, PLAIN = (f"model._target_=tests.support.models.with{end}_norm" for end in ("", "out"))
TIED = "model._target_=tests.support.models.tied"
FROZEN = ("model._target_=tests.support.edge_case_models.norms", "+model.struck=true", "+model.frozen=4")
SKIPPING = "model._target_=tests.support.models.skipping"
BY_HAND = [
    Case("1f1b", 3, ("replicas=[2,1]", NORM, "microbatches=5")),
    Case("gpipe", 4, ("replicas=2", NORM, "microbatches=3", "on_nan=skip")),
    Case("layer_dist", 4, ("replicas=[1,3]", PLAIN, "microbatches=4", "ema=0.9")),
    Case("interleaved_1f1b", 4, ("replicas=2", NORM, "microbatches=5", "partition=[1,2,3]")),
    Case("zb_h1", 4, ("replicas=[3,1]", PLAIN, "microbatches=4", "recompute=always")),
    Case("zbv", 3, ("replicas=[2,1]", NORM, "microbatches=4", "partition=[1,2,3]", "clip_grad_norm=0.1")),
    Case("zb_auto", 4, ("replicas=2", NORM, "microbatches=4")),
    Case("1f1b", 4, ("replicas=2", *FROZEN, "microbatches=4", "on_nan=skip", "partition=[4]")),
    Case("pipedream", 5, ("replicas=[2,1,2]", PLAIN, "microbatches=3")),
    Case("pipedream", 3, ("replicas=[2,1]", NORM, "microbatches=1", "on_nan=skip")),
    Case("pipedream_2bw", 4, ("replicas=[3,1]", PLAIN, "microbatches=3", "clip_grad_norm=0.1")),
    Case("v_async", 3, ("replicas=[2,1]", NORM, "microbatches=1", "partition=[1,2,3]")),
    Case("v_async", 4, ("replicas=2", NORM, "microbatches=4", "partition=[1,2,3]")),
    Case("ssp", 3, ("replicas=[2,1]", NORM, "microbatches=2", "schedule.buffer=4")),
    Case("1f1b", 2, ("placement=0-1.0-1", NORM, "microbatches=4")),
    Case("pipedream", 2, ("placement=0-1.0-1", PLAIN, "microbatches=3")),
    Case("1f1b", 3, ("placement=0-1.1-2", PLAIN, "microbatches=3", "clip_grad_norm=0.1")),
    Case("1f1b", 4, ("replicas=2", TIED, "partition=[2]", "microbatches=4", "clip_grad_norm=0.25")),
    Case("1f1b", 2, ("placement=0-1.0-1", TIED, "partition=[2]", "microbatches=4", "clip_grad_norm=0.25")),
    Case(
        "gpipe", 5, ("replicas=[2,1,2]", SKIPPING, "partition=[3,9]", "microbatches=4", "+model.dropout=0.3")
    ),
]


@pytest.mark.parametrize("case", BY_HAND, ids=str)
def test_replicas_train_as_one_process_does(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of the microbatches each, also of the last batch, which is smaller, or not divisible.

    Most matrices are a bucket each.
    """
    monkeypatch.setattr(buckets, "BUCKET", 1000)
    state, figures = run_in_threads(case)
    compare(case, state, figures)


PLACES = [(4, "replicas=2"), (4, "replicas=[3,1]"), (4, "replicas=[1,3]"), (5, "replicas=[2,1,2]")]
PLACES += [(2, "placement=0-1.0-1"), (3, "placement=0-1.1-2"), (2, "replicas=[2]")]
OPTIONS = [
    "recompute=always",
    "clip_grad_norm=0.1",
    "ema=0.9",
    "on_nan=skip",
    "buffer_size=1",
    "optim.momentum=0.9",
]


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    st.sampled_from([schedule for schedule in SCHEDULES if schedule != "fbp"]),
    st.sampled_from(PLACES),
    st.integers(1, 6),
    st.sampled_from(["small", "skipping", "tied"]),
    st.lists(st.sampled_from(OPTIONS), max_size=2, unique=True),
    st.sampled_from(["window=null", "window=1", "window=3"]),
)
def test_replicas_of_any_kind_train_as_one_process_does(schedule, places, m, model, options, window) -> None:
    ranks, words = places
    words = (words, f"model._target_=tests.support.models.{model}", f"microbatches={m}", *options, window)
    case = Case(schedule, ranks, ("epochs=2", "optim.lr=0.01", *words))
    try:
        state, figures = run_in_threads(case)
    except (ConfigError, ScheduleError):  # too few microbatches or layers, or updates that cannot wait
        return
    compare(case, state, figures)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ("1f1b", (NORM,)),
        ("1f1b", (*FROZEN, "partition=[4]", "on_nan=skip")),
        ("pipedream", (*FROZEN, "partition=[4]", "on_nan=skip")),
    ],
)
def test_moments_of_whole_batches_are_those_of_all_replicas(schedule: str, words: tuple[str, ...]) -> None:
    """batchnorm=batch over replicas is what it is without them, also of a stage that trains no weight."""
    words = (*words, "microbatches=5", "batchnorm=batch")
    alone, _ = run_in_threads(Case(schedule, 2, words))
    state, _ = run_in_threads(Case(schedule, 3, (*words, "replicas=[2,1]")))
    for name, tensor in alone.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "ranks", "words", "says"),
    [
        ("fbp", 4, ("replicas=2",), "fbp decides its order while it runs"),
        (
            "1f1b",
            4,
            ("replicas=[3,1]", "microbatches=2"),
            "a stage has 3 replicas, and a batch has 2 microbatches",
        ),
        (
            "pipedream",
            4,
            ("replicas=[3,1]", "microbatches=1", "batchnorm=batch"),
            "batchnorm=batch needs a micro",
        ),
        ("pipedream", 4, ("replicas=[3,1]", "microbatches=1", "window=2"), "and a window has 2 microbatches"),
    ],
)
def test_what_replicas_cannot_do_is_refused(
    schedule: str, ranks: int, words: tuple[str, ...], says: str
) -> None:
    with pytest.raises(Exception, match=says):
        make_run(Case(schedule, ranks, words))
