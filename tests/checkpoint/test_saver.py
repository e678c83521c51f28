"""Saving beside training: what fails is said, and what was saved before stays as it was."""

from __future__ import annotations

import errno
import os
import shutil
import time
from pathlib import Path
from threading import Timer

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from pipetrain.checkpoint import files, saver
from pipetrain.checkpoint.files import CHECKPOINTS, Manifest, Position, newest_first, read_whole
from pipetrain.checkpoint.saver import Saver, Snapshot


def snapshot(rank: int) -> Snapshot:
    return Snapshot({f"stage-{rank}.safetensors": {"model/a": torch.arange(100.0)}}, {})


def manifest(update: int, ranks: int) -> Manifest:
    return Manifest("r", Position(0, 0, update), {}, {"placement": list(range(ranks))}, {}, {}, {})


def save(folder: Path, update: int, ranks: int = 2, silent: bool = False, best: bool = False) -> Saver:
    store = dist.HashStore()
    savers = [Saver(folder, rank, store, keep=2, timeout=1) for rank in range(ranks)]
    for rank, one in enumerate(savers):
        if rank == 0 or not silent:
            one.save(update, snapshot(rank), None if rank else manifest(update, ranks), best)
    for one in savers:
        one.close()
    return savers[0]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / CHECKPOINTS).iterdir())


def test_all_parts_come_together(tmp_path):
    save(tmp_path, 5, best=True)
    whole = read_whole(tmp_path / CHECKPOINTS / "update-00000005")
    assert sorted(whole.parts) == ["stage-0.safetensors", "stage-1.safetensors"]
    assert names(tmp_path) == ["best", "update-00000005"]


def test_a_full_disk_on_any_rank_is_said_and_the_one_before_stays(tmp_path, monkeypatch, caplog):
    save(tmp_path, 5)
    write = saver.write_part

    def full(folder, name, *rest):
        if name == "stage-1.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, name, *rest)

    monkeypatch.setattr(saver, "write_part", full)
    assert save(tmp_path, 6).not_saved == 6
    assert "the checkpoint of update 6 was NOT saved: rank 1 cannot write" in caplog.text
    assert "No space left on device" in caplog.text
    assert names(tmp_path) == ["update-00000005"]
    read_whole(tmp_path / CHECKPOINTS / "update-00000005")


def test_what_cannot_be_saved_is_said_and_the_next_one_may_be(tmp_path, caplog):
    one = Saver(tmp_path, 0, None, keep=1, timeout=1)
    one.save(6, Snapshot({}, {}, "the optimizer of rank 0 remembers this"), manifest(6, 1), best=False)
    one.wait()
    assert one.not_saved == 6
    assert "update 6 was NOT saved: the optimizer of rank 0 remembers this; training goes" in caplog.text
    one.save(7, snapshot(0), manifest(7, 1), best=False)
    one.close()
    assert one.not_saved is None
    assert names(tmp_path) == ["update-00000007"]


def test_a_rank_that_writes_nothing_is_named(tmp_path, caplog):
    assert save(tmp_path, 6, silent=True).not_saved == 6
    assert "rank 1 wrote nothing for 1 s" in caplog.text
    assert names(tmp_path) == []


@pytest.fixture
def apart(tmp_path) -> list[Path]:
    """Two machines whose run folders are not the same, each with a checkpoint from before."""
    folders = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        save(folder, 5)
    return folders


def save_apart(folders: list[Path], update: int = 6) -> Saver:
    store = dist.HashStore()
    savers = [Saver(folder, rank, store, keep=1, timeout=1) for rank, folder in enumerate(folders)]
    for rank, one in enumerate(savers):
        one.save(update, snapshot(rank), None if rank else manifest(update, 2), best=True)
    for one in savers:
        one.close()
    return savers[0]


def test_a_folder_that_machines_do_not_share_is_said_and_nothing_is_pruned_or_left(apart, caplog):
    started = time.monotonic()
    assert save_apart(apart).not_saved == 6
    assert time.monotonic() - started < 60
    assert (
        "the checkpoint of update 6 was NOT saved: rank 1 has written stage-1.safetensors, and rank 0 does "
        "not see it" in caplog.text
    )
    assert "run_dir must be a folder that all machines share" in caplog.text
    for folder in apart:
        assert names(folder) == ["update-00000005"]
        read_whole(folder / CHECKPOINTS / "update-00000005")


def test_a_part_of_another_size_is_not_published(tmp_path, monkeypatch, caplog):
    write = saver.write_part

    def truncated(folder, name, *rest):
        part = write(folder, name, *rest)
        os.truncate(folder / name, 10)
        return part

    monkeypatch.setattr(saver, "write_part", truncated)
    assert save(tmp_path, 6).not_saved == 6
    assert "stage-0.safetensors has 10 bytes instead of" in caplog.text
    assert names(tmp_path) == []


def test_what_a_network_shows_late_is_waited_for(apart):
    here, there = (folder / CHECKPOINTS / "update-00000006.partial" for folder in apart)
    Timer(0.3, lambda: shutil.copy(there / "stage-1.safetensors", here)).start()
    assert save_apart(apart).not_saved is None
    assert names(apart[0]) == ["best", "update-00000006"]
    read_whole(apart[0] / CHECKPOINTS / "update-00000006")


def test_parts_that_are_not_those_of_the_placement_are_not_published(tmp_path, caplog):
    one = Saver(tmp_path, 0, None, keep=1, timeout=1)
    files = {**snapshot(0).files, **snapshot(1).files}
    one.save(6, Snapshot(files, {}), manifest(6, 1), best=False)
    one.close()
    assert one.not_saved == 6
    assert "the ranks wrote stage-0.safetensors, stage-1.safetensors instead of stage-0.saf" in caplog.text
    assert names(tmp_path) == []


def test_each_rank_removes_what_a_dead_run_left_in_its_view_of_the_folder(apart):
    for folder in apart:
        (folder / CHECKPOINTS / "update-00000009.partial").mkdir()
    for rank, folder in enumerate(apart):
        Saver(folder, rank, dist.HashStore(), keep=1, timeout=1).close()
        assert names(folder) == ["update-00000005"]


def die_at(step: int, folder: Path) -> bool:
    """Save update 6 in a process that dies before its `step`-th step; return whether it got past the end."""
    child = os.fork()
    if not child:
        left = step

        def dying(call):
            def wrapped(*arguments, **words):
                nonlocal left
                if not left:
                    os._exit(9)
                left -= 1
                return call(*arguments, **words)

            return wrapped

        safetensors.torch.save_file = dying(safetensors.torch.save_file)
        files._flush, files._checksum = dying(files._flush), dying(files._checksum)
        os.replace, os.unlink, os.rmdir = dying(os.replace), dying(os.unlink), dying(os.rmdir)
        shutil.rmtree = dying(shutil.rmtree)
        try:
            one = Saver(folder, 0, None, keep=1, timeout=1)
            one.save(6, snapshot(0), manifest(6, 1), best=True)
            one.close()
        finally:
            os._exit(0 if left else 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.processes
@pytest.mark.parametrize("before", ["", "damaged", "whole"])
def test_killed_at_any_step_of_a_save_there_is_a_whole_one(before, tmp_path):
    """`before`: what there is of the update that is saved; if it is whole there is no other."""
    died = 0
    for step in range(60):
        folder = tmp_path / str(step)
        if before:
            save(folder, 6, ranks=1)
        if before == "damaged":
            (folder / CHECKPOINTS / "update-00000006" / "manifest.json").write_text("no more")
        if before != "whole":
            save(folder, 5, ranks=1)
        over = die_at(step, folder)
        died += not over
        found = [found for _, found in newest_first(folder / CHECKPOINTS) if isinstance(found, Manifest)]
        assert found, step
        if over:
            break
        Saver(folder, 0, None, keep=1, timeout=1).close()  # the next start tidies up
        known = {"best", "best.partial", "update-00000005", "update-00000006", "update-00000006-2"}
        assert set(names(folder)) <= known, step
        if before != "damaged":
            assert len(found) == len(files.folders(folder / CHECKPOINTS)), step
    assert over
    assert died >= 8
    assert [name for name in names(folder) if name != "best.partial"] == ["best", "update-00000006"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_newest_are_kept(ranks, tmp_path):
    for update in range(4):
        save(tmp_path, update, ranks)
    assert names(tmp_path) == ["update-00000002", "update-00000003"]
