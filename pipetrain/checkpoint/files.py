"""A checkpoint on disk: one safetensors file per stage, and a manifest with everything else.

With replicas the first rank of a stage writes it; a rank that is first of no stage writes only its own state.

The manifest holds a SHA-256 checksum of each file. A checkpoint is written under a temporary name, flushed
and renamed, so a folder with its final name was complete; reading checks the sums again. No pickle is used.
An update that is saved again has a second folder, update-00000046-2, until the first one is removed.

    checkpoints/update-00000046/manifest.json
                                stage-0.safetensors ...
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pipetrain.checkpoint.epoch_record import Progress
from pipetrain.typed_json import DamagedCheckpoint, OtherFormat, read_as, read_json, refuse_device
from pipetrain.version import __version__

CHECKPOINTS, MANIFEST, PARTIAL = "checkpoints", "manifest.json", ".partial"
VERSION = 5
_NAME = re.compile("update-([0-9]+)(?:-([0-9]+))?")
_PART = re.compile("(stage|rank)-[0-9]+.safetensors")


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file of a checkpoint."""

    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Position:
    """A point in a run: complete epochs, complete batches of the next epoch, and updates in all."""

    epoch: int = 0
    batch: int = 0
    update: int = 0

    def batches(self, of_epoch: int) -> int:
        """Return the complete batches in all, with so many of an epoch."""
        return self.epoch * of_epoch + self.batch

    def placed(self, of_epoch: int) -> Position:
        """Return the position with so many batches per epoch: Pipeline.save has only the update."""
        if self.epoch or self.batch:
            return self
        return Position(*divmod(self.update, of_epoch), self.update)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything in a checkpoint except its tensors.

    `run`: the run's unique name. `conditions`: what a resumed run must match. `pipeline`: see Plan. `config`:
    the configuration, for information, and the seed.
    """

    run: str
    position: Position
    conditions: Mapping[str, Any]
    pipeline: Mapping[str, list[int]]
    config: Mapping[str, Any]
    progress: Progress = field(default_factory=Progress)
    parts: Mapping[str, PartFile] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return JSON data for `read_manifest`, with its checksum."""
        content = json.loads(json.dumps({"pipetrain_checkpoint": VERSION, **asdict(self)}))
        return {**content, "sha256": _digest(content)}


def folder_name(update: int) -> str:
    """Return the name of an update's checkpoint; names sort by update."""
    return f"update-{update:08d}"


def stage_file(stage: int) -> str:
    """Return the file name of a stage."""
    return f"stage-{stage}.safetensors"


def rank_file(rank: int) -> str:
    """Return the file name of a rank's own state, if other ranks write its stages."""
    return f"rank-{rank}.safetensors"


# Writing


def write_part(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> PartFile:
    """Write contiguous CPU tensors into a file of an unfinished checkpoint, and flush it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / name, tensors)
    _flush(folder / name)
    return _part(folder / name)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write contiguous CPU tensors into a file, with the umask's permissions. Raises OSError."""
    from safetensors import SafetensorError  # here: a run without checkpoints works without the library
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as error:  # its message contains the operating system's error
        if not path.stat().st_size:
            path.unlink()
        raise OSError(str(error)) from error
    if path.stat().st_mode != mode:  # the library's is 0600
        path.chmod(mode)


def publish(partial: Path, manifest: Manifest) -> Path:
    """Write the manifest, give the checkpoint its final name, and return its folder. Raises OSError.

    An earlier checkpoint of the same update is removed once the new one has a name.
    """
    path = partial / MANIFEST
    path.write_text(json.dumps(manifest.to_json(), indent=1) + "\n")
    _flush(path)
    _flush(partial)
    final = partial.with_name(folder_name(manifest.position.update))
    if earlier := [path for path in folders(final.parent) if _order(path)[0] == manifest.position.update]:
        beside = final.with_name(f"{final.name}-{_order(earlier[0])[1] + 1}")
        os.replace(partial, beside)
        _flush(beside.parent)
        for path in earlier:
            _discard(path)
        partial = beside
    os.replace(partial, final)
    _flush(final.parent)
    return final


def prune(last: Path, keep: int, best: str | None = None) -> None:
    """Remove checkpoints up to the `last` written one, except the newest `keep` and the one named `best`.

    Later ones do not count and stay: they are damaged, and this run will write them again.
    """
    written = [path for path in folders(last.parent) if _order(path) <= _order(last)]
    for path in written[keep:]:
        if path.name != best:
            with suppress(OSError):
                _discard(path)


def remove_unfinished(checkpoints: Path, without: Path) -> None:
    """Remove the temporary folders of runs that died while saving, but not that of this save, `without`."""
    for path in checkpoints.glob(f"update-*{PARTIAL}"):
        if path != without:
            shutil.rmtree(path, ignore_errors=True)


# Reading


def folders(checkpoints: Path) -> list[Path]:
    """Return the folders of a run's checkpoints, the newest first, damaged ones too. Raises OSError."""
    try:
        names = os.listdir(checkpoints)  # Path.glob hides an error
    except FileNotFoundError:
        return []
    return sorted((checkpoints / name for name in names if _NAME.fullmatch(name)), key=_order, reverse=True)


def read_whole(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and verify all of its files. Raises DamagedCheckpoint and OtherFormat."""
    manifest = read_manifest(folder)
    for name, part in manifest.parts.items():
        try:
            refuse_device(folder / name)
            # The size first: the checksum of a file that pretends to be huge would take forever.
            whole = (folder / name).stat().st_size == part.nbytes and _part(folder / name) == part
        except OSError as error:
            raise DamagedCheckpoint(f"{folder / name} cannot be read: {error.strerror}") from error
        if not whole:
            raise DamagedCheckpoint(f"{folder / name} has another size or checksum than its manifest says")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest. Raises DamagedCheckpoint and OtherFormat."""
    path = folder / MANIFEST
    data = read_json(path)
    if not isinstance(data, dict) or type(version := data.get("pipetrain_checkpoint")) is not int:
        raise DamagedCheckpoint(f"{path} is no manifest of a checkpoint")
    if version != VERSION:
        age = "an older" if version < VERSION else "a newer"
        raise OtherFormat(
            f"{folder} is a checkpoint of {age} format, {version}, and pipetrain {__version__} reads "
            f"{VERSION}: go on with the pipetrain that wrote it"
        )
    if data.pop("sha256", None) != _digest(data):
        raise DamagedCheckpoint(f"{path} has another checksum than it says")
    del data["pipetrain_checkpoint"]
    manifest: Manifest = read_as(Manifest, data, str(path))
    if not all(map(_PART.fullmatch, manifest.parts)):
        raise DamagedCheckpoint(f"{path} names files outside of its folder, or others than of its stages")
    if _NAME.fullmatch(folder.name) and _order(folder)[0] != manifest.position.update:
        raise DamagedCheckpoint(f"{path} is of another update than its folder's name says")
    return manifest


def _order(folder: Path) -> tuple[int, int]:
    """Return a checkpoint's update, and its number among the checkpoints of this update."""
    update, number = _NAME.fullmatch(folder.name).groups(default="1")  # type: ignore[union-attr]
    return int(update), int(number)


def _discard(folder: Path) -> None:
    """Remove a checkpoint; it is renamed first, as a partly removed folder must not look like one."""
    aside = folder.with_name(folder.name + PARTIAL)
    os.replace(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _part(path: Path) -> PartFile:
    with open(path, "rb") as file:
        return PartFile(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def _flush(path: Path) -> None:
    """Wait until a file's contents, or a folder's entries, are on disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
