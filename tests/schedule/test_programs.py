"""The schedules as pictures, and what holds for all of them; tests/golden has more small programs."""

from __future__ import annotations

import re
from functools import partial
from operator import le
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import SENDS, Action, Op, Program, ScheduleError, parse_program
from pipetrain.schedule.asynchronous import AsynchronousV
from pipetrain.schedule.automatic import ZeroBubbleAuto
from pipetrain.schedule.check import check
from pipetrain.schedule.fixed_program import FixedProgram
from pipetrain.schedule.lower import lower
from pipetrain.schedule.policy import ForwardBackward
from pipetrain.schedule.programs import (
    forward_only,
    gpipe,
    interleaved_1f1b,
    layer_dist,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    ssp,
    zb_h1,
    zb_h2,
)
from pipetrain.schedule.simulate import simulate, unit_cost
from tests.schedule import golden
from tests.schedule.cases import CASES, NAMES

PICTURES: dict[str, Program] = {
    """layer_dist has one microbatch in flight:
    0F0@0 0B0@0 0F1@0 0B1@0 0STEP@1 0F2@1 0B2@1 0F3@1 0B3@1 0STEP@2
    1F0@0 1B0@0 1F1@0 1B1@0 1STEP@1 1F2@1 1B2@1 1F3@1 1B3@1 1STEP@2
    """: layer_dist(2, 2, 2),
    """gpipe runs all forwards first and both ascend:
    0F0@0 0F1@0 0B0@0 0B1@0 0STEP@1 0F2@1 0F3@1 0B2@1 0B3@1 0STEP@2
    1F0@0 1F1@0 1B0@0 1B1@0 1STEP@1 1F2@1 1F3@1 1B2@1 1B3@1 1STEP@2
    """: gpipe(2, 2, 2),
    """1f1b warms up by what lies below:
    0F0@0 0F1@0 0F2@0 0B0@0 0F3@0 0B1@0 0B2@0 0B3@0 0STEP@1
    1F0@0 1F1@0 1B0@0 1F2@0 1B1@0 1F3@0 1B2@0 1B3@0 1STEP@1
    2F0@0 2B0@0 2F1@0 2B1@0 2F2@0 2B2@0 2F3@0 2B3@0 2STEP@1
    """: one_f_one_b(3, 1, 4),
    """interleaved with one stage a rank is 1f1b:
    0F0@0 0F1@0 0B0@0 0F2@0 0B1@0 0B2@0 0STEP@1
    1F0@0 1B0@0 1F1@0 1B1@0 1F2@0 1B2@0 1STEP@1
    """: interleaved_1f1b(2, 1, 3, virtual=1),
    """interleaved takes groups of microbatches through the stages of a rank:
    0F0@0 0F1@0 2F0@0 2F1@0 0F2@0 2B0@0 2B1@0 2F2@0 0B0@0 0B1@0 2B2@0 2STEP@1 0B2@0 0STEP@1
    1F0@0 1F1@0 3F0@0 3B0@0 3F1@0 3B1@0 1F2@0 1B0@0 1B1@0 3F2@0 3B2@0 3STEP@1 1B2@0 1STEP@1
    """: interleaved_1f1b(2, 1, 3),
    """pipedream stashes what its forwards read:
    0F0@0 0F1@0 0B0@0 0STEP@1 0F2@1 0B1@0 0STEP@2 0B2@1 0STEP@3
    1F0@0 1B0@0 1STEP@1 1F1@1 1B1@1 1STEP@2 1F2@2 1B2@2 1STEP@3
    """: pipedream(2, 3, 1),
    """pipedream never flushes, 2 and 3 are of one batch, and read two versions on stage 0:
    0F0@0 0F1@0 0B0@0 0F2@0 0B1@0 0STEP@1 0F3@1 0B2@0 0B3@1 0STEP@2
    1F0@0 1B0@0 1F1@0 1B1@0 1STEP@1 1F2@1 1B2@1 1F3@1 1B3@1 1STEP@2
    """: pipedream(2, 2, 2),
    """2bw reads the version before last on every stage:
    0F0@0 0F1@0 0B0@0 0F2@0 0B1@0 0STEP@1 0F3@0 0B2@0 0F4@1 0B3@0 0STEP@2 0F5@1 0B4@1 0B5@1 0STEP@3
    1F0@0 1B0@0 1F1@0 1B1@0 1STEP@1 1F2@0 1B2@0 1F3@0 1B3@0 1STEP@2 1F4@1 1B4@1 1F5@1 1B5@1 1STEP@3
    """: pipedream_2bw(2, 3, 2),
    """ssp reads at a fixed distance, in all microbatches of a batch the same:
    0F0@0 0F1@0 0B0@0 0F2@0 0B1@0 0STEP@1 0F3@0 0B2@0 0F4@1 0B3@0 0STEP@2 0F5@1 0B4@1 0B5@1 0STEP@3
    1F0@0 1B0@0 1F1@0 1B1@0 1STEP@1 1F2@1 1B2@1 1F3@1 1B3@1 1STEP@2 1F4@2 1B4@2 1F5@2 1B5@2 1STEP@3
    """: ssp(2, 3, 2),
    """ssp with three versions is a microbatch further ahead, and the last stage reads old weights too:
    0F0@0 0F1@0 0F2@0 0B0@0 0STEP@1 0F3@1 0B1@0 0STEP@2 0F4@2 0B2@0 0STEP@3 0B3@1 0STEP@4 0B4@2 0STEP@5
    1F0@0 1B0@0 1STEP@1 1F1@0 1B1@0 1STEP@2 1F2@0 1B2@0 1STEP@3 1F3@1 1B3@1 1STEP@4 1F4@2 1B4@2 1STEP@5
    """: ssp(2, 5, 1, buffer=3),
    """ssp with one version flushes:
    0F0@0 0F1@0 0B0@0 0F2@0 0B1@0 0B2@0 0STEP@1 0F3@1 0F4@1 0B3@1 0F5@1 0B4@1 0B5@1 0STEP@2
    1F0@0 1B0@0 1F1@0 1B1@0 1F2@0 1B2@0 1STEP@1 1F3@1 1B3@1 1F4@1 1B4@1 1F5@1 1B5@1 1STEP@2
    """: ssp(2, 2, 3, buffer=[1, 1]),
    """zb_h1 puts weight gradients off by as many as the stages before:
    0F0@0 0F1@0 0F2@0 0I0@0 0W0@0 0F3@0 0I1@0 0W1@0 0I2@0 0W2@0 0I3@0 0W3@0 0STEP@1
    1F0@0 1F1@0 1I0@0 1F2@0 1I1@0 1W0@0 1F3@0 1I2@0 1W1@0 1I3@0 1W2@0 1W3@0 1STEP@1
    2F0@0 2I0@0 2F1@0 2I1@0 2F2@0 2I2@0 2W0@0 2F3@0 2I3@0 2W1@0 2W2@0 2W3@0 2STEP@1
    """: zb_h1(3, 1, 4),
    """zb_h2 warms up twice as long:
    0F0@0 0F1@0 0F2@0 0I0@0 0W0@0 0F3@0 0I1@0 0W1@0 0I2@0 0W2@0 0I3@0 0W3@0 0STEP@1
    1F0@0 1I0@0 1F1@0 1I1@0 1F2@0 1I2@0 1W0@0 1F3@0 1I3@0 1W1@0 1W2@0 1W3@0 1STEP@1
    """: zb_h2(2, 1, 4),
    """forward_only goes along diagonals:
    0F0@0 0F1@0 0F2@0 2F0@0 2F1@0 2F2@0
    1F0@0 1F1@0 1F2@0 3F0@0 3F1@0 3F2@0
    """: forward_only([(0,), (1,), (0,), (1,)], 3),
}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.partition(":")[0])
def test_a_program(picture: str) -> None:
    assert parse_program(picture.partition(":")[2]) == PICTURES[picture]


def test_the_versions_that_a_ring_of_four_reads_are_those_of_the_record() -> None:
    """OneFlow's own test of its buffer."""
    for actions in ssp(3, 7, 1, buffer=4):
        assert [action.version for action in actions if action.op is Op.F] == [0, 0, 0, 0, 1, 2, 3]


@pytest.mark.parametrize("ranks", range(1, 6))
def test_ssp_s_own_buffer_with_a_microbatch_a_batch_is_pipedream_and_one_version_is_1f1b(ranks: int) -> None:
    assert ssp(ranks, 9, 1) == pipedream(ranks, 9, 1)
    assert ssp(ranks, 3, 4, buffer=1) == one_f_one_b(ranks, 3, 4)


def test_a_larger_buffer_keeps_more_in_flight_while_messages_travel_and_a_smaller_one_less() -> None:
    """On 3 ranks, where a message takes as long as a forward."""

    def cost(action: Action) -> float:
        return 1.0 if action.op in SENDS else unit_cost(action)

    runs = {n: simulate(lower(ssp(3, 40, 1, n, 2)), 1, cost=cost) for n in (2, 3, 5)}
    assert [run.activations for run in runs.values()] == [[2, 2, 1], [3, 2, 1], [5, 3, 1]]
    assert runs[5].makespan < 0.8 * runs[3].makespan < 0.8 * runs[2].makespan


@settings(max_examples=60, deadline=None)
@given(
    buffers=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    size=st.tuples(st.integers(1, 9), st.integers(1, 5)),
    buffer_size=st.integers(1, 3),
)
def test_any_buffers_are_sound_and_bound_what_a_stage_holds(
    buffers: list[int], size: tuple[int, int], buffer_size: int
) -> None:
    program = lower(ssp(len(buffers), *size, buffers, buffer_size))
    check(program, *size)
    run = simulate(program, size[1], buffer_size=buffer_size)
    assert all(map(le, run.versions, buffers))
    assert run.staleness == [min(n, size[0]) - 1 for n in buffers]
    assert all(map(le, run.activations, (n * size[1] for n in buffers)))


@pytest.mark.parametrize(
    ("name", "slots"),
    {"1f1b": 132, "zb_h1": 108, "zb_h2": 99, "zbv": 97.5, "v_half": 114, "v_min": 118}.items(),
)
def test_four_batches_on_four_ranks_take_as_many_slots_as_the_papers_say(name: str, slots: float) -> None:
    """In forwards of a fourth of the model; a window has all four batches, of 8 microbatches."""
    case = CASES[NAMES.index(name)]
    assert simulate(lower(case.schedule(4, 4, 8)), 8).makespan / case.virtual == slots


def test_a_file_of_one_batch_serves_any_number_of_them() -> None:
    one, three = one_f_one_b(2, 1, 4), one_f_one_b(2, 3, 4)
    repeated = FixedProgram("mine.txt", one)(2, 3, 4)
    assert [sorted(map(str, actions)) for actions in repeated] == [sorted(map(str, a)) for a in three]
    whole = FixedProgram("mine.txt", three)
    assert whole(2, 3, 4) == three
    for size in [(3, 3, 4), (2, 2, 4), (2, 6, 4), (2, 3, 2)]:
        with pytest.raises(ScheduleError, match=r"mine.txt is of 2 ranks, 3 batches and 12 .*=4"):
            whole(*size)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(pipedream_2bw, 4, 3, 2), "needs microbatches >= stages; got microbatches=2, stages=4"),
        *(
            (
                partial(ssp, 2, 3, 1, buffer),
                f">= 1, or one for each of 2 stages; got buffer={re.escape(says)}",
            )
            for buffer, says in ((0, "0"), (True, "True"), ([2], "[2]"), ([2, 0], "[2, 0]"), ("much", "much"))
        ),
        (partial(interleaved_1f1b, 2, 1, 2, virtual=0), "needs virtual >= 1; got virtual=0"),
        (partial(forward_only, [(0,), (2,)], 1), "placement must use ranks"),
        (partial(ForwardBackward(True), 2, 1, 1), "fbp needs in_flight >= 1; got in_flight=True"),
        (partial(ZeroBubbleAuto("much"), 2, 1, 4), "zb_auto needs memory >= 1 microbatch; got memory=much"),
        (partial(ZeroBubbleAuto(v="maybe"), 2, 1, 4), "zb_auto needs v to be true or false; got maybe"),
        (partial(AsynchronousV("v_max"), 4, 4, 1), "v_async needs like to be one of auto, v_min, v_half"),
        (partial(AsynchronousV("v_half", 2), 4, 4, 1), "v_async needs memory >= 3.5 microbatches on 4 ranks"),
        (partial(AsynchronousV(memory="much"), 4, 4, 1), "v_async needs memory to be a number or null"),
        *((partial(case.schedule, 2, 1, 0), "needs microbatches >= 1; got microbatches=0") for case in CASES),
    ],
)
def test_what_cannot_be_made_is_refused(make: partial[Program], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make()


@pytest.mark.parametrize("path", sorted(golden.FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_programs_are_as_they_were(path: Path) -> None:
    assert path.read_text() == golden.text_of(path.stem), "if meant: python -m tests.schedule.golden"
