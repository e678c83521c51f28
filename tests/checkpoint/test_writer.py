"""Saving beside training: what fails is said, and what was saved before stays as it was."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from threading import Timer

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from pipetrain import TrainingStopped
from pipetrain.checkpoint import files, writer
from pipetrain.checkpoint.files import CHECKPOINTS, Manifest, Position, read_whole
from pipetrain.checkpoint.writer import Files, Writer
from pipetrain.errors import ChannelError
from pipetrain.runtime.comm.collectives import Ranks, World
from pipetrain.runtime.comm.rendezvous import make_group
from tests.support import DEADLINE_S
from tests.support.process_ranks import run_world
from tests.support.processes import checkpoints
from tests.support.thread_ranks import SavingRanks


def state(rank: int) -> Files:
    return {f"stage-{rank}.safetensors": {"model/a": torch.arange(100.0)}}


def manifest(update: int, ranks: int) -> Manifest:
    return Manifest("r", Position(0, 0, update), {}, {"placement": list(range(ranks))}, {})


def save(folders: list[Path], update: int = 6, keep: int = 2) -> list[Future[Path]]:
    """Save by one rank for each folder."""
    ranks = SavingRanks.of(len(folders))
    writers = [Writer(folder, rank, keep) for folder, rank in zip(folders, ranks, strict=True)]
    saves = [
        each.save(manifest(update, len(folders)), lambda rank=rank: state(rank))
        for rank, each in enumerate(writers)
    ]
    for each in writers:
        each.close()
    return saves


def failures(saves: list[Future[Path]]) -> str:
    """What all ranks are told."""
    (said,) = {str(save.exception()) for save in saves}
    assert all(isinstance(save.exception(), TrainingStopped) for save in saves)
    return said


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / CHECKPOINTS).iterdir())


def test_all_parts_come_together_and_the_newest_are_kept(tmp_path):
    for update in range(4):
        first, second = save([tmp_path] * 2, update)
        folder = tmp_path / CHECKPOINTS / f"update-{update:08d}"
        assert first.result() == second.result() == folder
        assert sorted(read_whole(folder).parts) == ["stage-0.safetensors", "stage-1.safetensors"]
    assert names(tmp_path) == ["update-00000002", "update-00000003"]


def test_a_full_disk_on_any_rank_is_said_and_the_one_before_stays(tmp_path, monkeypatch):
    save([tmp_path] * 2, 5)
    write = writer.write_part

    def full(folder, name, *rest):
        if name == "stage-1.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, name, *rest)

    monkeypatch.setattr(writer, "write_part", full)
    said = failures(save([tmp_path] * 2, 6))
    assert said.startswith("rank 1 cannot write ")
    assert said.endswith("No space left on device")
    assert names(tmp_path) == ["update-00000005"]
    read_whole(tmp_path / CHECKPOINTS / "update-00000005")


def test_what_cannot_be_saved_is_said_and_the_next_one_may_be(tmp_path):
    def strange() -> Files:
        raise TypeError("values of type set")

    mine = Writer(tmp_path, *SavingRanks.of(1), keep=1)
    first, second = mine.save(manifest(6, 1), strange), mine.save(manifest(7, 1), lambda: state(0))
    mine.close()
    assert failures([first]) == "the optimizer of rank 0 remembers values of type set"
    assert second.result().name == "update-00000007"
    assert names(tmp_path) == ["update-00000007"]


def dying(world: World, store: dist.Store, folder: Path) -> tuple[str, str]:
    """What the main thread of rank 0 is told, and what is told of the save, where rank 1 has died."""
    make_group(world, store, timedelta(seconds=DEADLINE_S))
    mine = Writer(folder, Ranks(world, DEADLINE_S, dist.group.WORLD), keep=1)
    if world.rank:
        mine.close()  # as the save of rank 0 begins with that, too
        sys.exit()
    saving = mine.save(manifest(6, 2), lambda: state(0))
    with pytest.raises(ChannelError) as lost:
        mine.close()
    return str(lost.value), str(saving.exception(DEADLINE_S))


def test_a_rank_that_dies_while_it_saves_is_not_waited_for(tmp_path):
    (main, beside), _ = run_world(dying, 2, tmp_path)
    assert main.startswith("rank 0 could not receive the end of a save from rank 1: ")
    assert beside.startswith("rank 0 could not receive what they wrote of update-00000006 from rank 1: ")
    assert names(tmp_path) == ["update-00000006.partial"]


@pytest.mark.parametrize("late", [False, True])
def test_a_folder_that_machines_do_not_share_is_said_unless_its_file_comes_late(late, tmp_path, monkeypatch):
    """Two machines whose run folders are not the same, each with a checkpoint from before."""
    monkeypatch.setattr(writer, "SEEN_S", DEADLINE_S if late else 0.1)
    folders = here, there = [tmp_path / "here", tmp_path / "there"]
    for folder in folders:
        save([folder] * 2, 5)
    new = CHECKPOINTS + "/update-00000006.partial"
    if late:  # as a network shows it
        Timer(0.3, lambda: shutil.copy(there / new / "stage-1.safetensors", here / new)).start()
        assert save(folders, keep=1)[0].result().parent == here / CHECKPOINTS
    else:
        said = failures(save(folders, keep=1))
        assert said.startswith("rank 0 does not see all of stage-1.safetensors, which another rank has wri")
        assert names(there) == ["update-00000005"]
    kept = f"update-0000000{6 if late else 5}"
    assert names(here) == [kept]
    read_whole(here / CHECKPOINTS / kept)


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
        files._flush, files._part = dying(files._flush), dying(files._part)
        os.replace, os.unlink, os.rmdir = dying(os.replace), dying(os.unlink), dying(os.rmdir)
        shutil.rmtree = dying(shutil.rmtree)
        try:
            save([folder], keep=1)
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
            save([folder])
        if before == "damaged":
            (folder / CHECKPOINTS / "update-00000006" / "manifest.json").write_text("no more")
        if before != "whole":
            save([folder], 5)
        over = die_at(step, folder)
        died += not over
        found = checkpoints(folder)
        assert found, step
        if over:
            break
        save([folder], 7, keep=3)  # the next save tidies up
        known = {"update-00000005", "update-00000006", "update-00000006-2", "update-00000007"}
        assert set(names(folder)) <= known, step
        if before != "damaged":
            assert len(found) + 1 == len(files.folders(folder / CHECKPOINTS)), step
    assert over
    assert died >= 6
    assert names(folder) == ["update-00000006"]
