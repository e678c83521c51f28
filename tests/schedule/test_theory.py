from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import Op, Program
from pipetrain.schedule.programs import interleaved_1f1b
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.theory import Theory, theory
from pipetrain.schedule.timeline import Timeline
from tests.schedule.cases import CASES, NAMES, Case, accepted, sound

pytestmark = pytest.mark.slow


def assert_as_the_theory_says(program: Program, microbatches: int, expected: Theory | None) -> None:
    """At both bounds: with equal stages and free messages a single buffer already costs no time."""
    for buffer_size in (1, 2):
        result = simulate(program, microbatches, buffer_size=buffer_size)
        if expected is not None:
            assert result.activations == expected.activations
            assert expected.held is None or peak_of_a_rank(result) == expected.held
            assert result.versions == expected.versions
            assert result.staleness == expected.staleness
            assert expected.bubble is None or result.bubble == pytest.approx(expected.bubble, abs=1e-12)


def peak_of_a_rank(timeline: Timeline) -> float:
    """Return the most microbatches that a rank holds, a stage counting as its share of the rank's."""
    most = 0.0
    for row in timeline.rows:
        opened = accumulate((a.op is Op.F) - (a.op in (Op.B, Op.W)) for a in row.actions)
        most = max(most, max(opened) / len({a.stage for a in row.actions}))
    return most


def sizes(ranks: int) -> Iterator[tuple[int, int, int]]:
    """Small batches, those about as large as the pipeline is long, and large ones."""
    yield from ((ranks, batches, m) for batches in (1, 3) for m in (1, 2, 3, 5, 8, 9, 24))
    yield from ((ranks, 6, m) for m in (1, 3))


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_program_is_sound_and_as_the_theory_says(case: Case, ranks: int) -> None:
    tried = sizes(ranks)
    if case.name == "zb_auto":  # which no formula describes, and which takes longest to make
        tried = islice(tried, ranks % 5, None, 5)
    for size, program in accepted(case, tried):
        assert_as_the_theory_says(program, size[2], case.theory(*size))


@pytest.mark.parametrize("virtual", [1, 3, 4])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_interleaved_with_other_numbers_of_stages_a_rank(ranks: int, virtual: int) -> None:
    for batches, m in [(1, 1), (1, 2), (1, 3), (1, 5), (2, 7), (1, 8), (1, 12), (1, 23), (1, 24)]:
        program = sound(partial(interleaved_1f1b, virtual=virtual), ranks, batches, m)
        assert_as_the_theory_says(program, m, theory("interleaved_1f1b", ranks, batches, m, virtual))


@settings(max_examples=60, deadline=None)
@given(
    case=st.sampled_from(CASES),
    size=st.tuples(st.integers(1, 8), st.integers(1, 6), st.integers(1, 24)),
)
def test_any_size_is_sound_and_as_the_theory_says(case: Case, size: tuple[int, int, int]) -> None:
    for _, program in accepted(case, [size]):
        assert_as_the_theory_says(program, size[2], case.theory(*size))


def test_the_table_for_four_stages() -> None:
    """The steady state, as the papers have it: eight microbatches a batch, a window of six batches."""
    rows = {
        name: theory(name, 4, 6, 8) for name in ("layer_dist", "gpipe", "1f1b", "pipedream", "pipedream_2bw")
    }
    assert {
        name: (t.activations, t.versions, t.staleness, round(t.bubble or 0, 4))
        for name, t in rows.items()
        if t
    } == {
        "layer_dist": ([1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], 0.75),
        "gpipe": ([8, 8, 8, 8], [1, 1, 1, 1], [0, 0, 0, 0], 0.2727),
        "1f1b": ([4, 3, 2, 1], [1, 1, 1, 1], [0, 0, 0, 0], 0.2727),
        "pipedream": ([4, 3, 2, 1], [2, 2, 2, 1], [1, 1, 1, 0], 0.0588),
        "pipedream_2bw": ([4, 3, 2, 1], [2, 2, 2, 2], [1, 1, 1, 1], 0.0588),
    }


def test_pipedream_with_a_step_after_every_backward() -> None:
    row = theory("pipedream", 4, 50, 1)
    assert row is not None
    assert (row.activations, row.versions, row.staleness) == ([4, 3, 2, 1], [4, 3, 2, 1], [3, 2, 1, 0])


def test_interleaving_buys_a_smaller_bubble_with_activations() -> None:
    row, plain = theory("interleaved_1f1b", 4, 1, 8, virtual=2), theory("1f1b", 4, 1, 8)
    assert row is not None
    assert plain is not None
    assert row.bubble == 3 / 19
    assert plain.bubble == 3 / 11
    # Rank r holds stages r and 4 + r, each half a stage of 1f1b.
    assert row.activations == [8, 8, 7, 5, 4, 4, 3, 1]


def test_the_bubble_of_a_group_that_is_not_full_is_more_than_the_formula() -> None:
    row = theory("interleaved_1f1b", 4, 1, 6, virtual=2)
    assert row is not None
    assert row.bubble is None
    assert simulate(sound(interleaved_1f1b, 4, 1, 6), 6).bubble > 3 / (2 * 6 + 3)


def test_a_users_schedule_has_no_theory() -> None:
    assert theory("mine", 4, 1, 8) is None


def test_each_row_names_its_source() -> None:
    for name in NAMES:
        row = theory(name, 4, 2, 4)
        assert row is None or row.source
