"""Published records: their steps are kept, their pages written, and what did not come back is said."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from comparison import runs
from comparison.request import RECORDS
from pipetrain.errors import ConfigError
from published import cli, page
from published.charts import DASHES
from published.cli import make
from published.made import how_made
from published.record import Chart, Check, Finding, Findings, How, Line, Record, Series, Step
from tests.support.processes import CHECKOUT, ended, running

CALLS: list[int] = []


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other program runs, which to see takes a second."""
    monkeypatch.setattr(cli, "others_now", lambda: 0.0)


def double(value: int) -> int:
    CALLS.append(value)
    return 2 * value


def broken() -> None:
    raise ValueError("it does not\nrun here")


def show(results: dict[str, int]) -> Iterator[Finding]:
    points = {float(key): float(value) for key, value in results.items()}
    yield Series("n", "doubled", "n", points, unit="s", published={2: 4}, spread={2: (3.9, 4.1)})
    yield Series("on paper", "doubled", "n", {2: 1.5}, How.PLANNED)
    yield Check("it is 4", "4", "the same", str(results["2"]), results["2"] == 4, How.RUN)
    yield Check("never", "1", "1", "no GPU", None, How.ARITHMETIC)
    yield from (
        Check.of(f"n = {n:g}: doubled", f"{2 * n:g}", (2 * n, 2 * n), of, How.PLANNED)
        for n, of in points.items()
    )
    yield Chart("Doubled", "n", "2 n", [Line(how.value, how, points) for how in DASHES])


def record(*values: int) -> Record:
    steps = {str(value): Step(double, {"value": value}) for value in values}
    return Record(lambda quick: steps, show, "Doubling", "Euclid.", ["By hand."], "nothing")


def test_a_step_is_kept_as_long_as_it_is_the_same(tmp_path: Path) -> None:
    CALLS.clear()
    make("doubling", record(1), tmp_path, False)
    kept = make("doubling", record(1, 2), tmp_path, False)
    assert CALLS == [1, 2]
    assert [kept[key]["result"] for key in "12"] == [2, 4]
    other = Record(lambda quick: {"1": Step(double, {"value": 3})}, show, "", "")
    assert make("doubling", other, tmp_path, False)["1"]["result"] == 6


def test_what_was_made_before_an_error_is_kept(tmp_path: Path) -> None:
    steps = {"1": Step(double, {"value": 1}), "2": Step(broken)}
    with pytest.raises(ValueError, match="does not"):
        make("doubling", Record(lambda quick: steps, show, "", ""), tmp_path, False)
    assert json.loads((tmp_path / "doubling.json").read_text())["1"]["result"] == 2


@pytest.mark.parametrize("content", ["[]", "{", '{"1": {"asked": {}}}', '{"1": 3}'])
def test_a_file_of_anything_else_is_refused_in_a_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / "doubling.json").write_text(content)
    with pytest.raises(ConfigError, match=r"doubling.json (cannot be read|holds no steps)"):
        make("doubling", record(1), tmp_path, False)


def test_docs_keep_no_step_of_a_tree_that_is_no_commit_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CALLS.clear()
    monkeypatch.setattr(cli, "KEPT", {cli.ALL: tmp_path.resolve()})
    monkeypatch.setattr(cli, "describe_machine", lambda: {"pipetrain": "0123456789-dirty"})
    with pytest.raises(ConfigError, match="commit first"):
        make("doubling", record(1), tmp_path, False)
    assert not CALLS


def test_docs_keep_no_time_that_other_programs_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = iter([0.0, 1.3])  # in the second before the step, and in the one after it
    monkeypatch.setattr(cli, "KEPT", {cli.ALL: tmp_path.resolve()})
    monkeypatch.setattr(cli, "describe_machine", lambda: {"pipetrain": "0123456789"})
    monkeypatch.setattr(cli, "others_now", cores.__next__)
    with pytest.raises(RuntimeError, match=r"1: other programs kept 1\.3 cores busy, and docs/ keeps only"):
        make("doubling", record(1), tmp_path, False)
    assert not (tmp_path / "doubling.json").exists()
    untimed = Record(lambda quick: {"1": Step(double, {"value": 1}, timed=False)}, show, "", "")
    assert make("doubling", untimed, tmp_path, False)["1"]["result"] == 2


@pytest.mark.parametrize(("cores", "says"), [(0.1, "at most"), (1.3, "which make these times uncertain: 2")])
def test_the_page_says_which_times_other_programs_disturbed(
    cores: float, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = iter([0.0, 0.0, cores, 0.0])
    monkeypatch.setattr(cli, "others_now", others.__next__)
    kept = make("doubling", record(1, 2), tmp_path, False)
    said, _ = how_made(kept, "make it")
    assert f", other programs on {cores} cores at most" in said
    assert says in said
    old = {"1": {**kept["1"], "machine": {**kept["1"]["machine"], "load": "0.1"}}}
    del old["1"]["machine"]["others"]
    assert "other programs" not in how_made(old, "make it")[0]


def test_a_folder_under_a_file_and_a_name_with_another_dash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = ["--experiment", "pipedream_plans", "--quick", "--out", str(tmp_path / "file" / "out")]
    assert cli.asked_for(words)
    assert cli.main(words) == cli.REFUSED
    assert "file/out cannot be made: Not a directory; choose another --out" in capsys.readouterr().err


def test_the_page_says_what_came_back_and_what_did_not(tmp_path: Path) -> None:
    kept = make("doubling", record(1, 2), tmp_path, False)
    kept["2"]["result"] = 5
    section = page.section("doubling", record(1, 2), kept, tmp_path, "make it")
    assert [*map(section.came_back, page.KINDS)] == [
        "0 of 1 (0 of 1)",
        "1 of 2 (1 of 2)",
        "0 of 0, 1 not tried (0 of 0, 1 not tried)",
    ]
    assert section.failed == [
        "doubling: it is 4: must be the same, here 5",
        "doubling: n = 2: doubled: must be 4 to 4, here 5",
    ]
    page.write([section], {"other": "it needs a GPU"}, tmp_path / "records.md", tmp_path)
    texts = {file: (tmp_path / file).read_text() for file in ("records.md", "report.html")}
    for text in texts.values():
        assert all(word in text for word in ("Euclid.", "By hand.", "it needs a GPU", "make it"))
    assert "3.9 - 4.1" in texts["report.html"]
    assert '<td class="text bad">no</td>' in texts["report.html"]
    assert "`" not in texts["report.html"]
    assert "| it is 4 | 4 | the same | 5 | run here | **no** |" in texts["records.md"]
    cases = "n = 1: 2 (2, 2 to 2); n = 2: 5 (4, 4 to 4), no"
    assert (
        f"| doubled | in brackets | in brackets | {cases} | planned here | **1 of 2** |"
        in texts["records.md"]
    )
    lines = (
        "| by n                            |   1 |     2 |",
        "| ------------------------------- | --: | ----: |",
        "| n: doubled, s, run here         |   2 | 5 (4) |",
        "| on paper: doubled, planned here |   - |   1.5 |",
    )
    assert "\n".join(lines) in texts["records.md"]


def test_the_page_is_that_of_the_results_that_are_kept() -> None:
    kept = cli.KEPT[cli.ALL]
    text = (cli.DOCS / page.PAGE).read_text()
    for name in RECORDS:
        if name.startswith((cli.STUDY, cli.MAP)):
            continue
        made = json.loads(cli.file_of(kept, name).read_text())
        record, results = cli.record_of(name), {key: step["result"] for key, step in made.items()}
        section = page.Section(name, record, Findings.of(record.show(results)), "", "", ())
        assert page.unpadded(section.short_verdict) in text
        assert all(table.markdown in text for table in section.short_tables)


def test_a_record_that_fails_is_said_and_the_others_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {
        "bad": Record(lambda quick: {"1": Step(broken)}, show, "", ""),
        "good": record(1, 2),
    }
    monkeypatch.setattr(cli, "record_of", records.__getitem__)
    assert cli.make_all([*records], tmp_path, False, False) == cli.FAILED
    out = capsys.readouterr().out
    assert "FAILED: it does not run here" in out
    assert "| it is 4 " in out


def test_results_of_other_code_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "record_of", {"doubling": record(1)}.__getitem__)
    with pytest.raises(ConfigError, match=r"doubling.json lacks '2': other code made it; .*--fresh"):
        cli.make_all(["doubling"], tmp_path, False, False)


def forked(command: Sequence[str], nproc: int, log: Path, keep_open: Sequence[int] = ()) -> int | None:
    """Run a command of Python's in processes that have imported all: tests/comparison/test_cli starts one."""
    with running(CHECKOUT, command[1:]) as process:
        log.write_text(ended(process))
        return process.wait()


def checked(charts: Sequence[Chart], path: Path) -> None:
    """In place of `draw`, which takes seconds."""
    for line in (line for chart in charts for line in chart.lines):
        assert line.band is None or len(line.band) == len(line.points)
        assert all(isinstance(number, float | int) for of in line.points.items() for number in of)
    path.touch()


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("name", RECORDS)
def test_every_record_is_made_in_a_tiny_version(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "run", forked)
    monkeypatch.setattr(page, "draw", checked)
    assert cli.main(["--experiment", name, "--quick", "--out", str(tmp_path)]) == 0
    assert name in (tmp_path / "records.md").read_text()
