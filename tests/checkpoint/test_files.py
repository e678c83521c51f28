"""A checkpoint on disk: whole or refused, whatever happened to it, and never code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pipetrain.checkpoint import files
from pipetrain.checkpoint.files import (
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
from pipetrain.untrusted import DamagedCheckpoint
from tests.support.damage import NOT_JSON, ODD, forge, put

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
        "is of version 99, and this pipetrain reads version 5",
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


def test_every_bit_counts(tmp_path):
    part = (folder := saved(tmp_path)) / "stage-0.safetensors"
    for at in range(0, 4000, 97):
        flip(part, at)
        with pytest.raises(DamagedCheckpoint):
            read_whole(folder)
        flip(part, at)
    read_whole(folder)


def test_the_manifest_of_another_run_is_no_manifest_of_these_files(tmp_path):
    other, mine = saved(tmp_path / "other", run="s"), saved(tmp_path / "mine")
    (mine / "manifest.json").write_bytes((other / "manifest.json").read_bytes())
    with pytest.raises(DamagedCheckpoint, match="another checksum than its manifest says"):
        read_whole(mine)


PART = {"sha256": "", "nbytes": 1}
STRANGE = ("../../secret", "stage-0.safetensors\0", "", "stage-1.safetensors")
FIELDS = ("run", "position", "conditions", "pipeline", "config", "progress", "parts")


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"no {field}": lambda data, field=field: data.pop(field) for field in FIELDS},
    **{f"{field} a list": put(field, to=[1]) for field in FIELDS},
    **{f"{field} null": put(field, to=None) for field in FIELDS},
    "another field": put("more", to=1),
    "another field of the position": put("position", "more", to=1),
    "another field of a part": put("parts", "stage-0.safetensors", "more", to=1),
    "a position in words": put("position", "epoch", to="1"),
    "a batch before the first": put("position", "batch", to=-1),
    "an update that never comes": put("position", "update", to=2**63),
    "half a byte": put("parts", "stage-0.safetensors", "nbytes", to=0.5),
    "no checksum": put("parts", "stage-0.safetensors", "sha256", to=None),
    "another update": put("position", "update", to=8),
    "no parts": put("parts", to={}),
    **{f"a part {name!r} instead": put("parts", to={name: PART}) for name in STRANGE},
    **{f"a part {name!r} too": put("parts", name, to=PART) for name in STRANGE},
    "half a character for a part": put("parts", to={"\ud800": PART}),
    "half a character for a run": put("run", to="\ud800"),
    **{
        f"placement={v!r:.9}": put("pipeline", "placement", to=v)
        for v in (None, 0, {}, [], [1], [0, 2], [-1, 0], [False], [[0]], [0, 0], [2**62])
    },
    **{
        f"cuts={v!r:.9}": put("pipeline", "cuts", to=v)
        for v in (None, 1, {}, [0], [2, 1], [1, 1], [-1], [True], [[1]], [2**63])
    },
    "nested deeply": put("conditions", to={"a": json.loads("[" * 200 + "]" * 200)}),
    "a version of another type": put("pipetrain_checkpoint", to=[2]),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_manifest_that_no_run_writes_is_damaged_whatever_its_checksum(name, tmp_path):
    earlier, folder = saved(tmp_path, 3), saved(tmp_path, 7)
    forge(folder, FORGED[name])
    with pytest.raises(DamagedCheckpoint) as damage:
        read_whole(folder)
    assert str(damage.value).startswith(str(folder / "manifest.json"))
    assert len(str(damage.value)) < len(str(folder)) + 400
    assert [isinstance(found, Manifest) for _, found in newest_first(tmp_path)] == [False, True]
    assert read_whole(earlier).position.update == 3


def test_files_outside_of_the_folder_are_not_read(tmp_path):
    folder = saved(tmp_path)
    forge(folder, put("parts", to={"../../secret": PART}))
    with pytest.raises(DamagedCheckpoint, match="names files outside of its folder"):
        read_whole(folder)


@pytest.mark.parametrize("file", ["manifest.json", "stage-0.safetensors"])
@pytest.mark.parametrize("name", ODD)
def test_odd_things_in_the_place_of_a_file_are_damage(name, file, tmp_path, monkeypatch):
    saved(tmp_path, 3)
    folder = saved(tmp_path, 7)
    monkeypatch.chdir(folder)
    (folder / file).unlink()
    ODD[name](folder / file)
    with pytest.raises(DamagedCheckpoint, match=file):
        read_whole(folder)
    assert [isinstance(found, Manifest) for _, found in newest_first(tmp_path)] == [False, True]


@pytest.mark.parametrize("name", NOT_JSON)
def test_a_manifest_that_is_no_json_is_damage(name, tmp_path):
    folder = saved(tmp_path)
    (folder / "manifest.json").write_bytes(NOT_JSON[name])
    with pytest.raises(DamagedCheckpoint):
        read_whole(folder)


@pytest.mark.parametrize("text", ["1", "null", "[]", '"x"', "{}", "NaN", '{"pipetrain_checkpoint": 2}'])
def test_json_that_is_no_manifest_is_damage(text, tmp_path):
    folder = saved(tmp_path)
    (folder / "manifest.json").write_text(text)
    with pytest.raises(DamagedCheckpoint):
        read_whole(folder)


def test_a_manifest_that_could_not_be_read_again_is_not_published(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 100)
    with pytest.raises(OSError, match="its manifest has"):
        saved(tmp_path)
    assert list(newest_first(tmp_path)) == []


# Tensors


def test_a_tensor_that_is_not_there_or_another_is_damage(tmp_path):
    tensors = Tensors(saved(tmp_path), ["stage-0.safetensors"])
    tensors.prove(TENSORS)
    with pytest.raises(DamagedCheckpoint, match="has no tensor model/c"):
        tensors["model/c"]
    for like in (torch.zeros(1), torch.zeros(1000, 1), torch.zeros(1000, dtype=torch.float64)):
        with pytest.raises(DamagedCheckpoint, match=r"has a float32 \[1000\] as model/a, which is a float"):
            tensors.prove({"model/a": like})


def test_a_tensor_of_two_files_is_damage(tmp_path):
    for name in "ab":
        save_file({"model/a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(DamagedCheckpoint, match="b has 'model/a', which another file has too"):
        Tensors(tmp_path, ["a", "b"])


@pytest.mark.parametrize("name", ODD)
def test_tensors_are_read_from_nothing_odd(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ODD[name](tmp_path / "stage-0.safetensors")
    with pytest.raises(DamagedCheckpoint):
        Tensors(tmp_path, ["stage-0.safetensors"])


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


def test_what_this_run_has_not_come_to_yet_neither_counts_nor_goes(tmp_path):
    """It passed over damaged ones, and saves before it is where they were."""
    folders = [saved(tmp_path, update) for update in (2, 3, 5, 8, 9)]
    for damaged in folders[3:]:
        (damaged / "manifest.json").unlink()
    prune(tmp_path, 2, folders[2])
    assert files.folders(tmp_path) == [folders[i] for i in (4, 3, 2, 1)]


@pytest.mark.parametrize("name", ODD)
def test_a_best_that_is_none_is_damage_and_spares_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [saved(tmp_path, update) for update in range(3)]
    ODD[name](tmp_path / "best")
    if name == "nothing":
        assert best(tmp_path) is None
    else:
        with pytest.raises(DamagedCheckpoint, match="best"):
            best(tmp_path)
    prune(tmp_path, 1)
    assert files.folders(tmp_path) == folders[2:]


@pytest.mark.parametrize("text", [b"", b"../secret", b"update-", b"update-1.partial", b"\xff", b"update-1 x"])
def test_a_best_that_names_no_checkpoint_is_damage(text, tmp_path):
    (tmp_path / "best").write_bytes(text)
    with pytest.raises(DamagedCheckpoint, match="best names no checkpoint"):
        best(tmp_path)


NO_CHECKPOINTS = ["update-7-", "update-7.partial", "update-7.old", "update-", "update-x", "update-٣"]
NO_CHECKPOINTS += ["update-7 (copy)", "my-update-7", "update-7\n", "update--7", "update-1.5"]


def test_only_whole_names_count(tmp_path):
    folder = saved(tmp_path)
    for name in NO_CHECKPOINTS:
        os.rename(saved(tmp_path / "other"), tmp_path / name)
    (tmp_path / "update-8").write_text("no folder")
    (tmp_path / "other").rmdir()
    assert files.folders(tmp_path) == [folder]
    prune(tmp_path, 1)
    assert len(list(tmp_path.iterdir())) == len(NO_CHECKPOINTS) + 2


def test_the_newest_is_that_of_the_most_updates(tmp_path):
    folders = [saved(tmp_path, update) for update in (10**8, 99_999_999, 10**9)]
    again = [folders[0].with_name(f"{folders[0].name}-{number}") for number in (2, 10)]
    for folder in again:
        shutil.copytree(folders[0], folder)
        read_whole(folder)
    assert files.folders(tmp_path) == [folders[2], again[1], again[0], folders[0], folders[1]]
    assert saved(tmp_path, 10**8) == folders[0]
    assert files.folders(tmp_path) == [folders[2], folders[0], folders[1]]


def test_what_a_crash_left_is_removed_and_nothing_else(tmp_path):
    folder = saved(tmp_path)
    mark_best(folder)
    for name in ("update-00000007.partial", "update-00000009-2.partial"):
        os.rename(saved(tmp_path / "other"), tmp_path / name)
    (tmp_path / "other").rmdir()
    (tmp_path / "update-00000010.partial").symlink_to(folder)
    (tmp_path / "best.partial").write_text("x")  # rank 0 may just be writing it
    (tmp_path / "notes.txt").write_text("mine")
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "best",
        "best.partial",
        "notes.txt",
        folder.name,
    ]
    read_whole(folder)


def test_saved_again_it_replaces_itself(tmp_path):
    assert saved(tmp_path) == saved(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    read_whole(saved(tmp_path))
