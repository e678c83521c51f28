"""Every schedule over real processes and gloo, against the single-process reference, in float64 to 1e-12."""

from __future__ import annotations

import pytest

from tests.support.cases import SCHEDULES, Case, stages_of
from tests.support.jobs import (
    compare_clocks,
    equal_the_reference,
    exchange,
    leave_with_references,
    overfill,
    watch,
)
from tests.support.process_ranks import in_world, run_world

pytestmark = pytest.mark.processes

NORM = "model._target_=tests.support.models.with_norm"
PLAIN = "model._target_=tests.support.models.without_norm"
SKIPS = ("model._target_=tests.support.models.skipping", "+model.dropout=0.3", "epochs=1")
# By stages. Some cuts lie between a layer and its skip connection, or before a layer that works in place.
UNEVEN = {2: "[3]", 3: "[1,7]", 4: "[1,4,8]", 6: "[1,2,4,6,9]"}
SPLIT = [schedule for schedule in SCHEDULES if schedule.startswith(("zb", "v_"))]
TURNS = [
    (NORM, "even", "window=null"),
    (NORM, "uneven", "window=2", "buffer_size=1"),
    (PLAIN, "even", "window=2", "optim=adamw"),
    (PLAIN, "uneven", "window=null", "buffer_size=1", "optim=adamw"),
]


def cases_of(ranks: int) -> list[Case]:
    """Half of the schedules, by turns on even and uneven cuts, with BatchNorm and without.

    In threads, each is held on more: see test_equivalence.py.
    """
    cases = []
    for number, schedule in enumerate(SCHEDULES[ranks - 2 :: 2]):
        model, cut, *words = TURNS[(number + ranks) % len(TURNS)]
        if schedule in SPLIT:
            model, cut, *words = PLAIN if ranks % 2 else NORM, "uneven", "window=2", "buffer_size=1"
            words += ["clip_grad_norm=0.25", *["optim=adamw"] * (ranks % 2)]
        cuts = UNEVEN[stages_of(schedule, ranks)] if cut == "uneven" else cut
        words = [model, f"partition={cuts}", "microbatches=4", "epochs=1", *words]
        cases.append(Case(schedule, ranks, tuple(words)))
    return cases


def test_every_schedule_equals_the_reference(ranks, three):
    for size, staying in ((2, ranks), (3, three)):
        equal_the_reference(staying, cases_of(size))


def test_skips_what_is_dropped_and_norms_of_the_model_equal_the_reference(three):
    """Each process draws for itself, and a skip has an edge of its own."""
    clip = (NORM, "microbatches=3", "clip_grad_norm=0.25", "window=2", "epochs=1")
    cases = [
        Case("1f1b", 3, (*SKIPS, "partition=[3,9]", "microbatches=6", "+model.recompute=plain")),
        Case("fbp", 3, (*SKIPS, "partition=[6,11]", "microbatches=3")),
        Case("pipedream", 3, (*SKIPS, "partition=[3,9]", "microbatches=2", "window=2", "buffer_size=1")),
        Case("v_half", 3, (*SKIPS, "partition=[2,4,6,9,11]", "microbatches=6", "buffer_size=1")),
        Case("interleaved_1f1b", 3, (*clip, "partition=even")),
        Case("pipedream", 3, (*clip, "partition=[1,7]", "clip_grad_norm_over=model", "ema=0.5")),
    ]
    equal_the_reference(three, cases)


@pytest.mark.parametrize(("elements", "messages", "buffer_size"), [(4, 9, 3), (2 << 20, 3, 1)])
def test_two_ranks_that_both_send_first_do_not_hang(ranks, elements, messages, buffer_size):
    up, down = ranks(in_world, exchange, elements, messages, buffer_size)
    assert up == [100.0 + mb for mb in range(messages)]
    assert down == [float(mb) for mb in range(messages)]


def test_the_bound_is_enforced_and_its_expiry_named_and_so_are_norms_that_do_not_come():
    full, silent = run_world(overfill, 2)
    assert full == "rank 0 waited 1 s for rank 1 to take the activation of microbatch 0"
    assert silent == "rank 1 waited 1 s for the gradient norms of rank 0"


def test_a_rank_that_leaves_after_an_error_is_lost_at_once_whatever_still_refers_to_its_messages(ranks):
    (message, told), _ = ranks(in_world, leave_with_references)
    assert message.startswith("rank 0 lost rank 1 at the gradient of microbatch 0: Connection closed by peer")
    assert told.startswith("rank 0 could not receive it from rank 1: Connection closed by peer")


def test_what_has_arrived_and_where_there_is_room_can_be_asked():
    sender, receiver = run_world(watch, 2)
    assert sender == ["rank 0 waited 1 s for rank 1 to take the activation of microbatch 9"]
    late, *received, lost, norms = receiver
    assert late == "rank 1 waited 1 s for the activation of microbatch 7 from rank 0"
    assert received == ["7.0", "8.0"]
    assert lost.startswith("rank 1 lost rank 0 at the activation of microbatch 9: ")
    assert norms.startswith("rank 1 lost rank 0 at the gradient norms: ")


def test_clocks_are_compared_with_rank_0_s(three):
    """perf_counter is one clock for all processes of a machine, so what is found is the shift alone."""
    (zero, no_error), *others = three(in_world, compare_clocks, [5.0, 105.0, -20.0])
    assert (zero, no_error) == (0.0, 0.0)
    for (offset, error), shift in zip(others, [-100.0, 25.0], strict=True):
        assert 0 < error < 5
        assert abs(offset - shift) <= error
