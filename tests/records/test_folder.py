"""One run at a time in a folder, and a finished one is kept."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import pytest

from pipetrain.errors import ConfigError
from pipetrain.records.folder import KEY_BYTES, LOCK, claim, clear, discard, read_key, rename_after
from pipetrain.seal import SECRET


def test_a_folder_is_made_and_taken(tmp_path):
    with claim(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()


def take(folder: Path, **words) -> str:
    """Claim a folder for a moment; return its key."""
    with claim(folder, **words) as key:
        return key


def test_a_folder_in_use_is_refused_until_its_run_has_ended(tmp_path):
    with claim(tmp_path), pytest.raises(ConfigError, match="is in use by a run that is going on"):
        take(tmp_path)
    take(tmp_path)


@pytest.mark.parametrize(("taken", "says"), [("run", "File exists"), ("run/.lock", "Is a directory")])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, taken, says):
    if taken == "run":
        (tmp_path / taken).touch()
    else:
        (tmp_path / taken).mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=f"run_dir={tmp_path}/run cannot be written: {says}; choose another"
    ):
        take(tmp_path / "run")


def test_a_finished_run_is_not_written_over(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a finished run; choose another, or remove it"):
        take(tmp_path)
    assert (tmp_path / "summary.json").read_text() == "{}"


def test_what_an_unfinished_run_left_is_removed_and_nothing_else(tmp_path):
    for name in ("metrics.csv", "profile.json", "trace.json", "events.out.tfevents.1.host", "notes.txt"):
        (tmp_path / name).write_text("old")
    with claim(tmp_path):
        clear(tmp_path)
        assert [path.name for path in tmp_path.iterdir() if path.name != ".lock"] == ["notes.txt"]


def test_what_cannot_be_removed_is_left_for_whoever_writes_there(tmp_path):
    (tmp_path / "metrics.csv").mkdir()
    (tmp_path / "trace.json").write_text("old")
    clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_checkpoints_are_gone_on_from_or_kept(tmp_path):
    (tmp_path / "checkpoints" / "update-00000007").mkdir(parents=True)
    with pytest.raises(
        ConfigError, match="holds the checkpoints of a run that did not finish; go on with res"
    ):
        take(tmp_path)
    take(tmp_path, resuming=True)


def test_what_a_crash_left_of_a_checkpoint_is_none(tmp_path):
    for name in ("update-00000007.partial", "update-00000007-2.partial"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    take(tmp_path)


def test_a_folder_is_called_after_the_data_set_really_used(tmp_path):
    folder = tmp_path / "cifar10-vgg16-1f1b-now"
    folder.mkdir()
    assert rename_after(folder, "cifar10", "cifar10") == folder
    assert rename_after(folder, "cifar10", "digits") == tmp_path / "digits-vgg16-1f1b-now"
    assert (tmp_path / "digits-vgg16-1f1b-now").is_dir()


def test_a_folder_with_a_name_of_its_own_keeps_it(tmp_path):
    assert rename_after(tmp_path, "cifar10", "digits") == tmp_path


# The lock, and the key in it


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    """What it led to was truncated."""
    target = tmp_path / "somebody's"
    target.write_text("precious")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(target)
    with pytest.raises(ConfigError, match=f"run_dir={tmp_path}/run cannot be written: "):
        take(tmp_path / "run")
    assert target.read_text() == "precious"
    assert read_key(tmp_path / "run") == ""


def test_a_pipe_in_its_place_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(ConfigError, match="cannot be written: "):
        take(tmp_path)
    assert read_key(tmp_path) == ""


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o666])
def test_nobody_else_may_read_the_lock_and_so_hold_it_or_know_its_key(tmp_path, mode):
    """Of an older file, too; its key is then another."""
    (tmp_path / LOCK).write_text("ab" * KEY_BYTES)
    (tmp_path / LOCK).chmod(mode)
    with claim(tmp_path) as key:
        assert stat.S_IMODE((tmp_path / LOCK).stat().st_mode) == 0o600
        assert key == read_key(tmp_path)
        assert (key == "ab" * KEY_BYTES) == (mode == 0o600)
        assert len(key) == 2 * KEY_BYTES


def test_a_key_stays_that_of_its_folder(tmp_path):
    """So that a run that is restarted knows what it said before."""
    first = take(tmp_path)
    assert take(tmp_path.with_name("other")) != first
    assert take(tmp_path, resuming=True) == first


@pytest.mark.parametrize("text", ["", "x" * 2 * KEY_BYTES, "ab"])
def test_what_is_no_key_is_made_anew(tmp_path, text):
    (tmp_path / LOCK).touch(0o600)
    (tmp_path / LOCK).write_text(text)
    assert read_key(tmp_path) == ""
    with claim(tmp_path) as key:
        assert key == read_key(tmp_path) != ""


def test_a_key_that_others_can_read_is_none_without_a_secret(tmp_path, monkeypatch):
    """As on a file system that keeps no permissions."""
    monkeypatch.setattr("os.fchmod", lambda handle, mode: None)
    (tmp_path / LOCK).touch()
    with claim(tmp_path) as key:
        assert (key, read_key(tmp_path)) == ("", "")
    monkeypatch.setenv(SECRET, "some random words")
    with claim(tmp_path) as key:
        assert key == read_key(tmp_path) != ""


def test_a_process_that_was_forked_off_holds_no_lock(tmp_path):
    """A data worker may outlive the process that it works for, and the run could not be started again."""
    claimed = ExitStack()
    claimed.enter_context(claim(tmp_path))
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)  # until the parent lets it go
        os._exit(0)
    os.close(read)
    try:
        claimed.close()
        take(tmp_path, patience_s=20)  # as soon as the child has begun
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_a_program_that_was_started_holds_none_either(tmp_path):
    claimed = ExitStack()
    claimed.enter_context(claim(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, close_fds=False
    ):
        claimed.close()
        take(tmp_path, patience_s=5)


def test_a_run_that_is_about_to_end_is_waited_for(tmp_path):
    claimed = ExitStack()
    claimed.enter_context(claim(tmp_path))
    Timer(0.3, claimed.close).start()
    with pytest.raises(ConfigError, match="is in use by a run that is going on"):
        take(tmp_path, patience_s=0.05)
    take(tmp_path, patience_s=20)


def test_a_finished_run_is_taken_by_one_that_lengthens_it(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    take(tmp_path, resuming=True, finished=True)
    assert (tmp_path / "summary.json").exists()


def test_the_folder_of_a_refused_run_goes_unless_there_is_more_or_another_run(tmp_path):
    def run(name: str, *files: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in ("run.log", *files):
            (folder / file).touch()
        return folder

    refused, full, held = run("refused", LOCK), run("full", "config.yaml"), run("held")
    with claim(held):
        for folder in (refused, full, held, tmp_path / "none"):
            discard(folder, "run.log")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "held"]
    assert (held / "run.log").exists()


def test_the_folder_of_runs_goes_with_the_only_one(tmp_path):
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    discard(tmp_path / "runs" / "first", "run.log")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["second"]
    discard(tmp_path / "runs" / "second", "run.log")
    assert list(tmp_path.iterdir()) == []
