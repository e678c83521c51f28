"""Skips of every kind: sound, free of deadlock at the bounds that are proved, and holding no more than without.

What `simulate` says is compared with a second judge, which runs the same program in any order.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import SENDS, Program, ScheduleError, ranks_of
from pipetrain.schedule.bounds import edge_bounds
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import Edge, Route, compute_only, edges, lower
from pipetrain.schedule.programs import forward_only
from pipetrain.schedule.simulate import Deadlock, simulate
from pipetrain.schedule.timeline import Timeline
from tests.schedule.cases import CASES
from tests.schedule.executor import Executor

Size = tuple[int, int, int]


@st.composite
def routes_of(draw: st.DrawFn, stages: int) -> list[Route]:
    """Draw what each stage takes: from its neighbour, from others, or both."""
    routes = []
    for stage in range(1, stages):
        sources = draw(st.sets(st.integers(0, stage - 1), min_size=1, max_size=3))
        routes += [(source, stage) for source in sources | draw(st.sampled_from([{stage - 1}, set()]))]
    return sorted(routes)


@st.composite
def routed(draw: st.DrawFn) -> tuple[Size, Program, list[Route]]:
    """Draw (ranks, batches, microbatches), and a schedule's lowered program for it with any routes."""
    case = draw(st.sampled_from(CASES))
    size = draw(st.tuples(st.integers(2, 6), st.integers(1, 3), st.integers(1, 6)))
    try:
        program = case.schedule(*size)
    except ScheduleError:
        assume(False)
    routes = draw(routes_of(len(ranks_of(program))))
    return size, lower(program, routes), routes


def simulated(program: Program, bounds: dict[Edge, int], routes: list[Route]) -> Timeline | None:
    try:
        return simulate(program, 1, buffer_size=bounds, routes=routes)
    except Deadlock:
        return None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(routed(), st.integers(1, 3), st.integers(0, 100))
def test_a_run_of_any_timing_deadlocks_where_simulate_says_so_and_holds_what_it_says(
    drawn: tuple[Size, Program, list[Route]], buffer_size: int, seed: int
) -> None:
    (_, batches, m), program, routes = drawn
    check(program, batches, m, routes)
    bounds = dict.fromkeys(edges(program, routes), buffer_size)
    result = simulated(program, bounds, routes)
    run = Executor(program, bounds, routes, seed)
    assert run.run() == (result is not None)
    if result:
        assert list(run.activations.values()) == result.activations


@settings(max_examples=300, deadline=None, derandomize=True)
@given(routed(), st.integers(1, 3), st.integers(0, 100))
def test_at_its_bounds_a_skip_never_blocks_and_costs_nothing(
    drawn: tuple[Size, Program, list[Route]], buffer_size: int, seed: int
) -> None:
    (_, batches, m), program, routes = drawn
    bounds = edge_bounds(program, routes, buffer_size)
    result = simulated(program, bounds, routes)
    assert result is not None
    assert Executor(program, bounds, routes, seed).run()
    free = {edge: size if abs(edge[0] - edge[1]) == 1 else batches * m for edge, size in bounds.items()}
    assert result.makespan == simulate(program, 1, buffer_size=free, routes=routes).makespan
