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
from pipetrain.schedule.check import check
from pipetrain.schedule.draw import as_text
from pipetrain.schedule.lower import lower
from pipetrain.schedule.policy import ForwardBackward
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
from tests.schedule.cases import CASES, NAMES, Case, replicated
from tests.schedule.mutants import mutants

FLUSHED = ("layer_dist", "gpipe", "1f1b", "interleaved_1f1b")
FLUSH = (layer_dist, gpipe, one_f_one_b, interleaved_1f1b)
# v_async may have to refuse: a rank steps its late stage before the other's gradient of the batch.
DECIDED = [
    case for case in CASES if not isinstance(case.schedule, ForwardBackward) and case.name != "v_async"
]
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
        "0F0@0 0B0@0 0STEP@1 0F1@0 0F2@1 0B1@0 0STEP@2 0B2@1 0STEP@3\n1F0@0 1F1@0 1F2@0 1B0@0 1STEP@1"
    )
    assert (
        with_ties(program, ENDS)[0]
        == parse_program("0F0@0 0B0@0 0TIE@1 0F1@0 0STEP@1 0F2@1 0B1@0 0TIE@2 0STEP@2 0B2@1 0TIE@3 0STEP@3")[
            0
        ]
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


def test_a_stage_that_shares_nothing_steps_where_it_did() -> None:
    program = one_f_one_b(3, 2, 2)
    assert with_ties(program, [(0, 2)])[1] == program[1]


def test_a_rank_of_several_stages_has_told_all_before_it_waits() -> None:
    """The norm of stage 3 waits, and stage 1's STEP waits for it: it comes first."""
    ties = [(0, 3), (0, 2)]
    first, second = (
        [str(a) for a in actions if a.op in (Op.TIE, Op.NORM, Op.STEP) and a.version == 1]
        for actions in with_norms(with_ties(interleaved_1f1b(2, 2, 2, virtual=2), ties))
    )
    assert first == ["2TIE@1", "0TIE@1", "0NORM@1", "2NORM@1", "0STEP@1", "2STEP@1"]
    assert second == ["3TIE@1", "1NORM@1", "3NORM@1", "1STEP@1", "3STEP@1"]


@pytest.mark.parametrize(
    ("norms", "ends"),
    [
        (False, ["0REDUCE@1 0TIE@1 0STEP@1", "1REDUCE@1 1STEP@1", "2REDUCE@1 2TIE@1 2STEP@1"]),
        (
            True,
            [
                "0REDUCE@1 0TIE@1 0NORM@1 0STEP@1",
                "1REDUCE@1 1NORM@1 1STEP@1",
                "2REDUCE@1 2TIE@1 2NORM@1 2STEP@1",
            ],
        ),
    ],
)
def test_the_gradient_of_replicas_is_summed_before_it_is_told(norms: bool, ends: list[str]) -> None:
    lines = format_program(tied(gpipe(3, 1, 1), [(0, 2)], norms)).splitlines()
    assert [line[-len(end) :] for line, end in zip(lines, ends, strict=True)] == ends
    assert all(line.count("REDUCE") == 1 for line in lines)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_ties_and_norms_may_come_in_any_order_once_or_twice(case: Case) -> None:
    program, ties = case.schedule(3, 3, 3), [(0, 2), (1, 2)]
    both = with_norms(with_ties(program, ties))
    assert with_ties(with_norms(program), ties) == both
    assert with_ties(with_norms(both), ties) == both
    assert with_ties(both, ()) == with_norms(program)
    assert with_ties(with_ties(program, ties), ties) == with_ties(program, ties)


@pytest.mark.parametrize("tie", [(), (1,), (1, 1), (0, 3), (-1, 0)])
def test_stages_that_cannot_be_tied_are_refused(tie: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match="a tie joins two or more stages of 0 to 2; got"):
        with_ties(gpipe(3, 1, 1), [tie])


# What it does to any schedule


@st.composite
def tied_runs(draw: st.DrawFn) -> tuple[Case, tuple[int, int, int], Program, Ties]:
    """Draw a schedule and its compute program for a window, and any ties of its stages.

    Not a policy: a stage that decides to run ahead may fill the channel to one that waits for its tie.
    """
    case = draw(st.sampled_from(DECIDED))
    size = draw(st.tuples(st.integers(2, 6), st.integers(1, 3), st.integers(1, 6)))
    if case.name == "pipedream_2bw":
        size = (min(size[0], size[2]), *size[1:])
    program = case.schedule(*size)
    stages = st.integers(0, max(len(ranks_of(program)) - 1, 1))
    ties = st.lists(st.sets(stages, min_size=2), min_size=1, max_size=3)
    return case, size, program, draw(ties) if len(ranks_of(program)) > 1 else ()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(tied_runs(), st.booleans(), st.integers(1, 3), st.sampled_from([0.0, 0.5, 4.0]))
def test_no_schedule_deadlocks_and_nothing_is_read_before_the_ties_have_come(
    drawn: tuple[Case, tuple[int, int, int], Program, Ties], norms: bool, buffer_size: int, travel: float
) -> None:
    case, (_, batches, m), program, ties = drawn
    made = tied(program, ties, norms)
    check(made, batches, m, norms=norms, ties=ties)

    def cost(action: Action) -> float:
        return travel if action.op is Op.TIE else unit_cost(action)

    run = simulate(made, m, buffer_size=buffer_size, cost=cost, ties=ties)
    plain = simulate(lower(program), m, buffer_size=buffer_size)
    assert [row.actions for row in run.rows] == made
    for name in ("activations", "versions", "staleness"):
        assert getattr(run, name) == getattr(plain, name), name
    drains = case.name in FLUSHED or batches == 1  # nothing of the next batch begins before the updates
    if drains and max(plain.staleness) == 0 and travel == 0:
        assert run.makespan == plain.makespan
    _assert_ties_are_awaited(run, ties, norms, travel)
    for left in range(1, batches):  # a window that ends early
        short = [shortened(actions, left, m) for actions in made]
        check(short, left, m, norms=norms, ties=ties)
        simulate(short, m, buffer_size=buffer_size, ties=ties)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("tie", [{0, 1}, {0, 3}, {1, 2}, {2, 3}, {0, 1, 2, 3}])
@pytest.mark.parametrize("size", [(2, 2, 1), (2, 3, 1), (2, 3, 2)])
def test_v_async_runs_with_ties_or_deadlocks_on_paper(
    size: tuple[int, int, int], tie: set[int], norms: bool
) -> None:
    """Where it runs, so do windows that end early."""
    (case,) = [case for case in CASES if case.name == "v_async"]
    _, batches, m = size
    made = tied(case.schedule(*size), [tie], norms)
    check(made, batches, m, norms=norms, ties=[tie])
    try:
        simulate(made, m, buffer_size=1, ties=[tie])
    except Deadlock as error:
        assert "waits for the" in str(error)  # noqa: PT017 - either is right
        return
    for left in range(1, batches):
        simulate([shortened(actions, left, m) for actions in made], m, buffer_size=1, ties=[tie])


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


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("replicas", [[2, 1, 3], [3, 2, 1]])
@pytest.mark.parametrize("m", [1, 4])
def test_replicas_all_tell_and_all_wait(norms: bool, replicas: list[int], m: int) -> None:
    """With one microbatch a batch some replicas have no backward of it, and still take part."""
    ties = [(0, 2)]
    for schedule in (gpipe, one_f_one_b, pipedream):
        made = tied(replicated(schedule(3, 3, m), replicas), ties, norms)
        check(made, 3, m, norms=norms, ties=ties)
        run = simulate(made, m, ties=ties)
        _assert_ties_are_awaited(run, ties, norms, 0.0)
        told = [a for actions in made for a in actions if a.op is Op.TIE]
        assert len(told) == 3 * (replicas[0] + replicas[2])


@pytest.mark.parametrize(
    ("schedule", "free", "waits"), [(pipedream, 0.0448, 0.3402), (pipedream_2bw, 0.0448, 0.3043)]
)
@pytest.mark.parametrize(("ties", "norms"), [([(0, 3)], False), ([], True)])
def test_what_it_costs_an_asynchronous_schedule(
    schedule: Schedule, free: float, waits: float, ties: Ties, norms: bool
) -> None:
    """A tie of the ends as much as clipping over the model; docs/schedules.md says it."""
    program = schedule(4, 16, 4)
    bubbles = [simulate(lower(program), 4).bubble, simulate(tied(program, ties, norms), 4, ties=ties).bubble]
    assert bubbles == pytest.approx([free, waits], abs=1e-4)


def test_a_tied_gradient_that_travels_holds_up_the_steps_that_it_is_for() -> None:
    def cost(action: Action) -> float:
        return 0.5 if action.op is Op.TIE else unit_cost(action)

    run = simulate(tied(gpipe(3, 2, 1), [(0, 2)]), 1, cost=cost, ties=[(0, 2)])
    waited = {str(s.action): s.waited for row in run.rows for s in row.spans if s.action.op is Op.STEP}
    assert waited == {
        "0STEP@1": 0.5,
        "1STEP@1": 0,
        "2STEP@1": 4.5,
        "0STEP@2": 0.5,
        "1STEP@2": 0,
        "2STEP@2": 4.5,
    }


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


@pytest.mark.parametrize("schedule", [*FLUSH, zb_h1, pipedream, pipedream_2bw])
@pytest.mark.parametrize(
    ("size", "ties", "norms"),
    [
        *(((2, 2, 2), [(0, 1)], norms) for norms in (False, True)),
        *(((3, 1, 3), [(0, 2), (1, 2)], norms) for norms in (False, True)),
        *((size, [], True) for size in ((2, 2, 2), (3, 1, 3), (1, 1, 1))),
    ],
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
