"""A rehearsal leaves no trace, and after it nothing waits for a message that waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from pipetrain.training import assembly
from tests.support.cases import SCHEDULES, Case, run_in_threads

UNEVEN = ("microbatches=3", "epochs=2", "window=2")  # microbatches of 4, 3 and 2 samples


@contextmanager
def rehearsed() -> Iterator[None]:
    """Let the engines of this process rehearse."""
    with patch.object(assembly, "rehearses", lambda device: True):
        yield


def trained(case: Case) -> tuple[dict[str, torch.Tensor], list[tuple[float, float, float]]]:
    state, epochs = run_in_threads(case)
    return state, [(f.trained.mean_loss, f.evaluated.mean_loss, f.score) for f in epochs]


def assert_no_trace(case: Case) -> None:
    plain, losses = trained(case)
    with rehearsed():
        again, others = trained(case)
    assert losses == others
    assert plain.keys() == again.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, again[name]), name


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "fbp"])
def test_training_after_a_rehearsal_is_equal_to_the_last_bit(schedule):
    assert_no_trace(Case(schedule, 2, UNEVEN))


@pytest.mark.parametrize(
    "overrides",
    [
        ("optim=adamw", "clip_grad_norm=0.1", "ema=0.9"),
        ("on_nan=skip", "batchnorm=batch", "recompute=always"),
        ("codec.forward=topk_int8", "codec.backward=int8"),
        ("model._target_=tests.support.models.dropping", "recompute=selective"),
    ],
    ids=" ".join,
)
def test_so_it_is_with_options(overrides):
    assert_no_trace(Case("1f1b", 2, (*UNEVEN, *overrides)))
