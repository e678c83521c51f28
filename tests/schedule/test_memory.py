"""What a stage holds, action by action, counted by hand; and the same in bytes."""

from __future__ import annotations

import pytest

from pipetrain.schedule.actions import parse_program
from pipetrain.schedule.lower import lower
from pipetrain.schedule.memory import (
    Counts,
    Held,
    Sizes,
    counts,
    in_bytes,
    most,
    over_time,
    peak,
    peaks,
)
from pipetrain.schedule.programs import gpipe, one_f_one_b, pipedream
from pipetrain.schedule.simulate import simulate
from tests.schedule.cases import CASES, NAMES, Case, accepted

BOUNDS = {(0, 1): 2, (1, 0): 2}


def story(program: str, rank: int, stage: int, bounds=BOUNDS, **others) -> list[tuple]:
    """Return each action of a rank with what changes: microbatches in their states, and messages."""
    actions = lower(parse_program(program))[rank]
    told = []
    for action, held in counts(actions, bounds, **others):
        of = held[stage]
        told.append((str(action), of[:3], dict(of.wire), dict(of.raw)))
    return told


WHOLE = "0F0@0 0F1@0 0F2@0 0B0@0 0B1@0 0B2@0 0STEP@1\n1F0@0 1B0@0 1F1@0 1B1@0 1F2@0 1B2@0 1STEP@1"


def test_a_first_stage_keeps_its_outputs_as_activations_and_what_it_has_sent_of_closed_microbatches():
    back = (1, 0)
    assert story(WHOLE, 0, 0) == [
        ("0F0@0", (1, 0, 0), {back: 2}, {}),  # two receives are posted ahead
        ("0SEND_F0", (1, 0, 0), {back: 2}, {}),  # what is sent is saved anyway
        ("0F1@0", (2, 0, 0), {back: 2}, {}),
        ("0SEND_F1", (2, 0, 0), {back: 2}, {}),
        ("0F2@0", (3, 0, 0), {back: 2}, {}),
        ("0SEND_F2", (3, 0, 0), {back: 2}, {}),
        ("0RECV_B0", (3, 0, 0), {back: 2}, {back: 1}),  # and the next is posted
        ("0B0@0", (2, 0, 0), {back: 2}, {}),  # 1 and 2 were sent last, and are open
        ("0RECV_B1", (2, 0, 0), {back: 1}, {back: 1}),
        ("0B1@0", (1, 0, 0), {(0, 1): 1, back: 1}, {}),
        ("0RECV_B2", (1, 0, 0), {(0, 1): 1}, {back: 1}),
        ("0B2@0", (0, 0, 0), {(0, 1): 2}, {}),
        ("0REDUCE@1", (0, 0, 0), {(0, 1): 2}, {}),
        ("0STEP@1", (0, 0, 0), {(0, 1): 2}, {}),
    ]


def test_a_last_stage_keeps_the_gradients_that_it_has_sent():
    there, back = (0, 1), (1, 0)
    assert story(WHOLE, 1, 1)[:8] == [
        ("1RECV_F0", (0, 0, 0), {there: 2}, {there: 1}),
        ("1F0@0", (1, 0, 0), {there: 2}, {}),
        ("1B0@0", (0, 0, 0), {there: 2}, {back: 1}),
        ("1SEND_B0", (0, 0, 0), {there: 2, back: 1}, {}),
        ("1RECV_F1", (0, 0, 0), {there: 1, back: 1}, {there: 1}),
        ("1F1@0", (1, 0, 0), {there: 1, back: 1}, {}),
        ("1B1@0", (0, 0, 0), {there: 1, back: 1}, {back: 1}),
        ("1SEND_B1", (0, 0, 0), {there: 1, back: 2}, {}),
    ]


def test_the_halves_of_a_backward_and_a_recomputation():
    program = "0F0@0 0F1@0 0R0@0 0I0@0 0I1@0 0W0@0 0W1@0 0STEP@1"
    assert [state for _, state, *_ in story(program, 0, 0)] == [
        (0, 1, 0), (1, 1, 0), (2, 0, 0), (1, 0, 1), (0, 0, 2), (0, 0, 1), (0, 0, 0), (0, 0, 0), (0, 0, 0),
    ]  # fmt: skip


def test_what_is_sent_by_a_codec_is_a_copy():
    held = story(WHOLE, 0, 0, copied=[(0, 1)])
    assert held[5] == ("0SEND_F2", (3, 0, 0), {(0, 1): 2, (1, 0): 2}, {})


def test_between_the_stages_of_a_rank_a_message_is_its_receiver_s():
    one = "0F0@0 1F0@0 1B0@0 0B0@0 0STEP@1 1STEP@1"
    there, back = (0, 1), (1, 0)
    first, second = story(one, 0, 0, {}), story(one, 0, 1, {})
    assert [(raw0, raw1) for (*_, raw0), (*_, raw1) in zip(first, second, strict=True)][:4] == [
        ({}, {there: 1}), ({}, {}), ({back: 1}, {}), ({}, {}),
    ]  # fmt: skip


def test_gradients_are_held_until_their_step_and_the_storage_of_versions_for_good():
    actions = lower(pipedream(2, 3, 1))[0]
    held = [(str(action), of[0].gradients, of[0].versions) for action, of in counts(actions, BOUNDS)]
    assert {versions for *_, versions in held} == {1}
    told = {name: gradients for name, gradients, _ in held}
    assert (told["0F0@0"], told["0B0@0"], told["0STEP@1"], told["0B1@0"]) == (0, 1, 0, 1)


def test_bytes_are_counts_times_sizes():
    sizes = Sizes(
        saved=10,
        before_r=3,
        after_i=5,
        weights=100,
        version=90,
        gradient=80,
        optimizer=70,
        wire={(0, 1): 7},
        raw={(0, 1): 8},
    )
    held = in_bytes(Counts(2, 1, 1, 1, 1, 0, (((0, 1), 3),), (((0, 1), 1),)), sizes)
    assert held == Held(
        activations=28, weights=100, versions=90, gradients=80, optimizer=70, messages=3 * 7 + 8
    )
    assert held.total == 28 + 100 + 90 + 80 + 70 + 29


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_peak_of_microbatches_is_what_a_timeline_says(case: Case) -> None:
    for size, program in accepted(case, [(1, 1, 1), (3, 2, 3), (4, 3, 8)]):
        run = simulate(program, size[2])
        stages = len(run.stages)
        sizes = [Sizes(saved=1, before_r=1, after_i=1, version=1)] * stages
        bounds = {(a, b): 2 for a in range(stages) for b in range(stages)}
        found = peaks(over_time(run, sizes, bounds))
        assert [one.parts.activations for one in found] == run.activations
        assert [one.parts.versions + 1 for one in found] == run.versions


def test_few_counts_decide_the_peak():
    run = simulate(lower(one_f_one_b(4, 1, 16)), 16)
    bounds = {(a, b): 2 for a in range(4) for b in range(4)}
    for stage, row in enumerate(run.rows):
        every = [of[stage] for _, of in counts(row.actions, bounds)]
        few = most(every)
        assert len(few) < 12
        for weight in (0, 1, 5, 100):
            sizes = Sizes(
                saved=weight,
                gradient=7,
                wire={(stage, stage + 1): 3, (stage + 1, stage): 2},
                raw={(stage, stage + 1): 4, (stage + 1, stage): 5, (stage - 1, stage): 6},
            )
            of_all, of_few = (peak([in_bytes(one, sizes) for one in some]).total for some in (every, few))
            assert of_all == of_few


def test_moments_are_at_the_ends_of_the_actions():
    run = simulate(lower(gpipe(2, 1, 2)), 2)
    moments = over_time(run, [Sizes(saved=1), Sizes(saved=2)], BOUNDS)
    first = [(moment.time, moment.total) for moment in moments[0] if str(moment.action)[1] in "FB"]
    assert first == [(1, 1), (2, 2), (7, 1), (9, 0)]
