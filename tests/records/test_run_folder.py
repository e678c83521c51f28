"""One run at a time in a folder, and a finished one is kept."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pipetrain.errors import ConfigError
from pipetrain.records import run_folder as folder
from pipetrain.records.run_folder import LOCK, Before, claim, clear, discard, rename_after, require_shared
from tests.support import DEADLINE_S


def take(where: Path, **words) -> None:
    """Claim a folder for a moment."""
    with claim(where, **words):
        assert where.is_dir()


@contextmanager
def held(where: Path, seconds: float = DEADLINE_S) -> Iterator[None]:
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
    run = tmp_path / "a" / "b"
    with held(run), pytest.raises(ConfigError, match="is in use by a run that is going on"):
        take(run, patience_s=0.05)
    take(run)
    with held(run, 0.3):
        take(run, patience_s=20)


@pytest.mark.parametrize(
    ("there", "says", "unless"),
    [
        (
            "summary.json",
            "holds a finished run: go on with resume=auto, the same options and more epo",
            {"finished": True},
        ),
        ("checkpoints/update-00000007", "holds the checkpoints of a run that did", {"resuming": True}),
        ("checkpoints/update-00000007.partial", "", {}),  # what a crash left
        (".lock", "cannot be written: Is a directory; choose another", None),
    ],
)
def test_a_folder_that_is_not_free_is_refused(tmp_path, there, says, unless):
    path = tmp_path / "run" / there
    path.mkdir(parents=True)
    if says:
        with pytest.raises(ConfigError, match=f"run_dir={tmp_path}/run {says}"):
            take(tmp_path / "run")
    if unless is not None:
        take(tmp_path / "run", **unless)
    assert path.exists()


def test_what_an_unfinished_run_left_is_removed_and_nothing_else(tmp_path):
    (tmp_path / "stage0").mkdir()
    (tmp_path / "metrics.csv").mkdir()  # it cannot be removed, and is left for whoever writes there
    events = "events.out.tfevents.1.host"
    for name in ("profile.json", "trace.json", events, f"stage0/{events}", "notes.txt"):
        (tmp_path / name).write_text("old")
    clear(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["metrics.csv", "notes.txt", "stage0"]


def test_a_folder_is_called_after_the_data_set_really_used_unless_it_has_a_name_of_its_own(tmp_path):
    folder = tmp_path / "cifar10-vgg16-1f1b-now"
    folder.mkdir()
    assert rename_after(folder, "cifar10", "cifar10") == folder
    assert rename_after(folder, "cifar10", "digits") == tmp_path / "digits-vgg16-1f1b-now"
    assert rename_after(tmp_path, "cifar10", "digits") == tmp_path


def test_a_rank_that_does_not_see_the_folder_refuses(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "LATE_S", 0.1)
    take(tmp_path / "here")
    require_shared(tmp_path / "here")
    with pytest.raises(ConfigError, match=r"\S+ does not see \S+, which rank 0 has written: "):
        require_shared(tmp_path / "elsewhere")


def test_a_refused_run_leaves_what_was_there_and_takes_what_it_made(tmp_path):
    empty, full, new = tmp_path / "empty", tmp_path / "full", tmp_path / "new" / "deep"
    empty.mkdir()
    full.mkdir()
    (full / "notes.txt").touch()
    (full / "run.log").touch()  # of an earlier run
    for path in (empty, full, new):
        with pytest.raises(ConfigError), claim(path):
            raise ConfigError("the loader has no batch")
    assert [*empty.iterdir()] == []
    assert sorted(path.name for path in full.iterdir()) == ["notes.txt", "run.log"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]
    before = Before.snapshot(full)
    (full / LOCK).touch()
    discard(full, before, "run.log")
    assert sorted(path.name for path in full.iterdir()) == ["notes.txt", "run.log"]


def test_a_process_that_was_forked_off_holds_no_lock(tmp_path):
    """A data worker may outlive the process that it works for, and the run could not be started again."""
    read, write = os.pipe()
    with claim(tmp_path):
        child = os.fork()
        if not child:
            os.write(write, b"!")
            time.sleep(DEADLINE_S)
            os._exit(0)
    os.read(read, 1)
    try:
        take(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_lock_stays_whatever_opens_and_closes_its_file(tmp_path):
    """A copy of the folder that after_epoch makes, say."""
    with claim(tmp_path / "run"):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        child = os.fork()
        if not child:
            with suppress(ConfigError):
                take(tmp_path / "run")
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


def test_the_folder_of_a_refused_run_goes_unless_there_is_more_or_another_run(tmp_path):
    runs = tmp_path / "runs"
    before = {name: Before.snapshot(runs / name) for name in ("refused", "full", "busy", "none")}
    for name, files in {"refused": [LOCK], "full": ["config.yaml"], "busy": []}.items():
        (runs / name).mkdir(parents=True)
        for file in ("run.log", *files):
            (runs / name / file).touch()
    with held(runs / "busy"):
        for name in ("refused", "full", "busy", "none"):
            discard(runs / name, before[name], "run.log")
    assert sorted(path.name for path in runs.iterdir()) == ["busy", "full"]
    (runs / "full" / "config.yaml").unlink()
    for name in ("full", "busy"):
        assert runs.exists()
        discard(runs / name, before[name], "run.log")
    assert list(tmp_path.iterdir()) == []  # that of runs goes with the last one
