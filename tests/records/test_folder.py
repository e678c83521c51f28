"""One run at a time in a folder, and a finished one is kept."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pipetrain.errors import ConfigError
from pipetrain.records import folder
from pipetrain.records.folder import LOCK, claim, clear, discard, prove_shared, rename_after


def test_a_folder_is_made_and_taken(tmp_path):
    with claim(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()


def take(where: Path, **words) -> None:
    """Claim a folder for a moment."""
    with claim(where, **words):
        pass


@contextmanager
def held(where: Path, seconds: float = 60.0) -> Iterator[None]:
    """Let another process hold a folder, for some seconds at most."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with claim(where):
            os.write(write, b"!")
            time.sleep(seconds)
        os._exit(0)
    os.read(read, 1)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_in_use_is_refused_until_its_run_has_ended(tmp_path):
    with held(tmp_path), pytest.raises(ConfigError, match="is in use by a run that is going on"):
        take(tmp_path, patience_s=0.05)
    take(tmp_path)
    with held(tmp_path, 0.3):
        take(tmp_path, patience_s=20)


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


def test_a_finished_run_is_not_written_over_but_by_one_that_lengthens_it(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds a finished run; choose another, or remove it"):
        take(tmp_path)
    take(tmp_path, resuming=True, finished=True)
    assert (tmp_path / "summary.json").read_text() == "{}"


def test_what_an_unfinished_run_left_is_removed_and_nothing_else(tmp_path):
    (tmp_path / "stage0").mkdir()
    (tmp_path / "metrics.csv").mkdir()  # it cannot be removed, and is left for whoever writes there
    events = "events.out.tfevents.1.host"
    for name in ("profile.json", "trace.json", events, f"stage0/{events}", "notes.txt"):
        (tmp_path / name).write_text("old")
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["metrics.csv", "notes.txt", "stage0"]


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


def test_a_folder_is_called_after_the_data_set_really_used_unless_it_has_a_name_of_its_own(tmp_path):
    folder = tmp_path / "cifar10-vgg16-1f1b-now"
    folder.mkdir()
    assert rename_after(folder, "cifar10", "cifar10") == folder
    assert rename_after(folder, "cifar10", "digits") == tmp_path / "digits-vgg16-1f1b-now"
    assert (tmp_path / "digits-vgg16-1f1b-now").is_dir()
    assert rename_after(tmp_path, "cifar10", "digits") == tmp_path


# The lock


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    target = tmp_path / "somebody's"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(target)
    with pytest.raises(ConfigError, match=f"run_dir={tmp_path}/run cannot be written: "):
        take(tmp_path / "run")
    assert not target.exists()


def test_a_rank_that_does_not_see_the_folder_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "LATE_S", 0.1)
    take(tmp_path / "here")
    prove_shared(tmp_path / "here", rank=3)
    with pytest.raises(ConfigError, match=r"rank 3 on \S+ does not see \S+, which rank 0 has written: "):
        prove_shared(tmp_path / "elsewhere", rank=3)


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


def test_the_folder_of_a_refused_run_goes_unless_there_is_more_or_another_run(tmp_path):
    def run(name: str, *files: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for file in ("run.log", *files):
            (folder / file).touch()
        return folder

    refused, full, busy = run("refused", LOCK), run("full", "config.yaml"), run("busy")
    with held(busy):
        for folder in (refused, full, busy, tmp_path / "none"):
            discard(folder, "run.log")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["busy", "full"]
    assert (busy / "run.log").exists()


def test_the_folder_of_runs_goes_with_the_only_one(tmp_path):
    for name in ("first", "second"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    discard(tmp_path / "runs" / "first", "run.log")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["second"]
    discard(tmp_path / "runs" / "second", "run.log")
    assert list(tmp_path.iterdir()) == []
