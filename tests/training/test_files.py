"""What cannot be written is said once, costs nothing else, and is written when there is room."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from pipetrain.training.files import LogFile
from tests.support.disk import full_disk

SAID = "pipetrain: {} cannot be written: {}; training goes on, and it is written again when there is room"


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


# The log


@pytest.fixture
def log(tmp_path) -> Iterator[logging.Logger]:
    """The logger of a run whose log is tmp_path/run.log."""
    logger, handler = logging.getLogger("pipetrain"), LogFile(str(tmp_path / "run.log"))
    logger.addHandler(handler)
    yield logger
    logger.removeHandler(handler)
    handler.close()


def test_a_log_keeps_the_lines_that_it_cannot_write_and_prints_no_traceback(log, tmp_path, caplog, capfd):
    path = tmp_path / "run.log"
    log.warning("first")
    with full_disk():
        for number in range(200):
            log.warning("line %d, %s", number, 50 * "long ")
    assert path.read_text() == "first\n"
    log.warning("last")
    first, *lines, last = path.read_text().splitlines()
    warning = SAID.format(path, "File too large")
    assert (first, last) == ("first", "last")
    assert [line.split(",")[0] for line in lines if line != warning] == [f"line {n}" for n in range(200)]
    assert lines.count(warning) == said(caplog).count(warning) == 1
    assert capfd.readouterr() == ("", "")
    with full_disk():
        log.warning("once more")
    assert said(caplog).count(warning) == 2


def test_a_log_that_cannot_be_opened_is_no_end_either(log, tmp_path, caplog):
    (tmp_path / "run.log").mkdir()
    log.warning("first")
    (tmp_path / "run.log").rmdir()
    log.warning("last")
    warning = SAID.format(tmp_path / "run.log", "Is a directory")
    assert (tmp_path / "run.log").read_text().splitlines() == ["first", warning, "last"]
    assert said(caplog).count(warning) == 1


def test_what_a_log_has_kept_is_written_at_the_latest_when_it_is_closed(log, tmp_path):
    with full_disk():
        log.warning("kept")
    log.handlers[-1].close()
    assert (tmp_path / "run.log").read_text().startswith("kept\n")


def test_an_error_that_ends_the_run_is_not_followed_by_word_that_it_goes_on(log, tmp_path, caplog):
    with full_disk():
        log.error("the end")
    assert said(caplog) == ["the end"]


def test_a_mistake_of_ours_is_reported_as_python_does_it(log, capsys):
    log.handlers[-1].handle(logging.LogRecord("pipetrain", logging.INFO, "", 0, "%d", ("no number",), None))
    assert "--- Logging error ---" in capsys.readouterr().err
