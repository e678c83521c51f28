"""GPT-2's memory: what the record says of peaks, and which numbers its lines refuse."""

from __future__ import annotations

from typing import Any

import pytest

from published.experiments import gpt2_memory
from published.experiments.gpt2_memory import ALWAYS, LAST, MODES, NEVER, OURS, OWN, THEIRS
from published.page import figures, number
from published.record import Findings, How
from tests.published.test_verdicts import cannot_fail

MIB = 2**20
RECOMPUTED = f"{LAST} / never, at most torchgpipe's here"


def results(floor: float = 0.5, slower: float = 4 / 3, k: int = 2) -> dict[str, Any]:
    """Return what the steps find where recomputation leaves ours a floor of 8 MiB, on k devices alike."""
    record = gpt2_memory.published(THEIRS, k)
    planned = dict.fromkeys(MODES, [MIB] * len(gpt2_memory.IN))
    found: dict[str, Any] = {f"planned {k}": {"parameters": gpt2_memory.PARAMETERS, **planned}}
    for m in gpt2_memory.IN:
        ours = {NEVER: 8.0, **dict.fromkeys((LAST, ALWAYS), floor + (8 - floor) / m)}
        theirs = {**ours, LAST: 8 * record[LAST][m] / record[NEVER][m]}
        found[f"bytes {k} {m}"] = {
            f"{who} {mode}": {"peaks": [round(of[mode] * MIB / k)] * k}
            for who, of in ((OURS, ours), (THEIRS, theirs))
            for mode in MODES
        }
    times = {NEVER: 1.0, ALWAYS: slower, LAST: 4 / 3}
    found[f"time {k}"] = {
        f"{who} {mode}": {"seconds": [times[mode]]} for who in (OURS, THEIRS) for mode in MODES
    }
    return found


def missed(found: dict[str, Any]) -> set[str]:
    """Return what does not come back, without its case."""
    checks = Findings.of(gpt2_memory.show(found)).checks
    return {check.what.partition(": ")[2] or check.what for check in checks if not check.came_back}


def test_published_peaks_are_totals_less_parameters() -> None:
    theirs, own = (gpt2_memory.published(who, 2) for who in (THEIRS, OWN))
    assert theirs[LAST][8] * MIB == 1_774_979_072
    for known, (first, last) in ((theirs, (0.58, 0.17)), (own, (0.72, 0.15))):
        ratios = gpt2_memory.ratios(known, LAST)
        assert (round(ratios[2], 2), round(ratios[64], 2)) == (first, last)
    assert sum(len(of) for row in gpt2_memory.TOTALS.values() for of in row) == 84


def test_peaks_are_fitted_by_a_floor_and_a_part_that_microbatches_share() -> None:
    assert gpt2_memory.fitted({1: 10.0, 2: 6.0, 4: 4.0}) == pytest.approx((2.0, 8.0, 0.0))
    assert gpt2_memory.fitted({1: 2.0, 2: 2.0}) == pytest.approx((2.0, 0.0, 0.0))
    assert gpt2_memory.fitted({1: 8.0, 2: 2.0, 4: 8.0})[-1] > 1


def test_sums_of_devices_are_held_and_the_fullest_stands_beside() -> None:
    found = results()
    found["bytes 2 2"][f"{OURS} {LAST}"]["peaks"] = [MIB, 3 * MIB]
    found["bytes 2 2"][f"{OURS} {NEVER}"]["peaks"] = [4 * MIB, 4 * MIB]
    series = {(of.of, of.name): of for of in Findings.of(gpt2_memory.show(found)).series}
    assert series["K = 2, gpipe", f"{LAST} / never"].here[2] == 0.5
    assert series["K = 2, gpipe", f"{LAST} / never, fullest device"].here[2] == 0.75
    assert series["K = 2, gpipe", f"{LAST} / never"].published[2] == pytest.approx(0.578, abs=1e-3)
    assert series["K = 2, gpipe, beside the record's own", f"{LAST} / never"].published[2] == pytest.approx(
        0.719, abs=1e-3
    )
    assert {of.how for of in series.values()} == {How.RUN, How.PLANNED, How.ARITHMETIC}
    assert figures([*series.values()]).lines


@pytest.mark.parametrize(
    ("wrong", "misses"),
    [
        ({}, set()),
        ({"floor": 2.0}, {RECOMPUTED, f"{LAST}: holds no more than torchgpipe"}),
        ({"slower": 1.0}, {"time of recomputation, 4/3 within 5 %, x"}),
        ({"slower": 1.5}, {"time of recomputation, 4/3 within 5 %, x"}),
    ],
)
def test_its_verdict_can_fail(wrong: dict[str, float], misses: set[str]) -> None:
    assert missed(results(**wrong)) == misses


def test_each_line_that_comes_back_fails_with_a_wrong_number() -> None:
    assert len(Findings.of(gpt2_memory.show(results())).checks) == 13
    assert not cannot_fail(gpt2_memory.show, results())


def test_what_is_no_number_is_written_too() -> None:
    values = float("nan"), float("inf"), 3.0, 0.12345
    assert [number(value) for value in values] == ["nan", "inf", "3", "0.1235"]
