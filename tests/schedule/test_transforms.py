"""Clipping by the norm of a model, in the program: what waits for what, and what it costs; joined halves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import Action, Op, Program, ScheduleError, parse_program
from pipetrain.schedule.asynchronous import AsynchronousV
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import (
    gpipe,
    interleaved_1f1b,
    layer_dist,
    one_f_one_b,
    pipedream,
    v_min,
    zb_h1,
    zb_h2,
)
from pipetrain.schedule.simulate import Deadlock, simulate
from pipetrain.schedule.timeline import Costs
from pipetrain.schedule.transforms import joined, with_delays, with_norms
from tests.schedule.cases import CASES
from tests.schedule.test_check import refused


def test_a_prediction_is_as_far_ahead_as_a_gradient_is_late_and_a_step_as_late_as_the_latest() -> None:
    """On the first of two stages, the two microbatches of the second batch read two versions."""
    program = pipedream(2, 2, 2)
    assert with_delays(program, 2, predicts=True, rates=True) == parse_program(
        "0F0@0 0F1@0 0B0@0 0F2@0+1 0B1@0 0STEP@1 0F3@1 0B2@0+1 0B3@1 0STEP@2+1\n"
        "1F0@0 1B0@0 1F1@0 1B1@0 1STEP@1 1F2@1 1B2@1 1F3@1 1B3@1 1STEP@2"
    )
    assert with_delays(program, 2, predicts=False, rates=False) == program


def test_a_schedule_may_say_itself_how_far_ahead_it_reads() -> None:
    program = parse_program("0F0@0 0F1@0 0F2@0+1 0B0@0 0STEP@1 0B1@0 0STEP@2 0B2@0+1 0STEP@3")
    late = parse_program("0F0@0 0F1@0+1 0F2@0+1 0B0@0 0STEP@1 0B1@0+1 0STEP@2 0B2@0+1 0STEP@3")
    assert with_delays(program, 1, predicts=True, rates=False) == late
    check(lower(late), 3, 1)


FLUSH = (layer_dist, gpipe, one_f_one_b, interleaved_1f1b)


def clipped(program: Program) -> Program:
    return lower(with_norms(program))


def test_a_norm_follows_the_last_backward_and_a_step_comes_as_late_as_it_may() -> None:
    program = parse_program("0F0@0 0B0@0 0STEP@1 0F1@0 0F2@1 0B1@0 0STEP@2 0B2@1 0STEP@3")
    assert with_norms(program) == parse_program(
        "0F0@0 0B0@0 0NORM@1 0F1@0 0STEP@1 0F2@1 0B1@0 0NORM@2 0STEP@2 0B2@1 0NORM@3 0STEP@3"
    )
    assert clipped(one_f_one_b(1, 1, 1)) == parse_program("0F0@0 0B0@0 0REDUCE@1 0NORM@1 0STEP@1")
    halves = parse_program("0F0@0 0F1@0 0I0@0 0W0@0 0STEP@1 0I1@0 0W1@0 0STEP@2")
    assert with_norms(halves) == parse_program(
        "0F0@0 0F1@0 0I0@0 0W0@0 0NORM@1 0I1@0 0STEP@1 0W1@0 0NORM@2 0STEP@2"
    )


sizes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 6))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from((*FLUSH, zb_h1, v_min)), sizes, st.integers(1, 3))
def test_a_flush_schedule_waits_for_nothing_that_it_would_not_wait_for_anyway(
    schedule, size, buffer_size
) -> None:
    program = schedule(*size)
    sound = clipped(program)
    check(sound, *size[1:], norms=True)
    plain = simulate(lower(program), size[2], buffer_size=buffer_size)
    run = simulate(sound, size[2], buffer_size=buffer_size)
    assert (run.makespan, run.activations) == (plain.makespan, plain.activations)
    told = {a: end for row in run.rows for a, _, end, *_ in row.spans if a.op is Op.NORM}
    for row in run.rows:
        for action, start, _, waited, *_ in row.spans:
            if action.op is Op.STEP:
                norms = [end for norm, end in told.items() if norm.version == action.version]
                assert len(norms) == len({a.stage for actions in program for a in actions})
                assert start + waited >= max(norms)


def test_updates_that_a_rank_makes_before_other_stages_have_their_gradients_block() -> None:
    with pytest.raises(Deadlock, match="waits for the norm of stage"):
        simulate(clipped(AsynchronousV()(3, 4, 4)), 4)


def test_a_norm_that_travels_holds_up_every_step() -> None:
    def cost(action: Action) -> float:
        return {Op.F: 1.0, Op.B: 2.0, Op.NORM: 0.5}.get(action.op, 0.0)

    run = simulate(clipped(gpipe(2, 2, 1)), 1, cost=cost)
    assert run.makespan == simulate(lower(gpipe(2, 2, 1)), 1, cost=cost).makespan + 2 * 0.5
    assert [span.waited for row in run.rows for span in row.spans if span.action.op is Op.STEP] == [
        *(0.5, 0.5),
        *(2.5, 2.5),
    ]


def test_norms_that_are_not_asked_for_are_refused_and_missing_ones_too() -> None:
    program = pipedream(2, 2, 1)
    assert refused(clipped(program), 2, 1)
    with pytest.raises(
        ScheduleError, match=r"rank 0 has 0STEP@1 where 0NORM@1 belongs.*after with_norms\(\)"
    ):
        check(lower(program), 2, 1, norms=True)


# Halves of a backward


def test_halves_between_which_nothing_is_sent_are_joined() -> None:
    program = parse_program(
        """
        0F0@0 3F0@0 3I0@0 3W0@0 0I0@0 0W0@0 0STEP@1 3STEP@1
        1F0@0 2F0@0 2I0@0 2W0@0 1I0@0 1W0@0 1STEP@1 2STEP@1
        """
    )
    assert joined(program) == parse_program(
        """
        0F0@0 3F0@0 3I0@0 3W0@0 0B0@0 0STEP@1 3STEP@1
        1F0@0 2F0@0 2B0@0 1I0@0 1W0@0 1STEP@1 2STEP@1
        """
    )
    # With a skip from stage 0 straight to stage 2, whose gradient goes to another rank.
    assert joined(program, [(0, 1), (0, 2), (1, 2), (2, 3)])[1] == program[1]
    assert joined(program, [(0, 1), (1, 2), (0, 3)])[0][2] == parse_program("3B0@0")[0][0]
    apart = parse_program("0F0@0 0F1@0 0I0@0 0I1@0 0W0@0 0W1@0 0STEP@1")
    assert joined(apart) == apart  # halves of other microbatches


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.sampled_from(CASES), sizes, st.integers(1, 2), st.sampled_from([(1.0, 1.0), (1.2, 0.8), (0.8, 1.2)])
)
def test_joining_halves_changes_no_time_and_nothing_that_is_held(case, size, buffer_size, halves) -> None:
    """Whatever I and W take, if a B takes as long as both; and the halves of stage 0 are all joined."""
    program = case.schedule(*size) if case.name != "pipedream_2bw" else one_f_one_b(*size)
    i, w = halves
    cost = Costs({(s, op): t for s in range(8) for op, t in ((Op.F, 1), (Op.B, i + w), (Op.I, i), (Op.W, w))})
    split, whole = lower(program), lower(joined(program))
    check(whole, *size[1:])
    before, after = (simulate(p, size[2], buffer_size=buffer_size, cost=cost) for p in (split, whole))
    assert after.makespan == pytest.approx(before.makespan)
    assert (after.activations, after.versions) == (before.activations, before.versions)
    assert not any((action.stage, action.op) == (0, Op.I) for action in whole[0])


def test_clipping_over_the_model_takes_what_a_window_of_several_batches_gains() -> None:
    """A step that waits for all stages cannot come before the drain."""
    taken = {}
    for schedule in (zb_h1, zb_h2):
        program = schedule(4, 4, 8)
        taken[schedule.__name__] = [simulate(lower(p), 8).makespan for p in (program, with_norms(program))]
    assert taken == {"zb_h1": [108, 108], "zb_h2": [99, 108]}
