from __future__ import annotations

import pytest

from pipetrain.schedule.actions import COMMUNICATION, Program, ScheduleError, parse_program
from pipetrain.schedule.lower import edges, lower
from pipetrain.schedule.programs import forward_only, gpipe, one_f_one_b
from tests.schedule.cases import replicated

SPLIT = parse_program("0F0@0 0I0@0 0W0@0 0STEP@1\n1F0@0 1I0@0 1W0@0 1STEP@1")
PICTURES: dict[str, Program] = {
    """messages stand where their data is made or needed:
    0F0@0 0SEND_F0 0RECV_B0 0B0@0 0REDUCE@1 0STEP@1
    1RECV_F0 1F0@0 1SEND_F0 1RECV_B0 1B0@0 1SEND_B0 1REDUCE@1 1STEP@1
    2RECV_F0 2F0@0 2B0@0 2SEND_B0 2REDUCE@1 2STEP@1
    """: lower(one_f_one_b(3, 1, 1)),
    """a split backward exchanges around its first half:
    0F0@0 0SEND_F0 0RECV_B0 0I0@0 0W0@0 0REDUCE@1 0STEP@1
    1RECV_F0 1F0@0 1I0@0 1SEND_B0 1W0@0 1REDUCE@1 1STEP@1
    """: lower(SPLIT),
    """neighbours on one rank exchange nothing:
    0F0@0 1F0@0 1B0@0 0B0@0 1REDUCE@1 1STEP@1 0REDUCE@1 0STEP@1
    """: lower(parse_program("0F0@0 1F0@0 1B0@0 0B0@0 1STEP@1 0STEP@1")),
    """a skip travels straight from the stage that makes it to the one that uses it:
    0F0@0 0SEND_F0 0SEND_F0>2 0RECV_B0 0RECV_B0>2 0B0@0 0REDUCE@1 0STEP@1
    1RECV_F0 1F0@0 1SEND_F0 1RECV_B0 1B0@0 1SEND_B0 1REDUCE@1 1STEP@1
    2RECV_F0>0 2RECV_F0 2F0@0 2B0@0 2SEND_B0 2SEND_B0>0 2REDUCE@1 2STEP@1
    """: lower(one_f_one_b(3, 1, 1), [(0, 1), (1, 2), (0, 2)]),
    """replicas share the microbatches and reduce before each step:
    0F0@0 0SEND_F0 0RECV_B0 0B0@0 0REDUCE@1 0STEP@1
    0F1@0 0SEND_F1 0RECV_B1 0B1@0 0REDUCE@1 0STEP@1
    1RECV_F0 1F0@0 1B0@0 1SEND_B0 1RECV_F1 1F1@0 1B1@0 1SEND_B1 1REDUCE@1 1STEP@1
    """: lower(replicated(one_f_one_b(2, 1, 2), [2, 1], 1, 2)),
}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.partition(":")[0])
def test_a_lowered_program(picture: str) -> None:
    assert parse_program(picture.partition(":")[2]) == PICTURES[picture]


def test_what_cannot_be_lowered_is_refused() -> None:
    with pytest.raises(ScheduleError, match="rank 0 has 0RECV_B0: a schedule gives F, B, I, W, R and STEP"):
        lower(parse_program("0F0@0 0RECV_B0 0B0@0 0STEP@1"))
    for route in [(1, 1), (1, 3), (-1, 1)]:
        with pytest.raises(ScheduleError, match=r"route .* must lead from a stage to a later one, of 3"):
            lower(one_f_one_b(3, 1, 1), [route])


def test_edges_between_ranks_come_in_one_order_and_an_evaluation_has_no_way_back() -> None:
    assert edges(lower(gpipe(3, 1, 2))) == edges(gpipe(3, 1, 2)) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert edges(forward_only([(0,), (0,), (1,), (1,), (2,)], 2)) == [(1, 2), (3, 4)]


def test_a_microbatch_that_stays_on_its_rank_is_no_message() -> None:
    """Two ranks that each hold both stages: microbatch k runs on rank k % 2 alone."""
    whole = "0F{0}@0 1F{0}@0 1B{0}@0 0B{0}@0"
    program = parse_program("\n".join(f"{whole.format(mb)} 1STEP@1 0STEP@1" for mb in (0, 1)))
    assert edges(program) == []
    assert not any(a.op in COMMUNICATION for actions in lower(program) for a in actions)
    assert edges(replicated(gpipe(2, 1, 2), [2, 1], 1, 2)) == [(0, 1), (1, 0)]
