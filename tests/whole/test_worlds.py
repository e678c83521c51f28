"""Every schedule over real processes and gloo, against the single-process reference, in float64 to 1e-12."""

from __future__ import annotations

import pytest

from tests.support.cases import SCHEDULES, Case, stages_of
from tests.support.jobs import compare_clocks, exchange, overfill, train_cases, watch
from tests.support.worlds import run_world

pytestmark = pytest.mark.processes

NORM = "model._target_=tests.support.models.with_norm"
PLAIN = "model._target_=tests.support.models.without_norm"
# By stages. Some cuts lie between a layer and its skip connection, or before a layer that works in place.
UNEVEN = {2: "[3]", 3: "[1,7]", 4: "[1,4,8]", 6: "[1,2,4,6,9]"}
EPOCHS, BATCHES = "window=null", "window=2"
FEW = {  # schedules by ranks; in threads, each is held on more (test_equivalence.py)
    2: SCHEDULES[::2],
    3: SCHEDULES[1::2],
}
SPLIT = [schedule for schedule in SCHEDULES if schedule.startswith(("zb", "v_"))]


def _cases(ranks: int) -> list[Case]:
    """By turns even and uneven cuts, with BatchNorm and without, both windows and bounds."""
    turns = [
        (NORM, "even", EPOCHS),
        (NORM, "uneven", BATCHES, "buffer_size=1"),
        (PLAIN, "even", BATCHES, "optim=adamw"),
        (PLAIN, "uneven", EPOCHS, "buffer_size=1", "optim=adamw"),
    ]
    cases = []
    for number, schedule in enumerate(FEW[ranks]):
        model, cut, *words = turns[(number + ranks) % len(turns)]
        if schedule in SPLIT:
            model, cut, *words = PLAIN if ranks % 2 else NORM, "uneven", BATCHES, "buffer_size=1"
            words += ["clip_grad_norm=0.25", *["optim=adamw"] * (ranks % 2)]
        cuts = UNEVEN[stages_of(schedule, ranks)] if cut == "uneven" else cut
        words = [model, f"partition={cuts}", "microbatches=4", "epochs=2", *words]
        cases.append(Case(schedule, ranks, tuple(words)))
    return cases


@pytest.mark.parametrize("ranks", FEW)
def test_every_schedule_equals_the_reference(ranks):
    cases = _cases(ranks)
    assert run_world(train_cases, ranks, cases) == [len(cases)] * ranks


def test_skips_and_what_is_dropped_equal_the_reference():
    """Each process draws for itself, and a skip has an edge of its own."""
    skips = ("model._target_=tests.support.models.skipping", "+model.dropout=0.3", "epochs=1")
    cases = [
        Case("1f1b", 3, (*skips, "partition=[3,9]", "microbatches=6", "+model.recompute=plain")),
        Case("fbp", 3, (*skips, "partition=[6,11]", "microbatches=3")),
        Case("pipedream", 3, (*skips, "partition=[3,9]", "microbatches=2", "window=2", "buffer_size=1")),
        Case("interleaved_1f1b", 3, (*skips, "partition=[2,4,6,8,10]", "microbatches=6")),
        Case("v_half", 3, (*skips, "partition=[2,4,6,9,11]", "microbatches=6", "buffer_size=1")),
    ]
    assert run_world(train_cases, 3, cases) == [5] * 3


def test_clipping_by_the_norm_of_the_model_equals_the_reference():
    words = (NORM, "microbatches=3", "clip_grad_norm=0.25", "window=2", "epochs=2")
    cases = [
        Case("1f1b", 3, (*words, "partition=even", "buffer_size=1")),
        Case("interleaved_1f1b", 3, (*words, "partition=even")),
        Case("pipedream", 3, (*words, "partition=[1,7]", "clip_grad_norm_over=model", "ema=0.5")),
    ]
    assert run_world(train_cases, 3, cases) == [3] * 3


def test_eight_stages_and_one_message_under_way():
    words = (NORM, "partition=even", "batch_size=16", "microbatches=8", "buffer_size=1", "epochs=1")
    assert run_world(train_cases, 8, [Case("pipedream", 8, words)]) == [1] * 8


@pytest.mark.parametrize(("elements", "messages", "buffer_size"), [(4, 9, 1), (4, 9, 3), (18 << 20, 3, 1)])
def test_two_ranks_that_both_send_first_do_not_hang(elements, messages, buffer_size):
    up, down = run_world(exchange, 2, elements, messages, buffer_size)
    assert up == [100.0 + mb for mb in range(messages)]
    assert down == [float(mb) for mb in range(messages)]


def test_the_bound_is_enforced_and_its_expiry_named_and_so_are_norms_that_do_not_come():
    full, silent = run_world(overfill, 2)
    assert full == "rank 0 waited 1 s for rank 1 to take the activation of microbatch 0"
    assert silent == "rank 1 waited 1 s for the gradient norms of the other ranks"


def test_what_has_arrived_and_where_there_is_room_can_be_asked():
    sender, receiver = run_world(watch, 2)
    assert sender == ["rank 0 waited 1 s for rank 1 to take the activation of microbatch 9"]
    late, *received, lost, norms = receiver
    assert late == "rank 1 waited 1 s for the activation of microbatch 7 from rank 0"
    assert received == ["7.0", "8.0"]
    assert lost.startswith("rank 1 lost rank 0 at the activation of microbatch 9: ")
    assert norms.startswith("rank 1 lost another rank at the gradient norms: ")


def test_clocks_are_compared_with_rank_0_s():
    """perf_counter is one clock for all processes of a machine, so what is found is the shift alone."""
    (zero, no_error), *others = run_world(compare_clocks, 3, [5.0, 105.0, -20.0])
    assert (zero, no_error) == (0.0, 0.0)
    for (offset, error), shift in zip(others, [-100.0, 25.0], strict=True):
        assert 0 < error < 5
        assert abs(offset - shift) <= error
