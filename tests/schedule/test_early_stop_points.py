"""Where ranks with replicas look whether a window ends early: whoever looks knows what was decided."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import (
    RECEIVES,
    SENDS,
    UPDATE,
    Action,
    Edge,
    Op,
    Placement,
    Program,
    ScheduleError,
    homes,
    ranks_of,
    reads_old,
    shortened,
)
from pipetrain.schedule.check import check
from pipetrain.schedule.early_stop_points import stop_points_of
from pipetrain.schedule.lower import edges, lower
from pipetrain.schedule.posting_order import Sum, make_posts
from pipetrain.schedule.programs import pipedream
from pipetrain.schedule.replicas import spread_program
from pipetrain.schedule.simulate import simulate
from tests.schedule.cases import CASES, Case, places_of

PLACES = [places_of(replicas) for replicas in ([2, 2], [3, 1], [2, 1], [1, 2], [1, 3], [2, 1, 2], [2])]
PLACES += [[(1, 2), (3,), (0,)], [(0, 1), (0, 1)], [(0, 1), (1, 2)], [(1, 2), (0,)], [(1,), (0, 2)]]


def batch_of(one: Action | Sum, m: int) -> int:
    return one.version - 1 if isinstance(one, Sum) or one.op in UPDATE else one.mb // m


def reached(program: Program, leader: int, end: int, silent: Collection[object]) -> list[int]:
    """Run it while the leader stays before one of its actions, and all others go on as long as they can.

    Messages are taken whenever they come; updates wait for the gradients of all replicas. But nothing waits
    for an empty message, or for the sum of a stage without weights.
    """
    ranks, done = ranks_of(program), [0] * len(program)
    sent, reduced = set[tuple[object, int]](), set[tuple[int, int, int]]()

    def goes_on(rank: int, action: Action) -> bool:
        if rank == leader and done[rank] == end:
            return False
        if action.op in SENDS:
            sent.add((action.edge, action.mb))
        elif action.op in RECEIVES:
            return action.edge in silent or (action.edge, action.mb) in sent
        elif action.op is Op.REDUCE:
            reduced.add((action.stage, action.version, rank))
        elif action.op in UPDATE and action.stage not in silent:
            return all((action.stage, action.version, of) in reduced for of in ranks[action.stage])
        return True

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(program):
            while done[rank] < len(actions) and goes_on(rank, actions[done[rank]]):
                done[rank] += 1
                moved = True
    return done


def begun_by(program: Program, rank: int, position: int, ahead: int) -> Iterator[Action]:
    """Yield what a rank does before a position, forwards whose inputs it may read, and receives with room."""
    home, by_way = homes(program), defaultdict[object, list[tuple[int, Action]]](list)
    for at, action in enumerate(program[rank]):
        link = (action.edge, home[action.peer, action.mb]) if action.op in RECEIVES else ()
        by_way[action.op, action.stage, *link].append((at, action))
    for (op, *_), actions in by_way.items():  # type: ignore[misc]
        done = sum(at < position for at, _ in actions)
        more = ahead if op in RECEIVES else 1 if op is Op.F else 0
        yield from (action for _, action in actions[: done + more])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.sampled_from([case for case in CASES if case.name != "fbp"]),
    st.sampled_from(PLACES),
    st.tuples(st.integers(1, 14), st.integers(1, 4)),
    st.integers(1, 3),
    st.sampled_from([(), (0,), (0, (1, 0)), (1, (1, 0), (2, 1))]),
)
@example(next(case for case in CASES if case.name == "ssp"), [(1, 2), (3,), (0,)], (10, 2), 1, ())
def test_whoever_looks_knows_what_was_decided_and_has_begun_nothing_that_is_left_out(
    case: Case, places: Placement, size: tuple[int, int], bound: int, silent: Collection[Edge | int]
) -> None:
    _, m = size
    try:
        program = lower(spread_program(case.schedule, places, *size))
    except ScheduleError:
        return
    if not reads_old(program, m) and max(map(len, places)) > m:
        return
    run = simulate(program, m, buffer_size=bound)
    posts = make_posts(run, dict.fromkeys(edges(program), bound))
    leader, looks = ranks_of(program)[0][0], stop_points_of(run, posts, silent)
    assert len({tuple(batch for _, batch in own) for own in looks}) == 1
    for at in zip(*looks, strict=True):
        batch, positions = at[0][1], [position for position, _ in at]
        stays = reached(program, leader, positions[leader], silent)
        for rank, position in enumerate(positions):
            assert stays[rank] <= position
            begun = [one for before, one in posts.on(rank) if before < position]
            begun += begun_by(program, rank, position, posts.ahead)
            assert all(batch_of(one, m) < batch for one in begun)
    for batch in [at[0][1] for at in zip(*looks, strict=True)][::4]:  # what is left waits for nothing else
        kept = [shortened(actions, batch, m) for actions in program]
        check(kept, batch, m)
        simulate(kept, m, buffer_size=bound)


@pytest.mark.parametrize("places", [[(0, 1), (2,)], [(0,), (1, 2)], [(0, 1), (0, 1)], [(0, 1), (2, 3)]])
@pytest.mark.parametrize("bound", [1, 2])
def test_a_window_may_end_before_each_batch_but_the_first_ones(places: Placement, bound: int) -> None:
    program = lower(spread_program(pipedream, places, 14, 2))
    run = simulate(program, 2, buffer_size=bound)
    looks = stop_points_of(run, make_posts(run, dict.fromkeys(edges(program), bound)), ())[0]
    first = looks[0][1]
    assert first <= 4
    assert [batch for _, batch in looks] == [*range(first, 14)]
    assert len({position for position, _ in looks}) > 3  # not all at the beginning
