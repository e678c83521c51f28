"""Configurations at random, valid and not: each trains, or says in one sentence why not. None hangs."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipetrain.errors import ConfigError, TrainingStopped
from pipetrain.schedule.actions import ScheduleError
from tests.support.cases import SCHEDULES, Case
from tests.support.thread_ranks import run_in_threads

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))
MODELS = ["with_norm", "without_norm"] * 2 + ["recomputing", "dropping", "tied", "reused"]
MODELS += ["shared_statistics", "explode", "not_a_module", "complex_inside"]

# Values that work, some of them with others only, and values that cannot be.
POOL: dict[str, list[object]] = {
    "batch_size": [12, 8, 6, 100, 0, -3, 7, "x", 1.5],
    "microbatches": [1, 2, 3, 4, 6, 5, 0, "many", "null"],
    "window": ["null", 1, 2, 3, 100, 0, -1, "a"],
    "buffer_size": [1, 2, 5, 0, "true"],
    "partition": ["even", "flops", "params", "[1]", "[2,4]", "[9,3]", "[0]", "[99]", "[]", "nonsense", 7],
    "optim": ["sgd", "adamw"],
    "optim.lr": [0.05, 0.001, 0, -1, "nan", "high", 1e30],
    "optim.weight_decay": [0, 0.1, -1, "x"],
    "optim.fused": ["null", "true", "false", 3],
    "lr_schedule": ["constant", "cosine", "one_cycle", "up"],
    "warmup": [0, 0.5, 1, 2, -1, "warm"],
    "label_smoothing": [0, 0.1, 1, 1.5, -1],
    "dtype": ["float32", "float64", "int8"],
    "precision": ["fp32", "bf16", "fp8"],
    "memory_format": ["auto", "contiguous", "channels_last", "nhwc"],
    "on_nan": ["stop", "skip", "pray"],
    "seed": [0, 7, -1, 2**70, "x"],
    "build": ["whole", "stages", "parts"],
    "weights": ["null", "nowhere.pt"],
    "stages": ["null", 1, 2, 3, 9, 0],
    "replicas": ["null", 1, 2, "[2]", "[1,1]", "[2,1]", 0, "[]", "auto", "some"],
    "placement": ["null", "0", "0-1", "0.1", "0-1.0-1", "1.0", "0.2", "a"],
    "threads": ["null", 1, 0],
    "timeout": [30, 0, "inf"],
    "memory_limit": ["null", 1],
    "checkpoint.every": ["null", 1, 0],
    "checkpoint.unit": ["epochs", "updates", "days"],
    "checkpoint.keep": [1, 0],
    "resume": ["null", "auto", 3],
    "trace": ["false", "true", 3],
    "codec.forward": ["half", "int8", "topk", *(f"int8 codec.forward.scale={x}" for x in ("channel", "x"))],
    "codec.backward": ["topk_int8", "int8 codec.backward.stochastic=true"]
    + [f"topk codec.backward.fraction={x}" for x in (0.5, 0, 2, "x", "null")]
    + [f"threshold codec.backward.capacity={x}" for x in (0.5, 0, "x")],
    "data.drop_last": ["true", "false", "maybe"],
    "data.augment.flip": ["true", "false"],
    "model._target_": [f"tests.support.models.{name}" for name in MODELS],
}


@st.composite
def cases(draw) -> Case:
    keys = draw(st.lists(st.sampled_from(sorted(POOL)), max_size=4, unique=True))
    words = [word for key in sorted(keys) for word in f"{key}={draw(st.sampled_from(POOL[key]))}".split()]
    ranks = draw(st.integers(1, 2))
    return Case(draw(st.sampled_from(SCHEDULES)), ranks, ("epochs=1", *words), train_samples=32)


def test_whatever_is_asked_for_trains_or_is_refused_in_one_sentence():
    seen: Counter[str] = Counter()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def try_one(case: Case) -> None:
        said = "trained"
        try:
            run_in_threads(case)
        except (ConfigError, ScheduleError, TrainingStopped) as error:
            said = str(error)
            assert len(said) > 20, case
        assert "\n" not in said, case
        seen["trained" if said == "trained" else "refused"] += 1

    try_one()
    assert min(seen["trained"], seen["refused"]) > EXAMPLES // 5
