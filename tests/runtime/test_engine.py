"""The loop: what it counts, what it asserts, what a profiler sees. What it trains: whole/test_equivalence."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn

from pipetrain import Pipeline
from pipetrain.plan.plan import Plan
from pipetrain.schedule.actions import COMMUNICATION, SENDS
from pipetrain.schedule.timeline import Bounds
from tests.support.cases import Case, Listener
from tests.support.thread_ranks import run_in_threads

WORDS = ("model._target_=tests.support.models.without_norm", "microbatches=2", "epochs=1", "trace=true")
SAMPLE = 4 * 4 * 4 * 8  # bytes between the two stages, in float64


def test_what_each_window_of_training_measured_is_counted_once():
    """44 samples an epoch: each goes up once, in 16 bits, and its gradient comes back once, in 8."""
    listener = Listener()
    words = (*WORDS, "partition=[2]", "codec.forward=half", "codec.backward=int8")
    _, (figures,) = run_in_threads(Case("gpipe", 2, words), listener)
    (trace,) = listener.traces
    for stage, stats in figures.stages.items():
        rows = [window.timeline.rows[stage] for window in trace.windows]
        spans = [span for row in rows for span in row.spans if span.action]
        messages = [span for span in spans if span.action.op in COMMUNICATION]
        assert all(span.codec_s > 0 for span in messages)
        assert stats.codec_s == pytest.approx(sum(span.codec_s for span in messages), rel=1e-6)
        assert stats.bytes_sent == sum(span.nbytes for span in messages if span.action.op in SENDS)
        assert stats.raw_bytes == 44 * SAMPLE
        steps = 8 * 8 * stage  # of 8 messages of gradients, in float64
        assert stats.raw_bytes == (8 if stage else 4) * (stats.bytes_sent - steps)
        assert stats.busy_s == pytest.approx(sum(row.busy for row in rows), rel=1e-6)
        assert stats.wait_s == pytest.approx(sum(row.waited for row in rows), rel=1e-6)
        assert (stats.updates, stats.activations, stats.versions) == (4, 2, 1)


@pytest.mark.parametrize(
    ("schedule", "bounds", "says"),
    [
        ("1f1b", Bounds(1, 1, 9), "0F1@0: 2 microbatches in flight, 1 simulated"),
        ("pipedream", Bounds(9, 1, 9), "0STEP@1: 2 weight versions held, 1 simulated"),
    ],
)
def test_more_than_was_simulated_is_an_error(schedule, bounds, says):
    with patch.object(Plan, "peaks", lambda self, stage: bounds), pytest.raises(AssertionError, match=says):
        run_in_threads(Case(schedule, 2, WORDS))


def test_a_profiler_shows_the_actions():
    model, batch = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), (torch.ones(4, 3), torch.arange(4) % 2)
    sgd, words = partial(torch.optim.SGD, lr=0.1), {"microbatches": 2, "device": "cpu", "threads": 1}
    with Pipeline(model, nn.functional.cross_entropy, sgd, "interleaved_1f1b", **words) as pipe:
        list(pipe.train([batch]))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            list(pipe.train([batch]))
    assert {"0F0@0", "1F1@0", "1B1@0", "0STEP@1"} <= {event.name for event in profiler.events()}
