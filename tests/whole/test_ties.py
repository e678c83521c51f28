"""Weights that several stages share, in the program: what waits for what, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import (
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
from pipetrain.schedule.buffer_bounds import edge_bounds
from pipetrain.schedule.check import check
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


def told(program: Program, *ops: Op) -> list[str]:
    return [" ".join(str(a) for a in actions if a.op in ops) for actions in program]


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
    """Stage 1 is not tied: it tells its norm at once. A rank of two stages tells all before it waits."""
    program = with_norms(with_ties(pipedream(3, 2, 1), [(0, 2)]))
    assert told(program, Op.F, Op.B, Op.TIE, Op.NORM, Op.STEP) == [
        "0F0@0 0F1@0 0B0@0 0TIE@1 0NORM@1 0STEP@1 0B1@0 0TIE@2 0NORM@2 0STEP@2",
        "1F0@0 1F1@0 1B0@0 1NORM@1 1STEP@1 1B1@0 1NORM@2 1STEP@2",
        "2F0@0 2B0@0 2TIE@1 2NORM@1 2STEP@1 2F1@1 2B1@1 2TIE@2 2NORM@2 2STEP@2",
    ]
    program = with_norms(with_ties(interleaved_1f1b(2, 1, 2, virtual=2), [(0, 3), (0, 2)]))
    assert told(program, Op.TIE, Op.NORM, Op.STEP) == [
        "2TIE@1 0TIE@1 0NORM@1 2NORM@1 0STEP@1 2STEP@1",
        "3TIE@1 1NORM@1 3NORM@1 1STEP@1 3STEP@1",
    ]


def test_ties_and_norms_may_come_in_any_order_once_or_twice() -> None:
    for case in CASES:
        program, ties = case.schedule(3, 3, 3), [(0, 2), (1, 2)]
        both = with_norms(with_ties(program, ties))
        assert with_ties(with_norms(program), ties) == both == with_ties(with_norms(both), ties), case.name
        assert with_ties(both, ()) == with_norms(program)
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
        bounds = edge_bounds(made, routes, (buffer_size, buffer_size), ties)
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


def test_a_flush_pays_nothing_and_so_does_a_v_whose_ends_are_on_one_rank() -> None:
    for schedule, last in (*((schedule, 2) for schedule in FLUSHED), (zbv, 7)):
        program, ties = schedule(4, 2, 8), [(0, last)]
        plain = simulate(lower(program), 8).makespan
        assert simulate(tied(program, ties), 8, ties=ties).makespan == plain, schedule


def test_what_is_wrong_is_refused() -> None:
    early = "0F0@0 1F0@0 1B0@0 1REDUCE@1 1TIE@1 1{}@1 0B0@0 0REDUCE@1 0TIE@1 0{}@1 {}"
    for op, more in (("STEP", ""), ("NORM", "0STEP@1 1STEP@1")):
        with pytest.raises(Deadlock, match=rf"1{op}@1 waits for the tied gradient of stage 0$"):
            simulate(parse_program(early.format(op, op, more)), 1, ties=ENDS)
    with pytest.raises(ScheduleError, match=r"stages \[0\] have a TIE, and simulate was not told"):
        simulate(tied(gpipe(3, 1, 1), [(0, 1, 2)]), 1, ties=[(1, 2)])
    program, both = pipedream(2, 2, 1), {"norms": True, "ties": ENDS}
    three = tied(pipedream(3, 2, 1), [(0, 1, 2)], norms=True)
    for wrong, told, says in (
        (tied(program, ENDS), {}, "rank 0 has 0TIE@1 where 0STEP@1 belongs"),
        (lower(program), {"ties": ENDS}, r"0STEP@1 where 0TIE@1 belongs.*after with_ties\(\)"),
        (lower(with_norms(program)), both, r"0TIE@1 belongs.*after with_ties\(\) and with_norms\(\)"),
        (three, {"norms": True, "ties": [(0, 2)]}, "rank 1 has 1TIE@1 where 1NORM@1 belongs"),
    ):
        with pytest.raises(ScheduleError, match=says):
            check(wrong, 2, 1, **told)


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
