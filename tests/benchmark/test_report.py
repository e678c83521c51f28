"""The report: to the letter for fixed numbers, and a head that says what it was measured on."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.figures import Row, Verdict
from benchmark.report import figure, machine, markdown, table

ROWS = [
    Row("sleep, 2 stages", "1f1b", [451.2, 450.0, 455.04], "ms", {"of bound": 0.9965, "x torch": 1.0}),
    Row(
        "sleep, 2 stages",
        "pipedream",
        [91.0],
        "ms",
        {"of bound": 0.975},
        [Verdict("of bound >= 0.98", False), Verdict("x torch >= 1.00", True)],
    ),
    Row("memory, 1f1b", "weight versions", [2], "", verdicts=[Verdict("as simulated: 2", True)]),
]


def test_the_report_to_the_letter():
    text = markdown({"date": "today", "machine": "abacus"}, ROWS, ["Suite models FAILED: rank 1 died"])
    assert text == Path(__file__).with_name("golden_report.md").read_text()


def test_a_table_without_ratios_has_no_column_for_them():
    assert table(ROWS[2:]).splitlines()[0] == (
        "| benchmark    | contestant      | median | least - most | target          | met |"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2, "2"), (0.12345, "0.1235"), (48.291, "48.29"), (-1.5, "-1.5"), (1579.4, "1579")],
)
def test_numbers_have_four_places(value, text):
    assert figure(value) == text


def test_the_head_says_what_was_asked_and_what_ran_it():
    head = machine(["sleep", "--rounds", "3"])
    assert head["command"] == "python scripts/bench.py sleep --rounds 3"
    assert all(word in head["machine"] for word in ("cores", "GiB", "load"))
    assert all(word in head["software"] for word in ("Python 3.", "torch 2.", "pipetrain "))
