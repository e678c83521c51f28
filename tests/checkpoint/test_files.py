"""A checkpoint on disk: whole or refused, whatever happened to it, and never code."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipetrain.checkpoint import files
from pipetrain.checkpoint.files import (
    DamagedCheckpoint,
    Manifest,
    Position,
    Tensors,
    best,
    mark_best,
    newest_first,
    prune,
    publish,
    read_whole,
    remove_unfinished,
    write_part,
)

TENSORS = {"model/a": torch.arange(1000.0), "model/b": torch.tensor(3)}


def saved(checkpoints: Path, update: int = 7, run: str = "r") -> Path:
    partial = checkpoints / f"update-{update:08d}.partial"
    part = write_part(partial, "stage-0.safetensors", TENSORS, {"run": run})
    manifest = Manifest(
        run, Position(1, 2, update), {}, {"placement": [0]}, {}, {"records": {3: 1, 20: 2}}, {}
    )
    return publish(partial, replace(manifest, parts={"stage-0.safetensors": part}))


def test_what_is_written_is_read(tmp_path):
    folder = saved(tmp_path)
    manifest = read_whole(folder)
    assert (manifest.position, manifest.run, folder.name) == (Position(1, 2, 7), "r", manifest.name)
    tensors = Tensors(folder, list(manifest.parts))
    assert all(torch.equal(tensors[name], tensor) for name, tensor in TENSORS.items())
    assert sorted(tensors.names("model/")) == ["a", "b"]
    assert "model/a" in tensors
    assert "model/c" not in tensors


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a flipped bit": (
        lambda f: flip(f / "stage-0.safetensors", 2000),
        "has another checksum than its manifest",
    ),
    "a truncated file": (lambda f: (f / "stage-0.safetensors").write_bytes(b"x"), "has 1 bytes instead of"),
    "a missing file": (lambda f: (f / "stage-0.safetensors").unlink(), "cannot be read: No such file"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json cannot be read"),
    "half a manifest": (lambda f: (f / "manifest.json").write_text('{"run": '), "is no JSON"),
    "something else": (lambda f: (f / "manifest.json").write_text("[]"), "is no manifest"),
    "a newer version": (
        lambda f: (f / "manifest.json").write_text('{"pipetrain_checkpoint": 99}'),
        "is of version 99, and this pipetrain reads version 2",
    ),
    "a bit of the manifest": (
        lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text().replace('"r"', '"s"')),
        "has another checksum than it says",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_the_one_before_is_found(name, tmp_path):
    earlier, folder = saved(tmp_path, 3), saved(tmp_path, 7)
    harm, says = DAMAGE[name]
    harm(folder)
    with pytest.raises(DamagedCheckpoint, match=says):
        read_whole(folder)
    (newest, damage), (older, manifest) = newest_first(tmp_path)
    assert (newest, older) == (folder, earlier)
    assert isinstance(damage, DamagedCheckpoint)
    assert isinstance(manifest, Manifest)


@pytest.mark.parametrize("at", range(0, 4000, 97))
def test_every_bit_counts(at, tmp_path):
    folder = saved(tmp_path)
    flip(folder / "stage-0.safetensors", at)
    with pytest.raises(DamagedCheckpoint):
        read_whole(folder)


def test_the_manifest_of_another_run_is_no_manifest_of_these_files(tmp_path):
    other, mine = saved(tmp_path / "other", run="s"), saved(tmp_path / "mine")
    (mine / "manifest.json").write_bytes((other / "manifest.json").read_bytes())
    with pytest.raises(DamagedCheckpoint, match="another checksum than its manifest says"):
        read_whole(mine)


def test_files_outside_of_the_folder_are_not_read(tmp_path):
    folder = saved(tmp_path)
    data = json.loads((folder / "manifest.json").read_text())
    data.pop("sha256")
    data["parts"] = {"../../secret": {"sha256": "", "nbytes": 1}}
    (folder / "manifest.json").write_text(json.dumps({**data, "sha256": files._digest(data)}))
    with pytest.raises(DamagedCheckpoint, match="names files outside of its folder"):
        read_whole(folder)


def test_no_code_runs_from_a_file(tmp_path):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    (tmp_path / "stage-0.safetensors").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        Tensors(tmp_path, ["stage-0.safetensors"])
    assert not (tmp_path / "sprung").exists()


def test_the_newest_and_the_best_are_kept(tmp_path):
    folders = [saved(tmp_path, update) for update in range(6)]
    mark_best(folders[1])
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("update-*")) == [folders[i].name for i in (1, 4, 5)]
    assert best(tmp_path) == folders[1].name
    assert best(tmp_path / "nowhere") is None


def test_what_was_not_finished_is_no_checkpoint_and_is_removed(tmp_path):
    write_part(tmp_path / "update-00000009.partial", "stage-0.safetensors", TENSORS, {})
    (tmp_path / "best.partial").write_text("x")
    assert list(newest_first(tmp_path)) == []
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_saved_again_it_replaces_itself(tmp_path):
    assert saved(tmp_path) == saved(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    read_whole(saved(tmp_path))
