"""What a stage holds, action by action, counted by hand; and the same in bytes."""

from __future__ import annotations

import pytest

from pipetrain.schedule.actions import parse_program
from pipetrain.schedule.lower import lower
from pipetrain.schedule.memory import PARTS, Items, counts, held_bytes, in_parts, over_time, peaks, totals
from pipetrain.schedule.programs import gpipe, pipedream
from pipetrain.schedule.simulate import simulate
from tests.schedule.cases import CASES, NAMES, Case, accepted

STATES = ("saved", "before_r", "after_i")
MESSAGES = ("inputs", "grads", "arrived", "outputs", "returned")


def story(program: str, rank: int, stage: int, copied=()) -> dict[str, tuple[dict[str, int], ...]]:
    """Return by action what a stage holds after it: microbatches in their states, and messages."""
    actions = lower(parse_program(program))[rank]
    after = zip(actions, counts(actions, (2, 2), copied), strict=True)
    return {
        str(action): tuple(
            {k: n for k in keys if (n := getattr(now[stage], k))} for keys in (STATES, MESSAGES)
        )
        for action, now in after
    }


WHOLE = "0F0@0 0F1@0 0F2@0 0B0@0 0B1@0 0B2@0 0STEP@1\n1F0@0 1B0@0 1F1@0 1B1@0 1F2@0 1B2@0 1STEP@1"


def test_a_first_stage_posts_two_receives_ahead_and_has_its_outputs_saved():
    assert story(WHOLE, 0, 0) == {
        "0F0@0": ({"saved": 1}, {"grads": 2}),
        "0SEND_F0": ({"saved": 1}, {"grads": 2}),  # what is sent is saved anyway
        "0F1@0": ({"saved": 2}, {"grads": 2}),
        "0SEND_F1": ({"saved": 2}, {"grads": 2}),
        "0F2@0": ({"saved": 3}, {"grads": 2}),
        "0SEND_F2": ({"saved": 3}, {"grads": 2}),
        "0RECV_B0": ({"saved": 3}, {"grads": 2, "arrived": 1}),  # and the next is posted
        "0B0@0": ({"saved": 2}, {"grads": 2}),
        "0RECV_B1": ({"saved": 2}, {"grads": 1, "arrived": 1}),
        "0B1@0": ({"saved": 1}, {"grads": 1}),
        "0RECV_B2": ({"saved": 1}, {"arrived": 1}),
        "0B2@0": ({}, {}),
        "0REDUCE@1": ({}, {}),
        "0STEP@1": ({}, {}),
    }


def test_a_last_stage_keeps_the_gradients_that_it_has_sent_and_a_codec_s_outputs_are_copies():
    told = story(WHOLE, 1, 1)
    assert told["1F0@0"] == ({"saved": 1}, {"inputs": 2})
    assert told["1SEND_B0"] == ({}, {"inputs": 2, "returned": 1})
    assert told["1F1@0"] == ({"saved": 1}, {"inputs": 1, "returned": 1})
    assert told["1B2@0"] == ({}, {"returned": 3})  # of which one is still to be sent
    assert told["1SEND_B2"] == ({}, {"returned": 2})
    assert story(WHOLE, 0, 0, copied=[0])["0SEND_F2"] == ({"saved": 3}, {"grads": 2, "outputs": 2})


def test_the_halves_of_a_backward_and_a_recomputation():
    program = "0F0@0 0F1@0 0R0@0 0I0@0 0I1@0 0W0@0 0W1@0 0STEP@1"
    assert [state for state, _ in story(program, 0, 0).values()] == [
        *({"before_r": 1}, {"saved": 1, "before_r": 1}, {"saved": 2}, {"saved": 1, "after_i": 1}),
        *({"after_i": 2}, {"after_i": 1}, {}, {}, {}),
    ]


def test_receives_of_each_direction_are_posted_as_far_ahead_as_its_own_bound():
    actions = lower(parse_program(WHOLE))
    for bounds in ((3, 1), (1, 3)):
        most = [
            [max(getattr(now[stage], name) for now in counts(actions[stage], bounds)) for name in MESSAGES]
            for stage in (0, 1)
        ]
        up, down = bounds
        assert most == [[0, down, 1, 0, 0], [up, 0, 0, 0, min(3, down + 1)]]  # and one made just now


def test_gradients_are_held_until_their_step_and_the_storage_of_versions_for_good():
    actions = lower(pipedream(2, 3, 1))[0]
    held = {str(a): now[0] for a, now in zip(actions, counts(actions, (2, 2)), strict=True)}
    assert {one.versions for one in held.values()} == {1}
    assert [held[name].gradients for name in ("0F0@0", "0B0@0", "0STEP@1", "0B1@0")] == [0, 1, 0, 1]
    assert not any(one.adding for one in held.values())  # a batch's first microbatch is added to nothing
    several = lower(gpipe(2, 1, 2))[0]
    adding = {str(a): now[0].adding for a, now in zip(several, counts(several, (2, 2)), strict=True)}
    assert [name for name, some in adding.items() if some] == ["0B1@0"]
    tied = lower(parse_program("0F0@0 0B0@0 0TIE@1 0STEP@1"))[0]
    assert [now[0].tied for now in counts(tied, (2, 2))][-3:] == [0, 1, 0]
    late = lower(parse_program("0F0@0 0F1@0 0B0@0 0B1@0 0F2@0 0STEP@1 0F3@1 0B2@0 0B3@1 0STEP@2"))[0]
    apart = {str(a): now[0].apart for a, now in zip(late, counts(late, (2, 2)), strict=True)}
    assert [name for name, some in apart.items() if some] == ["0B3@1"]


def test_a_replica_holds_the_sum_beside_its_gradient_until_it_is_heard_and_a_stage_what_its_fullest_does():
    program = (
        "0F0@0 0F2@0 0B0@0 0B2@0 0STEP@1\n0F1@0 0B1@0 0STEP@1\n1F0@0 1B0@0 1F1@0 1B1@0 1F2@0 1B2@0 1STEP@1"
    )
    lowered = lower(parse_program(program))
    moments = counts(lowered[0], (2, 2), (), [0])
    now = [(str(action), at[0].reduced) for action, at in zip(lowered[0], moments, strict=True)]
    assert now[-3:] == [("0B2@0", 1), ("0REDUCE@1", 1), ("0STEP@1", 0)]
    assert now[-4][1] == 0  # before the last backward
    memory = over_time(simulate(lowered, 3), [Items(saved=3, gradients=2, reduced=2)] * 2, (2, 2))
    assert [max(totals(of_rank, ["gradients"])) for of_rank in memory] == [4, 4, 2]  # one rank sums nothing
    assert [max(totals(of_rank)) for of_rank in memory] == [6, 4, 5]
    assert [of["total"] for of in peaks(memory)] == [6, 5]


def test_bytes_are_counts_times_sizes():
    numbers = Items(
        2, 1, 1, 1, 1, 1, 1, inputs=2, grads=1, arrived=1, outputs=0, returned=3, tied=1, adding=1, reduced=1
    )
    numbers = numbers._replace(apart=1)
    sizes = Items(10, 3, 5, 100, 90, 80, 70, inputs=7, grads=8, arrived=9, outputs=1000, returned=2, tied=4)
    sizes = sizes._replace(adding=6, reduced=5, apart=3)
    held = in_parts(numbers, sizes)
    assert held == dict(zip(PARTS, (28, 100, 90, 80 + 6 + 5 + 3, 70, 2 * 7 + 8 + 9 + 3 * 2 + 4), strict=True))
    assert held_bytes(numbers, sizes) == sum(held.values())


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_peak_of_microbatches_is_what_a_timeline_says(case: Case) -> None:
    for size, program in accepted(case, [(1, 1, 1), (3, 2, 3), (4, 3, 8)]):
        run = simulate(program, size[2])
        sizes = [Items(saved=1, before_r=1, after_i=1, versions=1)] * len(run.stages)
        found = peaks(over_time(run, sizes, (2, 2)))
        assert [one["activations"] for one in found] == run.activations
        assert [one["versions"] + 1 for one in found] == run.versions


def test_a_rank_holds_what_its_stages_do_after_each_action():
    run = simulate(lower(gpipe(2, 1, 2)), 2)
    memory = over_time(run, [Items(saved=1, weights=10), Items(saved=2)], (2, 2))
    assert [totals(of_rank, ["activations"]) for of_rank in memory] == [
        [1, 1, 2, 2, 2, 1, 1, 0, 0, 0],
        [0, 2, 2, 4, 2, 2, 0, 0, 0, 0],
    ]
    assert totals(memory[0])[0] == 11
    assert peaks(memory)[0]["total"] == 12
