"""Weights that several stages share, in the program: what waits for what, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import (
    COMPUTE,
    Action,
    Op,
    Program,
    Schedule,
    ScheduleError,
    Ties,
    format_program,
    parse_program,
    ranks_of,
    shortened,
)
from pipetrain.schedule.bounds import edge_bounds
from pipetrain.schedule.check import check
from pipetrain.schedule.draw import as_text
from pipetrain.schedule.lower import compute_only, lower
from pipetrain.schedule.programs import (
    gpipe,
    interleaved_1f1b,
    layer_dist,
    one_f_one_b,
    pipedream,
    pipedream_2bw,
    zb_h1,
    zbv,
)
from pipetrain.schedule.simulate import Deadlock, simulate, unit_cost
from pipetrain.schedule.timeline import Timeline
from pipetrain.schedule.transforms import with_norms, with_ties
from tests.schedule.cases import CASES
from tests.schedule.executor import Executor
from tests.schedule.mutants import mutants
from tests.whole.test_routes import DECIDED, routed

FLUSHED = [layer_dist, gpipe, one_f_one_b, interleaved_1f1b]
NAMES = [case.name for case in DECIDED]  # no policy: one that runs ahead may fill the channel to a tied stage
ENDS = [(0, 1)]


def tied(program: Program, ties: Ties, norms: bool = False) -> Program:
    made = with_ties(program, ties)
    return lower(with_norms(made) if norms else made)


def updates(program: Program) -> list[str]:
    return [
        " ".join(str(a) for a in actions if a.op in (Op.TIE, Op.NORM, Op.STEP) or a.op in COMPUTE)
        for actions in program
    ]


def test_a_tie_follows_the_last_backward_and_a_step_comes_as_late_as_it_may() -> None:
    program = parse_program(
        "0F0@0 0B0@0 0STEP@1 0F1@0 0F2@1 0B1@0 0STEP@2 0B2@1 0STEP@3\n1F0@0 1B0@0 1STEP@1"
    )
    assert format_program(with_ties(program, ENDS)[:1]).strip() == (
        "0F0@0 0B0@0 0TIE@1 0F1@0 0STEP@1 0F2@1 0B1@0 0TIE@2 0STEP@2 0B2@1 0TIE@3 0STEP@3"
    )
    halves = parse_program("0F0@0 1F0@0 0I0@0 0W0@0 0STEP@1 0I1@0 0W1@0 0STEP@2")
    assert with_ties(halves, ENDS) == parse_program(
        "0F0@0 1F0@0 0I0@0 0W0@0 0TIE@1 0I1@0 0STEP@1 0W1@0 0TIE@2 0STEP@2"
    )


def test_a_norm_is_of_the_summed_gradient_and_waits_as_late_as_its_step() -> None:
    """Stage 1 is not tied: it tells its norm at once, as without ties."""
    program = with_norms(with_ties(pipedream(3, 2, 1), [(0, 2)]))
    assert updates(program) == [
        "0F0@0 0F1@0 0B0@0 0TIE@1 0NORM@1 0STEP@1 0B1@0 0TIE@2 0NORM@2 0STEP@2",
        "1F0@0 1F1@0 1B0@0 1NORM@1 1STEP@1 1B1@0 1NORM@2 1STEP@2",
        "2F0@0 2B0@0 2TIE@1 2NORM@1 2STEP@1 2F1@1 2B1@1 2TIE@2 2NORM@2 2STEP@2",
    ]


def test_a_rank_of_several_stages_has_told_all_before_it_waits() -> None:
    """The norm of stage 3 waits, and stage 1's STEP waits for it: it comes first."""
    ties = [(0, 3), (0, 2)]
    first, second = (
        [str(a) for a in actions if a.op in (Op.TIE, Op.NORM, Op.STEP) and a.version == 1]
        for actions in with_norms(with_ties(interleaved_1f1b(2, 2, 2, virtual=2), ties))
    )
    assert first == ["2TIE@1", "0TIE@1", "0NORM@1", "2NORM@1", "0STEP@1", "2STEP@1"]
    assert second == ["3TIE@1", "1NORM@1", "3NORM@1", "1STEP@1", "3STEP@1"]


def test_ties_and_norms_may_come_in_any_order_once_or_twice() -> None:
    for case in CASES:
        program, ties = case.schedule(3, 3, 3), [(0, 2), (1, 2)]
        both = with_norms(with_ties(program, ties))
        assert with_ties(with_norms(program), ties) == both, case.name
        assert with_ties(with_norms(both), ties) == both
        assert with_ties(both, ()) == with_norms(program)
        assert with_ties(with_ties(program, ties), ties) == with_ties(program, ties)


def test_stages_that_cannot_be_tied_are_refused() -> None:
    for tie in ((), (1, 1), (0, 3), (-1, 0)):
        with pytest.raises(ScheduleError, match="a tie joins two or more stages of 0 to 2; got"):
            with_ties(gpipe(3, 1, 1), [tie])


# What it does to any schedule


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(NAMES), st.data(), st.booleans(), st.integers(1, 3), st.sampled_from([0.0, 0.5, 4.0]))
def test_no_schedule_deadlocks_and_nothing_is_read_before_the_ties_have_come(
    name: str, data: st.DataObject, norms: bool, buffer_size: int, travel: float
) -> None:
    """With any skips. v_async may: a rank steps its late stage before the other's gradient of the batch."""
    (_, batches, m), program, routes = data.draw(routed([case for case in DECIDED if case.name == name]))
    stages = st.integers(0, len(ranks_of(program)) - 1)
    ties: Ties = data.draw(st.lists(st.sets(stages, min_size=2), min_size=1, max_size=3))
    compute = with_ties(compute_only(program), ties)
    made = lower(with_norms(compute) if norms else compute, routes)
    check(made, batches, m, routes, norms, ties)

    def cost(action: Action) -> float:
        return travel if action.op is Op.TIE else unit_cost(action)

    try:
        bounds = edge_bounds(made, routes, buffer_size, ties)
        run = simulate(made, m, buffer_size=bounds, cost=cost, routes=routes, ties=ties)
    except Deadlock:
        if name != "v_async":
            raise
        return
    plain = simulate(program, m, buffer_size=bounds, routes=routes)
    second = Executor(made, bounds, routes, 1, ties)
    assert second.run()
    assert [row.actions for row in run.rows] == made
    assert run.activations == list(second.activations.values())
    for figure in ("activations", "versions", "staleness"):
        assert getattr(run, figure) == getattr(plain, figure), figure
    _assert_ties_are_awaited(run, ties, norms, travel)
    for left in range(1, batches):  # a window that ends early
        short = [shortened(actions, left, m) for actions in made]
        check(short, left, m, routes, norms, ties)
        simulate(short, m, buffer_size=bounds, routes=routes, ties=ties)


@pytest.mark.parametrize("schedule", FLUSHED)
def test_a_flush_waits_for_no_tie_that_it_would_not_wait_for_anyway(schedule: Schedule) -> None:
    for size in ((3, 2, 4), (4, 1, 2)):
        program = schedule(*size)
        shared = simulate(tied(program, [(0, 2)]), size[2], ties=[(0, 2)])
        assert shared.makespan == simulate(lower(program), size[2]).makespan


def _assert_ties_are_awaited(run: Timeline, ties: Ties, norms: bool, travel: float) -> None:
    spans = [span for row in run.rows for span in row.spans if span.action is not None]
    came = {(s.action.stage, s.action.version): s.end + travel for s in spans if s.action.op is Op.TIE}
    for span in spans:
        stage, version = span.action.stage, span.action.version
        if span.action.op is (Op.NORM if norms else Op.STEP):
            for tie in ties:
                if stage in tie:
                    assert span.start + span.waited >= max(came[other, version] for other in tie)
        if span.action.op is Op.TIE:
            assert span.waited == 0


@pytest.mark.parametrize(("schedule", "waits"), [(pipedream, 0.3402), (pipedream_2bw, 0.3043)])
def test_what_it_costs_an_asynchronous_schedule(schedule: Schedule, waits: float) -> None:
    """A tie of the ends, as much as clipping over the model; docs/schedules.md says it."""
    program, ties = schedule(4, 16, 4), [(0, 3)]
    bubbles = [simulate(lower(program), 4).bubble, simulate(tied(program, ties), 4, ties=ties).bubble]
    assert bubbles == pytest.approx([0.0448, waits], abs=1e-4)


def test_a_tied_program_is_drawn_as_what_it_computes() -> None:
    assert as_text(simulate(tied(gpipe(2, 2, 2), ENDS), 2, ties=ENDS)).splitlines()[1:] == [
        "rank 0  F0 F1 .  .  .  B0--- B1---|F2 F3 .  .  .  B2--- B3---|",
        "rank 1  .  F0 F1 B0--- B1--- .  . |.  F2 F3 B2--- B3--- .  . |",
    ]


# What is wrong is refused


def test_a_step_before_the_tie_of_its_own_rank_is_a_deadlock() -> None:
    early = "0F0@0 1F0@0 1B0@0 1REDUCE@1 1TIE@1 1{}@1 0B0@0 0REDUCE@1 0TIE@1 0{}@1 {}"
    with pytest.raises(Deadlock, match=r"1STEP@1 waits for the tied gradient of stage 0$"):
        simulate(parse_program(early.format("STEP", "STEP", "")), 1, ties=ENDS)
    with pytest.raises(Deadlock, match=r"1NORM@1 waits for the tied gradient of stage 0$"):
        simulate(parse_program(early.format("NORM", "NORM", "0STEP@1 1STEP@1")), 1, ties=ENDS)


def test_a_simulation_that_does_not_know_the_ties_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"stages \[0\] have a TIE, and simulate was not told"):
        simulate(tied(gpipe(3, 1, 1), [(0, 1, 2)]), 1, ties=[(1, 2)])


def test_ties_that_are_not_asked_for_are_refused_and_missing_ones_too() -> None:
    program = pipedream(2, 2, 1)
    with pytest.raises(ScheduleError, match="rank 0 has 0TIE@1 where 0STEP@1 belongs"):
        check(tied(program, ENDS), 2, 1)
    with pytest.raises(ScheduleError, match=r"rank 0 has 0STEP@1 where 0TIE@1 belongs.*after with_ties\(\)"):
        check(lower(program), 2, 1, ties=ENDS)
    with pytest.raises(ScheduleError, match=r"0TIE@1 belongs.*after with_ties\(\) and with_norms\(\)"):
        check(lower(with_norms(program)), 2, 1, norms=True, ties=ENDS)
    with pytest.raises(ScheduleError, match="rank 1 has 1TIE@1 where 1NORM@1 belongs"):
        check(tied(pipedream(3, 2, 1), [(0, 1, 2)], norms=True), 2, 1, norms=True, ties=[(0, 2)])


def test_a_v_has_the_first_and_the_last_stage_on_one_rank_so_that_they_share_for_nothing() -> None:
    program = zbv(4, 4, 8)
    shared = simulate(tied(program, [(0, 7)]), 8, ties=[(0, 7)])
    assert shared.makespan == simulate(lower(program), 8).makespan


@pytest.mark.parametrize("schedule", [*FLUSHED, zb_h1, pipedream])
@pytest.mark.parametrize(
    ("size", "ties", "norms"),
    [((2, 2, 2), ENDS, True), ((3, 1, 3), [(0, 2), (1, 2)], False), ((3, 1, 2), [], True)],
)
def test_no_mutant_survives(schedule: Schedule, size: tuple[int, int, int], ties: Ties, norms: bool) -> None:
    _, batches, m = size
    program = tied(schedule(*size), ties, norms)
    check(program, batches, m, norms=norms, ties=ties)
    assert list(_survivors(program, batches, m, norms, ties)) == []


def _survivors(program: Program, batches: int, m: int, norms: bool, ties: Ties) -> Iterator[str]:
    right = _figures(program, m, ties)
    for what, mutant in mutants(program, reach=4):
        try:
            check(mutant, batches, m, norms=norms, ties=ties)
        except ScheduleError:
            continue
        if _figures(mutant, m, ties) == right:
            yield what


def _figures(program: Program, m: int, ties: Ties) -> tuple[object, ...] | None:
    try:
        run = simulate(program, m, ties=ties)
    except ScheduleError:
        return None
    return run.makespan, run.activations, run.versions, run.staleness
