"""Skips of every kind: sound, free of deadlock at the bounds that are proved, holding no more than without.

What `simulate` says is compared with a second judge, which runs the same program in any order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import Action, Edge, Op, Program, ScheduleError, ranks_of
from pipetrain.schedule.buffer_bounds import edge_bounds
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import compute_only, edges, lower
from pipetrain.schedule.policy import ForwardBackward, play
from pipetrain.schedule.programs import forward_only
from pipetrain.schedule.simulate import Deadlock, simulate
from tests.schedule.cases import CASES, Case
from tests.schedule.executor import Executor
from tests.schedule.mutants import mutants
from tests.schedule.test_check import refused

DECIDED = [case for case in CASES if not isinstance(case.schedule, ForwardBackward)]
Size = tuple[int, int, int]
Drawn = tuple[Size, Program, list[Edge]]


@st.composite
def routes_of(draw: st.DrawFn, stages: int) -> list[Edge]:
    """Draw what each stage takes: what its neighbour makes, what others make, or both."""
    routes = []
    for stage in range(1, stages):
        sources = draw(st.sets(st.integers(0, stage - 1), min_size=1, max_size=3))
        beside = draw(st.sampled_from([{stage - 1}, set()]))
        routes += [(source, stage) for source in sources | beside]
    return sorted(routes)


@st.composite
def routed(draw: st.DrawFn, cases: Sequence[Case] = CASES, most_ranks: int = 6, most: int = 6) -> Drawn:
    """Draw (ranks, batches, microbatches), and a schedule's lowered program for it with any routes."""
    case = draw(st.sampled_from(cases))
    size = draw(st.tuples(st.integers(2, most_ranks), st.integers(1, 3), st.integers(1, most)))
    try:
        program = case.schedule(*size)
    except ScheduleError:
        assume(False)
    routes = draw(routes_of(len(ranks_of(program))))
    return size, lower(program, routes), routes


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(routed(), st.integers(1, 3), st.integers(0, 100))
def test_a_run_of_any_timing_deadlocks_where_simulate_says_so_and_holds_what_it_says(
    drawn: Drawn, buffer_size: int, seed: int
) -> None:
    (_, batches, m), program, routes = drawn
    check(program, batches, m, routes)
    bounds = dict.fromkeys(edges(program, routes), buffer_size)
    run = Executor(program, bounds, routes, seed)
    try:
        result = simulate(program, 1, buffer_size=bounds, routes=routes)
    except Deadlock:
        assert not run.run()
    else:
        assert run.run()
        assert list(run.activations.values()) == result.activations


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(routed(), st.integers(1, 3), st.integers(0, 100))
def test_at_its_bound_a_skip_blocks_nothing_and_holds_up_nothing(
    drawn: Drawn, buffer_size: int, seed: int
) -> None:
    (_, batches, m), program, routes = drawn
    bounds = edge_bounds(program, routes, (buffer_size, buffer_size))
    result = simulate(program, 1, buffer_size=bounds, routes=routes)
    run = Executor(program, bounds, routes, seed)
    assert run.run()
    # Each microbatch once, and back: no stage between carries it.
    assert run.sends == Counter(dict.fromkeys(edges(program, routes), batches * m))
    free = {edge: size if abs(edge[0] - edge[1]) == 1 else batches * m for edge, size in bounds.items()}
    assert result.makespan == simulate(program, 1, buffer_size=free, routes=routes).makespan
    for edge, size in bounds.items():
        assert buffer_size <= size <= max(buffer_size, -(-result.activations[min(edge)] // 2))
    alone = simulate(lower(compute_only(program)), 1, buffer_size=buffer_size)
    for figure in ("activations", "versions", "staleness"):
        assert getattr(result, figure) == getattr(alone, figure)
    if {*pairwise(range(len(ranks_of(program))))} <= set(routes):
        assert result.makespan == alone.makespan


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 12), st.integers(1, 3))
def test_an_evaluation_does_not_block_either(data: st.DataObject, m: int, buffer_size: int) -> None:
    """Whatever stages a rank has; each microbatch has passed all of them when it ends."""
    stages = data.draw(st.integers(2, 8))
    ranks = data.draw(st.integers(1, stages))
    others = data.draw(st.lists(st.integers(0, ranks - 1), min_size=stages - ranks, max_size=stages - ranks))
    placement = [(rank,) for rank in data.draw(st.permutations([*range(ranks), *others]))]
    routes = data.draw(routes_of(stages))
    program = lower(forward_only(placement, m), routes)
    bounds = edge_bounds(program, routes, (buffer_size, buffer_size))
    simulate(program, 1, buffer_size=bounds, routes=routes)
    assert Executor(program, bounds, routes, 0).run()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(2, 6), st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.data(), st.integers(1, 3)
)
def test_a_policy_ends_with_any_skips_and_timing_and_keeps_its_bounds(
    ranks: int, batches: int, m: int, in_flight: int, data: st.DataObject, buffer_size: int
) -> None:
    policy = ForwardBackward(in_flight)
    routes = data.draw(routes_of(ranks))
    chance = random.Random(data.draw(st.integers(0, 1000)))

    def cost(action: Action) -> float:
        return chance.choice([0, 1, 1, 3, 20]) if action.op is not Op.STEP else 0

    example = lower(policy(ranks, batches, m), routes)
    bounds = edge_bounds(example, routes, (buffer_size, buffer_size))
    played = play(policy, ranks, batches, m, buffer_size=bounds, cost=cost, routes=routes)
    program = lower(played, routes)
    check(program, batches, m, routes)
    run = simulate(program, m, buffer_size=bounds, routes=routes)
    for stage in range(ranks):
        limits = policy.bounds(stage, ranks, batches, m)
        for figure in ("activations", "versions", "staleness"):
            assert getattr(run, figure)[stage] <= getattr(limits, figure)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(routed(most_ranks=4, most=3))
def test_no_message_can_be_dropped_doubled_misdirected_or_taken_out_of_order(drawn: Drawn) -> None:
    (_, batches, m), program, routes = drawn
    assume(batches * m * len(program) <= 18)  # every mutant lowers the whole program again
    stages = len(ranks_of(program))
    for what, mutant in mutants(program, reach=1):
        changed = compute_only(mutant) != compute_only(program)
        assert changed or refused(mutant, batches, m, routes), what
    for other in ({*routes, (0, stages - 1)}, set(routes[1:])):
        if sorted(other) != routes and edges(program, sorted(other)) != edges(program, routes):
            assert refused(program, batches, m, sorted(other))
