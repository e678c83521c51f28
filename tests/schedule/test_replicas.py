"""Replicas of stages: every schedule, over any replicas, is sound and does the same work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import Action, Op, ScheduleError, homes, parse_program, ranks_of, reads_old
from pipetrain.schedule.check import check
from pipetrain.schedule.fixed_program import FixedProgram
from pipetrain.schedule.lower import edges, links, lower
from pipetrain.schedule.programs import one_f_one_b, pipedream
from pipetrain.schedule.programs.order import in_flight
from pipetrain.schedule.replicas import spread_program
from pipetrain.schedule.simulate import simulate, unit_cost
from pipetrain.schedule.transforms import joined, with_norms, with_recompute
from tests.schedule.cases import CASES, Case, places_of

PLACES = {
    str(replicas): places_of(replicas) for replicas in ([2, 2], [3, 1], [1, 3], [2, 1, 2], [4], [1, 4, 1])
}
PLACES |= {"shared": [(0, 1), (0, 1)], "overlap": [(0, 1), (1, 2)], "both on three": [(0, 1, 2), (0, 1, 2)]}


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from([case for case in CASES if case.name != "fbp"]),  # whose order is no list
    places=st.sampled_from(list(PLACES.values())),
    size=st.tuples(st.integers(1, 3), st.integers(1, 9)),
    norms=st.booleans(),
    recompute=st.booleans(),
)
def test_every_schedule_over_replicas_is_sound_and_does_the_same_work(
    case: Case, places: list[tuple[int, ...]], size: tuple[int, int], norms: bool, recompute: bool
) -> None:
    if max(map(len, places)) > size[1]:
        return
    try:
        whole = case.schedule(len(places), *size)
        program = spread_program(case.schedule, places, *size)
    except ScheduleError:
        return
    norms &= not reads_old(program, size[1])  # else updates may wait for what comes behind them
    program = joined(with_recompute(program, {0}) if recompute else program)
    program = with_norms(program) if norms else program
    lowered = lower(program)
    check(lowered, *size, norms=norms)
    run = simulate(lowered, size[1], buffer_size=1)
    again = sum(action.op is Op.R for actions in program for action in actions)
    assert sum(run.busy) - again == sum(simulate(lower(whole), size[1]).busy)
    period = size[0] * size[1] if reads_old(program, size[1]) else size[1]
    ranks = ranks_of(program)
    assert homes(program) == {
        (stage, mb): ranks[stage][mb % period % len(ranks[stage])]
        for stage in range(len(ranks))
        for mb in range(size[0] * size[1])
    }


def test_replicas_of_1f1b_as_a_picture() -> None:
    """Three ranks for the first place: the batch's microbatches in turn, as many open as keep all busy."""
    assert spread_program(one_f_one_b, [(0, 1), (2,)], 1, 4) == parse_program(
        """
        0F0@0 0F2@0 0B0@0 0B2@0 0STEP@1
        0F1@0 0F3@0 0B1@0 0B3@0 0STEP@1
        1F0@0 1B0@0 1F1@0 1B1@0 1F2@0 1B2@0 1F3@0 1B3@0 1STEP@1
        """
    )


def test_both_stages_on_the_same_ranks_exchange_nothing() -> None:
    program = spread_program(one_f_one_b, [(0, 1), (0, 1)], 1, 4)
    assert ranks_of(program) == [(0, 1), (0, 1)]
    assert edges(program) == []


def test_links_join_the_ranks_that_exchange_microbatches() -> None:
    assert links([(0, 1), (1, 0)], places_of([2, 1])) == [
        ((0, 1), (0, 2)),
        ((0, 1), (1, 2)),
        ((1, 0), (2, 0)),
        ((1, 0), (2, 1)),
    ]
    assert links([(0, 1)], places_of([2, 2])) == [((0, 1), (0, 2)), ((0, 1), (1, 3))]
    assert [len(links([(0, 1)], places_of(of))) for of in ([3, 2], [4, 2], [3, 1])] == [6, 4, 3]


def test_so_many_microbatches_are_open_as_keep_all_replicas_busy() -> None:
    assert in_flight([1, 1, 1]) == [3, 2, 1]
    assert in_flight([2, 1]) == [4, 1]
    assert in_flight([15, 1]) == [30, 1]
    assert in_flight([1, 4, 1]) == [8, 8, 1]


@pytest.mark.parametrize("schedule", [one_f_one_b, pipedream])
def test_a_stage_three_times_as_slow_with_three_replicas_is_as_fast_as_the_other(schedule) -> None:
    def cost(action: Action) -> float:
        return unit_cost(action) * (3 if action.stage == 1 else 1)

    def makespan(replicas: list[int]) -> float:
        program = lower(spread_program(schedule, places_of(replicas), 4, 24))
        return simulate(program, 24, cost=cost).makespan

    assert makespan([1, 1]) / makespan([1, 3]) > 2.6


def test_microbatches_count_within_a_batch_where_a_schedule_flushes_and_within_the_window_where_not() -> None:
    assert homes(spread_program(one_f_one_b, places_of([2, 1]), 2, 3))[0, 3] == 0
    assert homes(spread_program(pipedream, places_of([2, 1]), 2, 3))[0, 3] == 1


def test_the_program_of_a_file_keeps_its_order_and_its_microbatches() -> None:
    program = one_f_one_b(2, 1, 4)
    over = spread_program(FixedProgram("mine.txt", program), [(0, 1), (2,)], 1, 4)
    assert [action.mb for action in over[1] if action.op is Op.F] == [1, 3]
    assert over[2] == program[1]
