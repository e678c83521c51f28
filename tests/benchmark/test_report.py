"""Ratios within a round, targets as they are printed, and the report to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.report import Row, figure, machine, markdown, ratio, timed_row

# The machine halves its speed from the third round on.
SERIES = {"theirs": [0.2, 0.2, 0.4, 0.4], "ours": [0.1, 0.1, 0.2, 0.2], "slow": [0.2004, 0.2004, 0.4008, 0.4]}
ROWS = [
    Row("sleep, 2 stages", "1f1b", [451.2, 450.0, 455.04], "ms", {"of bound": 0.9965, "x torch": 1.0}),
    Row(
        "sleep, 2 stages",
        "pipedream",
        [91.0],
        "ms",
        {"of bound": 0.975},
        {"of bound >= 0.98": False, "x torch >= 1.00": True},
    ),
    Row("memory, 1f1b", "weight versions", [2], "", targets={"as simulated: 2": True}),
]


def test_a_ratio_is_the_median_over_the_rounds_and_does_not_see_the_machine_drift():
    assert ratio(SERIES["theirs"], SERIES["ours"]) == pytest.approx(2.0)
    assert ratio([1, 1, 1], [1, 2, 100]) == 0.5
    with pytest.raises(ValueError, match="shorter"):
        ratio([1, 2], [1])


def test_a_row_of_times():
    against = {"x theirs": SERIES["theirs"], "x slow": SERIES["slow"]}
    row = timed_row("suite", "ours", SERIES["ours"], against, {"x theirs": 2.5})
    assert row.values == [100, 100, 200, 200]
    assert row.unit == "ms"
    assert row.ratios == {"x theirs": pytest.approx(2.0), "x slow": pytest.approx(2.004)}
    assert row.targets == {"x theirs >= 2.50": False}


@pytest.mark.parametrize(("least", "met"), [(0.998, True), (0.9981, False)])
def test_a_target_is_held_against_the_figure_as_printed(least, met):
    row = timed_row("suite", "slow", SERIES["slow"], {"x theirs": SERIES["theirs"]}, {"x theirs": least})
    assert list(row.targets.values()) == [met]


def test_the_report_to_the_letter():
    text = markdown({"date": "today", "machine": "abacus"}, ROWS, ["Suite models FAILED: rank 1 died"])
    assert text == Path(__file__).with_name("golden_report.md").read_text()


def test_numbers_have_four_places():
    values = {0: "0", 2: "2", 0.12345: "0.1235", 48.291: "48.29", -1.5: "-1.5", 1579.4: "1579"}
    assert {value: figure(value) for value in values} == values


def test_the_head_says_what_was_asked_and_what_ran_it():
    head = machine(["sleep", "--rounds", "3"])
    assert head["command"] == "python scripts/bench.py sleep --rounds 3"
    assert all(word in head["machine"] for word in ("cores", "GiB", "load"))
    assert all(word in head["software"] for word in ("Python 3.", "torch 2.", "pipetrain "))
