"""A checkpoint on disk: one safetensors file per stage, and a manifest with everything else.

The manifest holds a SHA-256 checksum of each file. A checkpoint is written under a temporary name, flushed
and renamed, so a folder with its final name was complete; reading checks the sums again. No pickle is used.
An update that is saved again has a second folder, update-00000046-2, until the first one is removed.

    checkpoints/update-00000046/manifest.json
                                stage-0.safetensors ...
    checkpoints/best            the name of the checkpoint with the best validation accuracy
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import reprlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from pipetrain.untrusted import DamagedCheckpoint, opened, read_as, read_json

CHECKPOINTS, MANIFEST, BEST, PARTIAL = "checkpoints", "manifest.json", "best", ".partial"
VERSION = 5
MOST_BYTES = 2**24  # of a manifest: enough for thousands of epochs
_NAME = re.compile("update-([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True, slots=True)
class Part:
    """A file of a checkpoint."""

    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Position:
    """A point in a run: complete epochs, complete batches of the next epoch, and updates in all."""

    epoch: int = 0
    batch: int = 0
    update: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything in a checkpoint except its tensors.

    `run`: the run's unique name. `conditions`: what a resumed run must match. `pipeline`: cuts and placement.
    `progress`: the metrics so far (progress.Progress).
    """

    run: str
    position: Position
    conditions: Mapping[str, Any]
    pipeline: Mapping[str, list[int]]
    config: Mapping[str, Any]
    progress: Mapping[str, Any]
    parts: Mapping[str, Part]

    @property
    def name(self) -> str:
        return folder_name(self.position.update)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for `read_manifest`, with its checksum."""
        content = json.loads(json.dumps({"pipetrain_checkpoint": VERSION, **asdict(self)}))
        return {**content, "sha256": _digest(content)}


def folder_name(update: int) -> str:
    """Return the folder name of an update's checkpoint; names sort by update."""
    return f"update-{update:08d}"


def stage_file(stage: int) -> str:
    """Return the file name of a stage."""
    return f"stage-{stage}.safetensors"


# Writing


def write_part(folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Part:
    """Write contiguous CPU tensors into a file of an unfinished checkpoint, and flush it. Raises OSError."""
    from safetensors import SafetensorError  # here: a run without checkpoints works without the library
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    try:
        save_file(dict(tensors), path, dict(metadata))
    except SafetensorError as error:  # its message contains the operating system's error
        raise OSError(str(error)) from error
    _flush(path)
    return Part(_checksum(path), path.stat().st_size)


def publish(partial: Path, manifest: Manifest) -> Path:
    """Write the manifest, give the checkpoint its final name, and return its folder. Raises OSError.

    One of the same update that is there already goes when the new one has a name.
    """
    text = json.dumps(manifest.to_json(), indent=1) + "\n"
    if len(text) > MOST_BYTES:
        raise OSError(f"its manifest has {len(text)} bytes, and {MOST_BYTES} at most are read again")
    path = partial / MANIFEST
    path.write_text(text)
    _flush(path)
    _flush(partial)
    final = partial.with_name(manifest.name)
    if earlier := [path for path in folders(final.parent) if _order(path)[0] == manifest.position.update]:
        beside = final.with_name(f"{final.name}-{_order(earlier[0])[1] + 1}")
        _rename(partial, beside)
        for path in earlier:
            _discard(path)
        partial = beside
    _rename(partial, final)
    return final


def mark_best(final: Path) -> None:
    """Record a checkpoint as the best of its run. Raises OSError."""
    path = final.parent / BEST
    beside = path.with_name(BEST + PARTIAL)
    beside.write_text(final.name + "\n")
    _flush(beside)
    os.replace(beside, path)
    _flush(path.parent)


def prune(checkpoints: Path, keep: int, last: Path | None = None) -> None:
    """Remove all but the newest `keep` checkpoints and the best one; those newer than `last` do not count."""
    # Those newer than `last` are damaged, and will be overwritten by this run.
    found = [path for path in folders(checkpoints) if last is None or _order(path) <= _order(last)]
    spared = {path.name for path in found[:keep]}
    with suppress(DamagedCheckpoint):
        spared.add(best(checkpoints) or "")
    for path in found:
        if path.name not in spared:
            with suppress(OSError):
                _discard(path)


def remove_unfinished(checkpoints: Path) -> None:
    """Remove the temporary folders of a run that died while saving.

    A file of `mark_best` stays, which is written anew: rank 0 may be writing it when another rank comes here.
    """
    for path in checkpoints.glob(f"update-*{PARTIAL}"):
        _remove(path)


# Reading. Functions that raise DamagedCheckpoint need bounded time and memory, whatever the files contain.


def best(checkpoints: Path) -> str | None:
    """Return the name of the best checkpoint, None if none is recorded. Raises DamagedCheckpoint."""
    path = checkpoints / BEST
    if not os.path.lexists(path):
        return None
    with opened(path) as file:
        name = file.read(100).decode(errors="replace").strip()
    if not _NAME.fullmatch(name):
        raise DamagedCheckpoint(f"{path} names no checkpoint")
    return name


def folders(checkpoints: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, damaged ones included, newest first."""
    found = [path for path in checkpoints.glob("update-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_order, reverse=True)


def newest_first(checkpoints: Path) -> Iterator[tuple[Path, Manifest | DamagedCheckpoint]]:
    """Yield each checkpoint folder with its verified manifest, or with the error that its damage raised."""
    for path in folders(checkpoints):
        try:
            yield path, read_whole(path)
        except DamagedCheckpoint as damage:
            yield path, damage


def read_whole(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and verify all of its files. Raises DamagedCheckpoint."""
    manifest = read_manifest(folder)
    for name, part in manifest.parts.items():
        prove_size(folder / name, part)
        if _checksum(folder / name) != part.sha256:
            raise DamagedCheckpoint(f"{folder / name} has another checksum than its manifest says")
    return manifest


def prove_size(path: Path, part: Part) -> None:
    """Verify that a file exists and has its full size. Raises DamagedCheckpoint."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != part.nbytes:
        raise DamagedCheckpoint(f"{path} has {size} bytes instead of {part.nbytes}")


def read_manifest(folder: Path) -> Manifest:
    """Read and validate a manifest. Raises DamagedCheckpoint."""
    path = folder / MANIFEST
    data = read_json(path, MOST_BYTES)
    if not isinstance(data, dict) or "pipetrain_checkpoint" not in data:
        raise DamagedCheckpoint(f"{path} is no manifest")
    if data["pipetrain_checkpoint"] != VERSION:
        version = reprlib.repr(data["pipetrain_checkpoint"])
        raise DamagedCheckpoint(f"{path} is of version {version}, and this pipetrain reads version {VERSION}")
    if data.pop("sha256", None) != _digest(data):
        raise DamagedCheckpoint(f"{path} has another checksum than it says")
    del data["pipetrain_checkpoint"]
    manifest: Manifest = read_as(Manifest, data, str(path))
    placement, cuts = (manifest.pipeline.get(key, []) for key in ("placement", "cuts"))
    if not placement or set(placement) != set(range(len(set(placement)))):
        raise DamagedCheckpoint(f"{path}: its placement leaves ranks out")
    if cuts != sorted({*cuts} - {0}):
        raise DamagedCheckpoint(f"{path}: its cuts do not rise from 1")
    if manifest.parts.keys() != set(map(stage_file, range(len(placement)))):
        raise DamagedCheckpoint(f"{path} names files outside of its folder, or others than of its stages")
    if _NAME.fullmatch(folder.name) and _order(folder)[0] != manifest.position.update:
        raise DamagedCheckpoint(f"{path} is of {manifest.name}")
    return manifest


class Tensors:
    """The tensors of a checkpoint by name, read on access. Raises DamagedCheckpoint."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        from safetensors import SafetensorError, safe_open

        self._folder = folder
        self._files: dict[str, Any] = {}
        for path in (folder / name for name in names):
            with opened(path):  # refuses a FIFO, for which the library would wait
                pass
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
            mine = file.keys()  # type: ignore[no-untyped-call]
            if twice := self._files.keys() & mine:
                raise DamagedCheckpoint(f"{path} has {min(twice)!r}, which another file has too")
            self._files |= dict.fromkeys(mine, file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._files:
            raise DamagedCheckpoint(f"{self._folder} has no tensor {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def names(self, prefix: str) -> list[str]:
        """Return all names that start with `prefix`, without it."""
        return [name.removeprefix(prefix) for name in self._files if name.startswith(prefix)]

    def prove(self, wanted: Mapping[str, Tensor]) -> None:
        """Verify that the `wanted` tensors exist with their shapes and dtypes. Raises DamagedCheckpoint."""
        for name, like in wanted.items():
            mine, theirs = described(like), described(self[name])
            if mine != theirs:
                raise DamagedCheckpoint(f"{self._folder} has a {theirs} as {name}, which is a {mine} here")


def described(tensor: Tensor) -> str:
    """Return a tensor's dtype and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _order(folder: Path) -> tuple[int, int]:
    """Return a checkpoint's update, and the how manieth of it this is."""
    update, number = _NAME.fullmatch(folder.name).groups(default="1")  # type: ignore[union-attr]
    return int(update), int(number)


def _rename(path: Path, name: Path) -> None:
    os.replace(path, name)
    _flush(name.parent)


def _discard(folder: Path) -> None:
    """Remove a checkpoint; renamed first, as a partly removed folder must not look like one."""
    aside = folder.with_name(folder.name + PARTIAL)
    os.replace(folder, aside)
    _remove(aside)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
