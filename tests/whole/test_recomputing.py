"""Recomputation in the program: where an R stands, and that it runs while a gradient is awaited."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import Op, parse_program, ranks_of, shortened
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import lower
from pipetrain.schedule.policy import ForwardBackward, play
from pipetrain.schedule.programs import layer_dist, one_f_one_b
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.transforms import joined, with_recompute, without_first_recompute
from tests.schedule.cases import CASES, Case


def test_a_forward_is_recomputed_directly_before_its_backward_unless_they_touch() -> None:
    program = parse_program(
        """
        0F0@0 0F1@0 0B0@0 0B1@0 0STEP@1 0F2@1 0F3@1 0B2@1 0B3@1 0STEP@2
        1F0@0 1B0@0 1F1@0 1B1@0 1STEP@1 1F2@1 1B2@1 1F3@1 1B3@1 1STEP@2
        """
    )
    assert with_recompute(program, [0, 1]) == parse_program(
        """
        0F0@0 0F1@0 0R0@0 0B0@0 0R1@0 0B1@0 0STEP@1 0F2@1 0F3@1 0R2@1 0B2@1 0R3@1 0B3@1 0STEP@2
        1F0@0 1B0@0 1F1@0 1B1@0 1STEP@1 1F2@1 1B2@1 1F3@1 1B3@1 1STEP@2
        """
    )
    assert with_recompute(program, [1]) == program
    assert with_recompute(layer_dist(3, 2, 2), range(3)) == layer_dist(3, 2, 2)


def test_it_stands_before_the_gradient_is_received_and_before_the_first_half_of_a_backward() -> None:
    (first, _) = lower(with_recompute(one_f_one_b(2, 1, 2), range(2)))
    assert " ".join(map(str, first)) == (
        "0F0@0 0SEND_F0 0F1@0 0SEND_F1 0R0@0 0RECV_B0 0B0@0 0R1@0 0RECV_B1 0B1@0 0REDUCE@1 0STEP@1"
    )
    found = with_recompute(parse_program("0F0@0 0F1@0 0I0@0 0W0@0 0I1@0 0W1@0 0STEP@1"), [0])
    assert found == parse_program("0F0@0 0F1@0 0R0@0 0I0@0 0W0@0 0R1@0 0I1@0 0W1@0 0STEP@1")
    assert joined(found) == parse_program("0F0@0 0F1@0 0R0@0 0B0@0 0R1@0 0B1@0 0STEP@1")


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "fbp"], ids=str)
def test_every_schedule_stays_sound_holds_no_more_and_may_end_early(case: Case) -> None:
    for size in ((2, 2, 4), (3, 3, 3)):
        (_, batches, m), program = size, case.schedule(*size)
        again, plain = lower(with_recompute(program, range(len(ranks_of(program))))), lower(program)
        check(again, batches, m)
        held = [(run.activations, run.versions) for run in (simulate(plain, m), simulate(again, m))]
        assert held[0] == held[1]
        short = [shortened(actions, 1, m) for actions in again]
        check(short, 1, m)
        simulate(short, m)
        assert [[a for a in actions if a.op is not Op.R] for actions in again] == plain


@pytest.mark.parametrize("case", CASES, ids=str)
def test_in_every_schedule_the_first_microbatch_of_each_batch_may_be_the_one_that_is_not_run_again(
    case: Case,
) -> None:
    for size in ((2, 2, 4), (3, 3, 3)):
        (_, batches, m), program = size, case.schedule(*size)
        again = with_recompute(program, range(len(ranks_of(program))))
        lowered = lower(without_first_recompute(again, range(len(ranks_of(program))), m))
        check(lowered, batches, m)
        simulate(lowered, m)
        wanted = {(a.stage, a.mb) for actions in again for a in actions if a.op is Op.R and a.mb % m > 0}
        assert {(a.stage, a.mb) for actions in lowered for a in actions if a.op is Op.R} == wanted
    assert without_first_recompute(again, [], 1) == again


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 8), st.integers(2, 16))
def test_1f1b_pays_for_what_its_waits_do_not_cover(stages: int, microbatches: int) -> None:
    """Directly before the receive it costs m - 2 forwards."""
    program = one_f_one_b(stages, 1, microbatches)
    plain = simulate(lower(program), microbatches).makespan
    assert plain == 3 * (microbatches + stages - 1)
    again = lower(with_recompute(program, range(stages)))
    assert simulate(again, microbatches).makespan == plain + microbatches - 2


# Policies


def test_a_policy_recomputes_while_it_would_wait() -> None:
    program = ForwardBackward(3)(2, 1, 4, recompute=[0, 1])
    assert [" ".join(f"{a.op}{a.mb}" for a in actions) for actions in program] == [
        "F0 F1 F2 R0 B0 F3 R1 B1 R2 B2 R3 B3 STEP0",
        "F0 B0 F1 B1 F2 B2 F3 B3 STEP0",
    ]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    *(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4)),
    *(st.integers(1, 6), st.integers(1, 3), st.integers(0, 1000)),
)
def test_a_policy_is_sound_whatever_the_timing(ranks, batches, m, in_flight, buffer_size, seed) -> None:
    draw = random.Random(seed)
    costs = {(stage, op): draw.uniform(0.1, 3) for stage in range(ranks) for op in Op}
    policy, even = ForwardBackward(in_flight), range(0, ranks, 2)
    timing = {"buffer_size": buffer_size, "cost": lambda a: costs[a.stage, a.op]}
    program = play(policy, ranks, batches, m, **timing, recompute=even)
    again = lower(program)
    check(again, batches, m)
    run = simulate(again, m, buffer_size=buffer_size)
    for stage in range(ranks):
        most = policy.bounds(stage, ranks, batches, m).activations
        assert sum(a.op is Op.R for a in program[stage]) == batches * m * (stage in even and most > 1)
        assert run.activations[stage] <= most
