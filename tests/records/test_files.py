"""What cannot be written is said once, costs nothing else, and is written when there is room."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipetrain.records.files import Files, Growing, LogFile, write_whole
from tests.support.disk import full_disk

SAID = "pipetrain: {} cannot be written: {}; training goes on, and it is written again when there is room"


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_a_full_disk_is_said_once_and_again_only_after_it_had_room(tmp_path, caplog):
    files, path = Files(), tmp_path / "a.txt"
    for text in ("one", "two"):
        with full_disk():
            for _ in range(3):
                files.text(path, text)
                files.write()
        assert list(files.failed.items()) == [(path, "File too large")]
        files.write()
        assert (path.read_text(), files.failed) == (text, {})
    assert said(caplog) == [SAID.format(path, "File too large")] * 2


def test_what_fails_stops_nothing_else_and_what_is_written_is_not_written_again(tmp_path, caplog):
    files, written = Files(), []
    (tmp_path / "folder").mkdir()
    files.text(tmp_path / "folder", "a folder stands there")
    files.due(tmp_path / "fine", lambda: written.append("fine"))
    files.write()
    files.write()
    assert written == ["fine"]
    assert said(caplog) == [SAID.format(tmp_path / "folder", "Is a directory")]


def test_the_word_that_a_file_is_there_comes_when_it_is(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="pipetrain")
    files, path = Files(), tmp_path / "a.txt"
    files.whole(path, lambda new: new.write_text("it"), "it is there")
    with full_disk():
        files.write()
    assert "it is there" not in said(caplog)
    files.write()
    files.write()
    assert said(caplog).count("it is there") == 1


def test_a_file_is_the_old_one_or_the_new_one_and_no_half_takes_room(tmp_path):
    def half(new: Path) -> None:
        new.write_text("hal")
        raise OSError("no more room")

    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(OSError, match="no more room"):
        write_whole(path, half)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.txt", "old")]
    write_whole(path, lambda new: new.write_text("new"))
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("a.txt", "new")]


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    write_whole(tmp_path / "run" / "a.txt", lambda new: new.write_text("it"))
    assert (tmp_path / "run" / "a.txt").read_text() == "it"


@pytest.fixture
def grown(tmp_path) -> Growing:
    """A file of two parts of ten bytes."""
    growing = Growing(tmp_path / "run" / "a.txt", lambda number: b"part %4d\n" % number)
    growing.grow(2)
    return growing


def test_a_file_that_grows_has_each_part_once_and_never_a_half(grown):
    for room in (20, 25, 35):
        with full_disk(room=room), pytest.raises(OSError, match="File too large"):
            grown.grow(4)
        assert grown.path.read_bytes() == b"part    0\npart    1\n"
    grown.grow(4)
    grown.grow(4)
    assert grown.path.read_bytes() == b"part    0\npart    1\npart    2\npart    3\n"


@pytest.mark.parametrize(
    "harm", ["truncated", "removed", "its folder removed", "a disk that was full at once"]
)
def test_a_file_that_is_not_as_it_was_left_begins_anew(grown, harm):
    if harm == "truncated":
        grown.path.write_bytes(b"part")
    elif harm == "removed":
        grown.path.unlink()
    else:
        shutil.rmtree(grown.path.parent)
    if harm == "a disk that was full at once":
        with full_disk(room=15), pytest.raises(OSError, match="File too large"):
            grown.grow(3)
        assert grown.path.read_bytes() == b""
    grown.grow(3)
    assert grown.path.read_bytes() == b"part    0\npart    1\npart    2\n"


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
