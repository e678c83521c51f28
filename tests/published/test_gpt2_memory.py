"""GPT-2's memory: what the record says of peaks, flat ones too."""

from __future__ import annotations

from typing import Any

import pytest

from published.experiments import gpt2_memory
from published.page import figures, number
from published.record import Findings


def test_peaks_are_fitted_by_a_part_that_microbatches_share() -> None:
    assert gpt2_memory.fitted({1: 10.0, 2: 6.0, 4: 4.0}) == pytest.approx((2.0, 8.0, 1.0))
    assert gpt2_memory.fitted({1: 2.0, 2: 2.0}) == pytest.approx((2.0, 0.0, 1.0))


@pytest.mark.parametrize(("always", "fits"), [((8, 5, 3.5), True), ((8, 8, 8), True), ((8, 2, 8), False)])
def test_its_verdict_can_fail(always: tuple[float, ...], fits: bool) -> None:
    results: dict[str, Any] = {"planned 2": {"parameters": 1, "never": [3, 3, 3], "always": [3, 2, 1]}}
    for m, peak in zip((1, 2, 4), always, strict=True):
        held = {"never": 8 * 2**20, "always": peak * 2**20}
        results[f"bytes 2 {m}"] = {
            f"{who} {mode}": {"peak": nbytes} for who in gpt2_memory.WHO for mode, nbytes in held.items()
        }
    findings = Findings.of(gpt2_memory.show(results))
    assert {check.what: check.came_back for check in findings.checks} == {
        "parameters": False,
        "K = 2: flat in m without, max / min": True,
        "K = 2: with recomputation, R² of N + A / m": fits,
        "K = 2: holds no more than torchgpipe": True,
    }
    assert len(figures(findings.series).lines) == 2 * 2 + 2 * 2 + 2


def test_what_is_no_number_is_written_too() -> None:
    values = float("nan"), float("inf"), 3.0, 0.12345
    assert [number(value) for value in values] == ["nan", "inf", "3", "0.1235"]
