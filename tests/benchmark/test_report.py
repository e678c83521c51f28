"""Ratios within a round, targets as they are printed, and the report to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.report import Row, figure, markdown, ratio, timed_row

# The machine halves its speed from the third round on.
SERIES = {"theirs": [0.2, 0.2, 0.4, 0.4], "ours": [0.1, 0.1, 0.2, 0.2], "slow": [0.2004, 0.2004, 0.4008, 0.4]}
MET = {"of bound >= 0.98": False, "x torch >= 1.00": True}
ROWS = [
    Row("sleep, 2 stages", "1f1b", [451.2, 450.0, 455.04], "ms", {"of bound": 0.9965, "x torch": 1.0}),
    Row("sleep, 2 stages", "pipedream", [91.0], "ms", {"of bound": 0.975}, MET),
    Row("sleep, 2 stages", "torch zbv", [], "", failure="RuntimeError: a | b"),
    Row("memory, 1f1b", "weight versions", [2], "", targets={"as simulated: 2": True}),
]


@pytest.mark.parametrize(
    ("name", "least", "met"), [("ours", 2.5, False), ("slow", 0.998, True), ("slow", 0.9981, False)]
)
def test_a_row_of_times_holds_its_target_against_the_figure_as_printed(name, least, met):
    """A ratio is the median over the rounds, and does not see the machine drift."""
    row = timed_row("suite", name, SERIES[name], {"x theirs": SERIES["theirs"]}, {"x theirs": least})
    assert (row.values, row.unit) == ([1000 * s for s in SERIES[name]], "ms")
    assert row.ratios == {"x theirs": pytest.approx({"ours": 2.0, "slow": 0.998}[name], abs=1e-5)}
    assert row.targets == {f"x theirs >= {least:.2f}": met}
    assert ratio([1, 1, 1], [1, 2, 100]) == 0.5


def test_the_report_to_the_letter():
    text = markdown({"date": "today", "machine": "abacus"}, ROWS, ["Suite models FAILED: rank 1 died"])
    assert text == Path(__file__).with_name("golden_report.md").read_text()
    values = {0: "0", 2: "2", 0.12345: "0.1235", 48.291: "48.29", -1.5: "-1.5", 1579.4: "1579"}
    assert {value: figure(value) for value in values} == values
