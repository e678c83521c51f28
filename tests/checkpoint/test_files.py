"""A checkpoint on disk: whole or refused, whatever happened to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipetrain.checkpoint import files
from pipetrain.checkpoint.epoch_record import Progress
from pipetrain.checkpoint.files import (
    Manifest,
    Position,
    folders,
    prune,
    publish,
    read_whole,
    remove_unfinished,
    write_part,
)
from pipetrain.checkpoint.tensor_reader import read_files
from pipetrain.typed_json import DamagedCheckpoint, OtherFormat
from tests.support.run_files import figures, forge, put

TENSORS = {"model/a": torch.arange(1000.0), "model/b": torch.tensor(3)}
STAGE = "stage-0.safetensors"


def saved(checkpoints: Path, update: int = 7) -> Path:
    partial = checkpoints / f"update-{update:08d}.partial"
    part = write_part(partial, STAGE, TENSORS)
    known = Progress([figures(1)], losses=[2.5, 1.5])
    manifest = Manifest("r", Position(1, 2, update), {"a": 1}, {"placement": [0]}, {"seed": 1}, known)
    return publish(partial, replace(manifest, parts={STAGE: part}))


def test_what_is_written_is_read(tmp_path):
    folder = saved(tmp_path)
    manifest = read_whole(folder)
    assert (manifest.run, manifest.position, folder.name) == ("r", Position(1, 2, 7), "update-00000007")
    assert manifest.progress == Progress([figures(1)], losses=[2.5, 1.5])
    tensors = read_files(folder, manifest.parts)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_what_is_written_may_be_read_by_whom_the_umask_lets(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        folder = saved(tmp_path)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == {
        STAGE: mode,
        "manifest.json": mode,
    }


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


OTHER = "has another size or checksum than its manifest says"
DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: flip(f / STAGE, 2000), OTHER),
    (lambda f: (f / STAGE).unlink(), "cannot be read: No such file"),
    (lambda f: (f / "manifest.json").unlink(), "manifest.json cannot be read"),
    (lambda f: replaced(f / STAGE, os.mkfifo), "cannot be read: it is no regular file"),
    (lambda f: replaced(f / "manifest.json", os.mkfifo), "cannot be read: it is no regular file"),
    (lambda f: replaced(f / STAGE, lambda path: path.symlink_to("/dev/zero")), "it is no regular file"),
    (lambda f: os.truncate(f / STAGE, 2**40), OTHER),  # sparse: to sum it up would take an hour
    (lambda f: forge(f, put("pipetrain_checkpoint", to=4)), "a checkpoint of an older format, 4, and pipe"),
    (lambda f: forge(f, put("pipetrain_checkpoint", to=6)), "a checkpoint of a newer format, 6, and pipe"),
    (lambda f: (f / "manifest.json").write_text("{}"), "is no manifest of a checkpoint"),
    (
        lambda f: flip(f / "manifest.json", (f / "manifest.json").read_text().index('"r"') + 1),
        "has another chec",
    ),
    (lambda f: forge(f, put("position", "epoch", to="1")), "position: epoch must be of type int"),
    (lambda f: forge(f, put("position", "update", to=8)), "is of another update than its folder's name says"),
    (
        lambda f: forge(f, put("parts", to={"../../secret": {"sha256": "", "nbytes": 1}})),
        "names files outside of its folder",
    ),
]


@pytest.mark.parametrize(("harm", "says"), DAMAGE)
def test_damage_is_named_and_the_one_before_is_found(harm, says, tmp_path):
    earlier, folder = saved(tmp_path, 3), saved(tmp_path, 7)
    harm(folder)
    with pytest.raises(OtherFormat if "format" in says else DamagedCheckpoint, match=says):
        read_whole(folder)
    assert folders(tmp_path) == [folder, earlier]
    read_whole(earlier)


def test_the_newest_and_the_best_are_kept_and_what_this_run_has_not_come_to_yet(tmp_path):
    """It passed over damaged ones, and saves before it is where they were."""
    folders = [saved(tmp_path, update) for update in (1, 2, 3, 5, 8, 9)]
    for damaged in folders[4:]:
        (damaged / "manifest.json").unlink()
    others = {"update-7.partial", "update-7.old", "update-x"}
    for name in others:
        os.rename(saved(tmp_path / "other"), tmp_path / name)
    prune(folders[3], 1, folders[1].name)
    assert files.folders(tmp_path) == [folders[i] for i in (5, 4, 3, 1)]
    assert {path.name for path in tmp_path.iterdir()} >= others


def test_the_newest_is_that_of_the_most_updates_and_one_that_is_saved_again_replaces_itself(tmp_path):
    folders = [saved(tmp_path, update) for update in (10**8, 99_999_999, 10**9)]
    again = folders[0].with_name(f"{folders[0].name}-2")
    shutil.copytree(folders[0], again)
    assert files.folders(tmp_path) == [folders[2], again, folders[0], folders[1]]
    assert saved(tmp_path, 10**8) == folders[0]
    assert files.folders(tmp_path) == [folders[2], folders[0], folders[1]]


def test_what_a_crash_left_is_removed_and_nothing_else(tmp_path):
    folder = saved(tmp_path)
    mine = tmp_path / "update-00000011.partial"
    for name in ("update-00000007.partial", "update-00000009-2.partial", mine.name):
        os.rename(saved(tmp_path / "other"), tmp_path / name)
    (tmp_path / "notes.txt").write_text("mine")
    remove_unfinished(tmp_path, without=mine)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["notes.txt", "other", folder.name, mine.name]
    read_whole(folder)
