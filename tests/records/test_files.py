"""What cannot be written is said once, costs nothing else, and is written when there is room."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from omegaconf import OmegaConf

from pipetrain.config.choices import conf_dir
from pipetrain.records.files import Console, Files, LogFile
from tests.support.run_files import full_disk

SAID = "pipetrain: {} cannot be written: {}; training goes on, and it is written again when there is room"


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_what_fails_is_said_once_stops_nothing_else_leaves_the_old_file_and_is_tried_again(tmp_path, caplog):
    """And is said again after there was room."""
    folder = tmp_path / "removed"  # which is made again
    files, written = Files(folder), []
    for old, text in (("", "one"), ("one", "two")):
        with full_disk(room=len(old)):
            files.text("a.txt", text + old)
            files.due("fine", written.append)
            for _ in range(3):
                files.write()
        assert [file.read_text() for file in folder.iterdir()] == [old] * bool(old)
        assert files.failed == {"a.txt": "File too large"}
        files.text("a.txt", text)
        files.write()
        assert ((folder / "a.txt").read_text(), files.failed) == (text, {})
    assert written == [folder / "fine"] * 2
    assert said(caplog) == [SAID.format(folder / "a.txt", "File too large")] * 2


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
    with full_disk():
        log.warning("again")
    assert said(caplog)[-2:] == [warning, "again"]
    assert capfd.readouterr() == ("", "")


def test_a_log_goes_with_its_folder_which_gets_another_name_or_goes(log, tmp_path, caplog):
    """As after the data set really used; that of a refused run goes, and its log does not come back."""
    folder, handler = tmp_path / "cifar10-mlp", LogFile(str(tmp_path / "cifar10-mlp" / "run.log"))
    folder.mkdir()
    log.addHandler(handler)
    log.warning("first")
    renamed = folder.rename(tmp_path / "digits-mlp")
    log.warning("second")
    assert (renamed / "run.log").read_text() == "first\nsecond\n"
    (renamed / "run.log").unlink()
    log.warning("refused")
    log.removeHandler(handler)
    handler.close()
    assert [*renamed.iterdir()] == []
    assert said(caplog) == ["first", "second", "refused"]


def test_a_line_that_nobody_reads_is_no_error_and_the_rest_goes_nowhere(capfd, monkeypatch):
    """As after `| head -1`, where Python's handler prints a traceback for each."""
    reader, writer = os.pipe()
    os.close(reader)
    logger = logging.Logger("unread")
    with open(writer, "w") as unread:
        monkeypatch.setattr("sys.stdout", unread)
        logger.addHandler(Console(unread))
        for _ in range(3):
            logger.warning("a line")
        unread.write("printed")  # flushed as it is closed, which fails where the pipe is still there
    assert capfd.readouterr() == ("", "")
    assert (
        OmegaConf.load(conf_dir() / "config.yaml").hydra.job_logging.handlers.console["class"]
        == f"{Console.__module__}.Console"
    )


def test_a_log_takes_what_is_no_text(tmp_path):
    LogFile(str(tmp_path / "run.log")).emit(logging.makeLogRecord({"msg": "a\udcff"}))
    assert (tmp_path / "run.log").read_text() == "a\\udcff\n"


def test_an_error_that_ends_the_run_is_not_followed_by_word_that_it_goes_on(log, tmp_path, caplog):
    (tmp_path / "run.log").mkdir()  # a log that cannot be opened is like one that cannot be written
    log.error("the end")
    assert said(caplog) == ["the end"]
    (tmp_path / "run.log").rmdir()


def test_a_message_whose_arguments_do_not_fit_is_told_and_the_log_goes_on(tmp_path, capsys):
    handler = LogFile(str(tmp_path / "run.log"))
    for message, arguments in (("%d %d", ("x",)), ("%d", (3,))):
        handler.emit(logging.makeLogRecord({"msg": message, "args": arguments}))
    handler.close()
    assert (tmp_path / "run.log").read_text() == "3\n"
    assert "Logging error" in capsys.readouterr().err
