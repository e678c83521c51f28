from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import COMMUNICATION, SENDS, Action, Edge, Op, Program, parse_program
from pipetrain.schedule.lower import compute_only, lower
from pipetrain.schedule.programs import gpipe, one_f_one_b
from pipetrain.schedule.simulate import Cost, Deadlock, simulate
from pipetrain.schedule.timeline import Timeline
from tests.schedule.cases import CASES, Case, accepted, replicated


def times(result: Timeline, rank: int) -> list[str]:
    return [f"{action}: {start:g}-{end:g}" for action, start, end, *_ in result.rows[rank].spans]


def test_1f1b_as_drawn_in_every_paper() -> None:
    result = simulate(lower(one_f_one_b(2, 1, 2)), 2)
    assert " ".join(times(result, 0)) == (
        "0F0@0: 0-1 0SEND_F0: 1-1 0F1@0: 1-2 0SEND_F1: 2-2 0RECV_B0: 2-4 0B0@0: 4-6 0RECV_B1: 6-7 0B1@0: 7-9 "
        "0REDUCE@1: 9-9 0STEP@1: 9-9"
    )
    assert (result.makespan, result.busy) == (9, [6, 6])
    assert result.bubble == pytest.approx(1 / 3)
    assert result.bubble_per_rank == pytest.approx([1 / 3, 1 / 3])
    assert (result.activations, result.versions, result.staleness) == ([2, 1], [1, 1], [0, 0])


def test_ranks_that_wait_let_the_others_gain() -> None:
    """In 3 of 1F1B's 9 units both ranks compute, in the others one."""
    result = simulate(lower(one_f_one_b(2, 1, 2)), 2)
    assert (result.makespan_shared(1.0), sum(result.busy)) == (9, 12)
    assert result.makespan_shared(0.75) == 3 + 0.75 * 6
    assert simulate(lower(one_f_one_b(1, 1, 2)), 2).makespan_shared(0.5) == 6


def slow_receiver(action: Action) -> float:
    if action.op is Op.SEND_F:
        return 2
    return {0: 1, 1: 5}[action.stage] if action.op is Op.F else 0


@pytest.mark.parametrize(
    ("buffer_size", "sends", "receives"),
    [
        # SEND 1 waits for message 0 (3), SEND 2 for message 1 (5); message 2 leaves when receive 2 is posted
        # (RECV 1 is done at 8), so SEND 3 waits until 10.
        (1, ["1-1", "2-3", "4-5", "6-10"], ["0-3", "8-8", "13-13", "18-18"]),
        # Two may be under way: SEND 2 needs message 0 alone (3), SEND 3 message 1 (4).
        (2, ["1-1", "2-2", "3-3", "4-4"], ["0-3", "8-8", "13-13", "18-18"]),
    ],
)
def test_a_channel_bounds_both_its_ends(buffer_size: int, sends: list[str], receives: list[str]) -> None:
    program = lower(parse_program("0F0@0 0F1@0 0F2@0 0F3@0\n1F0@0 1F1@0 1F2@0 1F3@0"))
    result = simulate(program, 4, buffer_size=buffer_size, cost=slow_receiver)
    assert [line.split(": ")[1] for line in times(result, 0) if "SEND" in line] == sends
    assert [line.split(": ")[1] for line in times(result, 1) if "RECV" in line] == receives
    assert result.makespan == 23


# Rank 0 hands on four microbatches of stage 0 before it turns to stage 2, which rank 1 wants sooner.
EAGER = """
0F0@0 0F1@0 0F2@0 0F3@0 2F0@0 2F1@0 2F2@0 2F3@0
1F0@0 3F0@0 1F1@0 3F1@0 1F2@0 3F2@0 1F3@0 3F3@0
"""


@pytest.mark.parametrize(
    ("text", "buffer_size", "blocked"),
    [
        (
            EAGER,
            1,
            "rank 0 at 0SEND_F3 waits for rank 1 to do 1RECV_F1; "
            "rank 1 at 3RECV_F0 waits for rank 0 to do 2SEND_F0",
        ),
        ("1F0@0 0F0@0", 99, "rank 0 at 1F0@0 waits for F of microbatch 0 at stage 0, which its own list"),
        ("0F0@0 0B0@0\n1F0@0", 99, "rank 0 at 0RECV_B0 waits for rank 1, which does nothing more on that"),
    ],
)
def test_a_deadlock_names_who_waits_for_what(text: str, buffer_size: int, blocked: str) -> None:
    with pytest.raises(Deadlock) as caught:
        simulate(lower(parse_program(text)), 4, buffer_size=buffer_size)
    assert str(caught.value).startswith(f"deadlock with buffer_size={buffer_size}: {blocked}")
    assert simulate(lower(parse_program(EAGER)), 4, buffer_size=2).makespan == 15


def reference_ends(program: Program, buffer_size: int, cost: Cost) -> list[list[float]]:
    """The laws of simulate's channels, one by one and from the end backwards: slow, and hard to get wrong."""
    sends: dict[Edge, list[tuple[int, int]]] = {}
    recvs: dict[Edge, list[tuple[int, int]]] = {}
    place = {}
    for rank, actions in enumerate(program):
        for i, a in enumerate(actions):
            if a.op in COMMUNICATION:
                uses = (sends if a.op in SENDS else recvs).setdefault(a.edge, [])
                place[rank, i] = (a.edge, len(uses))
                uses.append((rank, i))

    @cache
    def arrival(edge: Edge, k: int) -> float:
        rank, i = sends[edge][k]
        posted = end(*recvs[edge][k - buffer_size]) if k >= buffer_size else 0.0
        return max(end(rank, i), posted) + cost(program[rank][i])

    @cache
    def end(rank: int, i: int) -> float:
        if i < 0:
            return 0.0
        action, before = program[rank][i], end(rank, i - 1)
        if action.op not in COMMUNICATION:
            return before + cost(action)
        edge, k = place[rank, i]
        if action.op in SENDS:
            return max(before, arrival(edge, k - buffer_size)) if k >= buffer_size else before
        return max(before, arrival(edge, k)) + cost(action)

    return [[end(rank, i) for i in range(len(actions))] for rank, actions in enumerate(program)]


@settings(max_examples=60, deadline=None)
@given(
    case=st.sampled_from(CASES),
    size=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)),
    buffer_size=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_every_time_is_as_the_laws_say_whatever_things_cost(
    case: Case, size: tuple[int, int, int], buffer_size: int, seed: int
) -> None:
    def cost(action: Action) -> float:
        return random.Random(f"{seed} {action}").choice([0, 1, 1, 2, 5])

    for _, program in accepted(case, [size]):
        result = simulate(program, size[2], buffer_size=buffer_size, cost=cost)
        ends = [[span.end for span in row.spans] for row in result.rows]
        assert ends == reference_ends(program, buffer_size, cost)
        assert [row.actions for row in result.rows] == program
        assert result.makespan == max(map(max, ends))


# Replicas


def test_replicas_end_their_reduce_together() -> None:
    def cost(action: Action) -> float:
        return {Op.F: 1.0 + 3 * (action.mb == 1), Op.B: 2.0, Op.REDUCE: 0.5}.get(action.op, 0.0)

    result = simulate(lower(replicated(gpipe(1, 1, 2), [2], 1, 2)), 2, cost=cost)
    first, second = (
        [(span.start, span.end, span.waited) for span in row.spans if span.action.op is Op.REDUCE]
        for row in result.rows
    )
    assert (first, second) == ([(3.0, 6.5, 3.0)], [(6.0, 6.5, 0.0)])
    assert result.busy == [3.5, 6.5]


@settings(max_examples=60, deadline=None)
@given(
    case=st.sampled_from([case for case in CASES if case.virtual == 1]),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5)),
    replicas=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    buffer_size=st.integers(1, 2),
)
def test_replicas_never_deadlock_and_do_all_the_work(
    case: Case, size: tuple[int, int, int], replicas: list[int], buffer_size: int
) -> None:
    for _, program in accepted(case, [size]):
        spread = lower(replicated(compute_only(program), replicas[: size[0]], *size[1:]))
        result = simulate(spread, size[2], buffer_size=buffer_size)
        assert sum(result.busy) == sum(simulate(program, size[2]).busy)
        assert [row.actions for row in result.rows] == spread
