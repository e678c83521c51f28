"""Published records: their steps are kept, their pages written, and what did not come back is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from comparison import runs
from comparison.request import RECORDS
from published import cli, page
from published.record import Chart, Check, Figure, Findings, How, Line, Record, Step
from published.running import make
from tests.support.processes import CHECKOUT, ended, running

CALLS: list[int] = []


def double(value: int) -> int:
    CALLS.append(value)
    return 2 * value


def broken() -> None:
    raise ValueError("it does not\nrun here")


def show(results: dict[str, int]) -> Findings:
    points = [(float(key), value) for key, value in results.items()]
    lines = [Line(how.value, how, points) for how in How]
    figures = [Figure("doubled", 4, results["2"], How.RUN, (3.9, 4.1), unit="s"), Figure("planned", here=1.5)]
    checks = [
        Check("it is 4", "4", str(results["2"]), results["2"] == 4),
        Check("never", "1", "no GPU", None),
    ]
    return Findings(figures, checks, [Chart("Doubled", "n", "2 n", lines)])


def record(*values: int) -> Record:
    steps = {str(value): Step(double, {"value": value}) for value in values}
    return Record("Doubling", "Euclid.", lambda quick: steps, show, "nothing")


def test_a_step_is_kept_as_long_as_it_is_the_same(tmp_path: Path) -> None:
    CALLS.clear()
    make("doubling", record(1), tmp_path, False)
    kept = make("doubling", record(1, 2), tmp_path, False)
    assert CALLS == [1, 2]
    assert [kept[key]["result"] for key in "12"] == [2, 4]
    other = Record("", "", lambda quick: {"1": Step(double, {"value": 3})}, show)
    assert make("doubling", other, tmp_path, False)["1"]["result"] == 6


def test_what_was_made_before_an_error_is_kept(tmp_path: Path) -> None:
    steps = {"1": Step(double, {"value": 1}), "2": Step(broken)}
    with pytest.raises(ValueError, match="does not"):
        make("doubling", Record("", "", lambda quick: steps, show), tmp_path, False)
    assert json.loads((tmp_path / "doubling.json").read_text())["1"]["result"] == 2


def test_the_page_says_what_came_back_and_what_did_not(tmp_path: Path) -> None:
    kept = make("doubling", record(1, 2), tmp_path, False)
    kept["2"]["result"] = 5
    section = page.section("doubling", record(1, 2), kept, tmp_path, "make it")
    assert section.came_back == "0 of 1, 1 not tried"
    assert page.failed([section]) == ["doubling: it is 4: published 4, here 5"]
    page.write([section], {"other": "it needs a GPU"}, tmp_path / "records.md", tmp_path)
    for file in ("records.md", "report.html"):
        text = (tmp_path / file).read_text()
        assert all(
            word in text for word in ("Euclid.", "3.9 - 4.1", "planned here", "it needs a GPU", "make it")
        )
    assert "| it is 4             | 4         | 5      | **no**    |" in (tmp_path / "records.md").read_text()


def test_a_record_that_fails_is_said_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {
        "bad": Record("", "", lambda quick: {"1": Step(broken)}, show),
        "good": record(1, 2),
    }
    monkeypatch.setattr(cli, "record_of", records.__getitem__)
    assert cli.make_all([*records], tmp_path, False, False) == cli.FAILED
    out = capsys.readouterr().out
    assert "FAILED: it does not run here" in out
    assert "| it is 4 " in out


def forked(command: Sequence[str], nproc: int, log: Path, keep_open: Sequence[int] = ()) -> int | None:
    """Run a command of Python's in processes that have imported all: tests/comparison/test_cli starts one."""
    with running(CHECKOUT, command[1:]) as process:
        log.write_text(ended(process))
        return process.wait()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_every_record_is_made_in_a_tiny_version(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "run", forked)
    assert cli.main(["--experiment", name, "--quick", "--out", str(tmp_path)]) == 0
    assert name in (tmp_path / "records.md").read_text()
