from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import (
    COMMUNICATION,
    UPDATE,
    Action,
    Op,
    Program,
    ScheduleError,
    asks_for,
    compute_program,
    format_program,
    parse_action,
    parse_program,
    ranks_of,
    shortened,
)
from pipetrain.schedule.check import check
from pipetrain.schedule.programs import gpipe
from pipetrain.schedule.simulate import simulate
from tests.schedule.cases import CASES, accepted

NUMBER = st.integers(0, 200)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    op = draw(st.sampled_from(Op))
    mb = 0 if op in UPDATE else draw(NUMBER)
    version = 0 if op in COMMUNICATION else draw(NUMBER)
    delay = 0 if op in COMMUNICATION else draw(NUMBER)
    return Action(draw(NUMBER), op, mb, version, delay=delay)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(actions(), min_size=1, max_size=5), max_size=3))
def test_text_and_program_are_inverse(program: list[list[Action]]) -> None:
    assert parse_program(format_program(program)) == program


def test_a_program_reads_as_text_and_nothing_else_does() -> None:
    assert parse_program("# two ranks\n\n0F3@2  12REDUCE@4 # the first\n2SEND_B30 1SEND_F0>3\n") == [
        [Action(0, Op.F, 3, 2), Action(12, Op.REDUCE, 0, 4)],
        [Action(2, Op.SEND_B, 30), Action(1, Op.SEND_F, 0, peer=3)],
    ]
    assert parse_program("1B3@2+1 0STEP@4+2") == [
        [Action(1, Op.B, 3, 2, delay=1), Action(0, Op.STEP, version=4, delay=2)]
    ]
    for text in (
        "",
        "F3@2",
        "1G3@2",
        "1F3",
        "1F3@2+0",
        "0SEND_F3+1",
        "0STEP1",
        "0STEP1@1",
        "0SEND_F3@1",
        "01F3@2",
    ):
        with pytest.raises(ScheduleError, match="is not an action"):
            parse_action(text)


def test_a_placement_is_read_from_the_lists_or_refused() -> None:
    assert ranks_of(parse_program("0F0@0 2F0@0\n1F0@0")) == [(0,), (1,), (0,)]
    assert ranks_of(parse_program("0F0@0 1F0@0\n1F1@0")) == [(0,), (0, 1)]
    with pytest.raises(ScheduleError, match=r"without a gap; the program has \[0, 2\]"):
        ranks_of(parse_program("0F0@0\n2F0@0"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_window_that_ends_early_is_sound_and_does_not_deadlock(case) -> None:
    for (_, batches, m), program in accepted(case, [(1, 3, 2), (2, 3, 2), (3, 3, 1), (4, 3, 5)]):
        whole = simulate(program, m, buffer_size=1)
        for left in range(1, batches):
            short = [shortened(rank, left, m) for rank in program]
            check(short, left, m)
            run = simulate(short, m, buffer_size=1)
            assert all(map(int.__le__, run.activations, whole.activations))
            assert all(map(int.__le__, run.versions, whole.versions))


def asking(ranks: int, batches: int, microbatches: int, turns: int = 1, *, costs: Any = None) -> Program:
    return [[Action(0, Op.F, turns), Action(0, Op.F, costs)]]


def test_a_schedule_is_given_what_it_names_and_nobody_has_bound() -> None:
    given = {"costs": 7, "buffer_size": 2}
    assert asks_for(asking) == {"turns", "costs"}
    assert asks_for(dict) == asks_for(gpipe) == set()  # the first does not say
    assert [a.mb for a in compute_program(partial(asking, turns=4), 1, 1, 1, **given)[0]] == [4, 7]
    assert [a.mb for a in compute_program(partial(asking, costs=3), 1, 1, 1, **given)[0]] == [1, 3]
