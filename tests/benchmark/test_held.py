"""What a stage that runs forwards again holds, measured over real channels: no more than was planned."""

from __future__ import annotations

import pytest

from benchmark.held import Case, measure
from benchmark.worlds import run_world
from tests.support import DEADLINE_S


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["pipedream", "zbv"])
def test_batches_of_the_largest_length_hold_what_is_planned(schedule):
    ranks = run_world(measure, 2, print, Case("gpt of lengths", schedule), deadline=DEADLINE_S)
    for _, measured, planned in (stage for stages in ranks for stage in stages):
        assert 0.9 * planned < measured < 1.02 * planned


@pytest.mark.processes
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b"])
def test_a_first_microbatch_that_is_not_run_again_is_planned(schedule):
    held = {}
    for mode in ("always", "except_first_microbatch", "never"):
        case = Case("gpt", schedule, 2, (f"recompute={mode}",))
        ranks = run_world(measure, 2, print, case, deadline=DEADLINE_S)
        held[mode] = {stage: found for stages in ranks for stage, *found in stages}
    for measured, planned in held["except_first_microbatch"].values():
        assert 0.95 * planned < measured <= 1.002 * planned  # Python's own, such as an optimizer's counters
    always, spared, never = (of[0][0] for of in held.values())
    assert 0.998 * always < spared < 1.002 * always < never
