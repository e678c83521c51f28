"""Every program, simulated, is as the papers' formulas say."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipetrain.schedule.actions import Program, most_open
from pipetrain.schedule.programs import interleaved_1f1b
from pipetrain.schedule.simulate import simulate
from pipetrain.schedule.theory import Theory, theory
from tests.schedule.cases import CASES, NAMES, Case, accepted, sound

pytestmark = pytest.mark.slow


def assert_as_the_theory_says(program: Program, microbatches: int, expected: Theory | None) -> None:
    """With equal stages and free messages a single buffer already costs no time."""
    result = simulate(program, microbatches, buffer_size=1)
    if expected is not None:
        assert result.activations == expected.activations
        assert result.versions == expected.versions
        assert result.staleness == expected.staleness
        assert expected.bubble is None or result.bubble == pytest.approx(expected.bubble, abs=1e-12)


def sizes(ranks: int) -> Iterator[tuple[int, int, int]]:
    """Small batches, those about as large as the pipeline is long, and large ones."""
    yield from ((ranks, batches, m) for batches in (1, 3) for m in (1, 2, 3, 5, 9))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_program_is_sound_and_as_the_theory_says(case: Case) -> None:
    ranks = (3,) if case.name == "zb_auto" else range(1, 6)  # no formula describes it, and it takes longest
    for size, program in accepted(case, chain.from_iterable(map(sizes, ranks))):
        assert_as_the_theory_says(program, size[2], case.theory(*size))


@pytest.mark.parametrize("virtual", [1, 3])
def test_interleaved_with_other_numbers_of_stages_a_rank(virtual: int) -> None:
    for ranks, (batches, m) in product((1, 2, 4, 5), [(1, 1), (1, 3), (1, 5), (2, 7), (1, 12)]):
        program = sound(partial(interleaved_1f1b, virtual=virtual), ranks, batches, m)
        assert_as_the_theory_says(program, m, theory("interleaved_1f1b", ranks, batches, m, virtual))


@settings(max_examples=50, deadline=None)
@given(
    case=st.sampled_from(CASES),
    size=st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 20)),
)
def test_any_size_is_sound_and_as_the_theory_says(case: Case, size: tuple[int, int, int]) -> None:
    for _, program in accepted(case, [size]):
        assert_as_the_theory_says(program, size[2], case.theory(*size))


STEADY = {  # as the papers have it: name, batches, microbatches -> activations, versions, staleness, bubble
    ("layer_dist", 6, 8): ([1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0], 0.75),
    ("gpipe", 6, 8): ([8, 8, 8, 8], [1, 1, 1, 1], [0, 0, 0, 0], 3 / 11),
    ("1f1b", 6, 8): ([4, 3, 2, 1], [1, 1, 1, 1], [0, 0, 0, 0], 3 / 11),
    ("pipedream", 6, 8): ([4, 3, 2, 1], [2, 2, 2, 1], [1, 1, 1, 0], 3 / 51),
    ("pipedream", 50, 1): ([4, 3, 2, 1], [4, 3, 2, 1], [3, 2, 1, 0], 3 / 53),
    ("pipedream_2bw", 6, 8): ([4, 3, 2, 1], [2, 2, 2, 2], [1, 1, 1, 1], 3 / 51),
    # Rank r holds stages r and 4 + r, each half a stage of 1f1b.
    ("interleaved_1f1b", 1, 8): ([8, 8, 7, 5, 4, 4, 3, 1], [1] * 8, [0] * 8, 3 / 19),
}


@pytest.mark.parametrize(("of", "expected"), STEADY.items())
def test_the_table_for_four_ranks(of: tuple[str, int, int], expected: tuple[object, ...]) -> None:
    name, batches, m = of
    row = theory(name, 4, batches, m, 2)
    assert row is not None
    assert (row.activations, row.versions, row.staleness, row.bubble) == expected


def test_where_no_formula_is_known() -> None:
    row = theory("interleaved_1f1b", 4, 1, 6, virtual=2)
    assert row is not None
    assert row.bubble is None  # of a group that is not full it is more than the formula
    assert simulate(sound(interleaved_1f1b, 4, 1, 6), 6).bubble > 3 / (2 * 6 + 3)
    assert theory("mine", 4, 1, 8) is None


@pytest.mark.parametrize("ranks", range(2, 7))
def test_the_memory_of_a_rank(ranks: int) -> None:
    """In microbatches of its part of the model: a stage of a V is half of it."""
    for name, held in {"zbv": ranks, "v_half": ranks // 2 + 1, "v_min": (ranks + 4) // 3}.items():
        assert most_open(CASES[NAMES.index(name)].schedule(ranks, 2, 2 * ranks)) == 2 * held
