"""Every program, simulated, is as the papers' formulas say."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from pipetrain.schedule.actions import most_open
from pipetrain.schedule.simulate import simulate
from tests.schedule.cases import CASES, NAMES, Case, accepted
from tests.schedule.theory import theory

pytestmark = pytest.mark.slow

INTERLEAVED = CASES[NAMES.index("interleaved_1f1b")]
VIRTUAL = [
    Case(INTERLEAVED.name, OmegaConf.merge(INTERLEAVED.config, {"schedule": {"virtual": n}})) for n in (1, 3)
]


def assert_as_the_theory_says(case: Case, size: tuple[int, int, int]) -> None:
    """With equal stages and free messages a single buffer already costs no time."""
    for _, program in accepted(case, [size]):
        result, expected = simulate(program, size[2], buffer_size=1), case.theory(*size)
        if expected is not None:
            held = result.activations, result.versions, result.staleness
            assert held == (expected.activations, expected.versions, expected.staleness)
            assert expected.bubble is None or result.bubble == pytest.approx(expected.bubble, abs=1e-12)


@pytest.mark.parametrize("case", [*CASES, *VIRTUAL], ids=lambda case: f"{case.name} {case.virtual}")
def test_every_program_is_sound_and_as_the_theory_says(case: Case) -> None:
    """Small batches, those about as large as the pipeline is long, and large ones."""
    ranks = (3,) if case.name == "zb_auto" else range(1, 6)  # no formula describes it, and it takes longest
    for size in product(ranks, (1, 3), (1, 2, 3, 5, 9)):
        assert_as_the_theory_says(case, size)


@settings(max_examples=50, deadline=None)
@given(
    case=st.sampled_from(CASES),
    size=st.tuples(st.integers(1, 8), st.integers(1, 4), st.integers(1, 20)),
)
def test_any_size_is_sound_and_as_the_theory_says(case: Case, size: tuple[int, int, int]) -> None:
    assert_as_the_theory_says(case, size)


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


@pytest.mark.parametrize("ranks", range(2, 7))
def test_the_memory_of_a_rank(ranks: int) -> None:
    """In microbatches of its part of the model: a stage of a V is half of it."""
    for name, held in {"zbv": ranks, "v_half": ranks // 2 + 1, "v_min": (ranks + 4) // 3}.items():
        assert most_open(CASES[NAMES.index(name)].schedule(ranks, 2, 2 * ranks)) == 2 * held
