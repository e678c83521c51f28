"""A checkpoint on disk: a safetensors file a stage, and a manifest with all else and a checksum of each file.

It is written beside its place, flushed to the disk and renamed: a folder that has its name was whole. What
has happened to it since is found by reading, which proves the checksums again. Nothing is unpickled.

    checkpoints/update-00000046/manifest.json
                                stage-0.safetensors ...
    checkpoints/best            the name of the one with the best validation accuracy
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

CHECKPOINTS, MANIFEST, BEST, PARTIAL = "checkpoints", "manifest.json", "best", ".partial"
VERSION = 2
_BLOCK = 2**22  # bytes


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be trusted; says which file, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A file of a checkpoint."""

    sha256: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands: whole epochs done, batches done of the next one, and updates in all."""

    epoch: int = 0
    batch: int = 0
    update: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of a checkpoint but its tensors.

    `run`: the name that its run gave itself. `conditions`: what a run must agree in to go on from it.
    `pipeline`: how it was cut and placed. `progress`: what the records need, see training.progress.
    """

    run: str
    position: Position
    conditions: Mapping[str, Any]
    pipeline: Mapping[str, Any]
    config: Mapping[str, Any]
    progress: Mapping[str, Any]
    parts: Mapping[str, Part]

    @property
    def name(self) -> str:
        """What its folder is called."""
        return folder_name(self.position.update)

    def to_json(self) -> dict[str, Any]:
        """Return what `read_manifest` reads, its own checksum included."""
        content = json.loads(json.dumps({"pipetrain_checkpoint": VERSION, **asdict(self)}))
        return {**content, "sha256": _digest(content)}


def folder_name(update: int) -> str:
    """Say what the checkpoint of an update is called: in the order of the updates."""
    return f"update-{update:08d}"


def stage_file(stage: int) -> str:
    """Say what the file of a stage is called."""
    return f"stage-{stage}.safetensors"


def write_part(folder: Path, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Part:
    """Write tensors (contiguous, on the host) into a file of an unfinished checkpoint, and flush it.

    Raises OSError.
    """
    from safetensors import SafetensorError  # here, because who saves nothing needs no library for it
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    try:
        save_file(dict(tensors), path, dict(metadata))
    except SafetensorError as error:  # of the disk, by its own words
        raise OSError(str(error)) from error
    _flush(path)
    return Part(_checksum(path), path.stat().st_size)


def publish(partial: Path, manifest: Manifest) -> Path:
    """Finish a checkpoint whose parts are all written: give it its name. Returns its folder."""
    path = partial / MANIFEST
    path.write_text(json.dumps(manifest.to_json(), indent=1) + "\n")
    _flush(path)
    _flush(partial)
    final = partial.with_name(manifest.name)
    if final.exists():  # a damaged one, which this run passed again
        os.replace(final, final.with_name(f"{final.name}.damaged"))
        shutil.rmtree(final.with_name(f"{final.name}.damaged"))
    os.replace(partial, final)
    _flush(final.parent)
    return final


def mark_best(final: Path) -> None:
    """Remember a checkpoint as the best of its run."""
    path = final.parent / BEST
    beside = path.with_name(BEST + PARTIAL)
    beside.write_text(final.name + "\n")
    _flush(beside)
    os.replace(beside, path)
    _flush(path.parent)


def best(checkpoints: Path) -> str | None:
    """Return the name of the best checkpoint, if one is known."""
    with suppress(OSError):
        return (checkpoints / BEST).read_text().strip() or None
    return None


def prune(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    spared = {best(checkpoints), *(path.name for path in _folders(checkpoints)[:keep])}
    for path in _folders(checkpoints):
        if path.name not in spared:
            shutil.rmtree(path, ignore_errors=True)


def remove_unfinished(checkpoints: Path) -> None:
    """Remove what a run that died while it saved has left."""
    for path in checkpoints.glob(f"*{PARTIAL}"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def newest_first(checkpoints: Path) -> Iterator[tuple[Path, Manifest | DamagedCheckpoint]]:
    """Give each checkpoint of a run with its manifest, proved whole, or with what is wrong with it."""
    for path in _folders(checkpoints):
        try:
            yield path, read_whole(path)
        except DamagedCheckpoint as damage:
            yield path, damage


def read_whole(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and prove all of its files. Raises DamagedCheckpoint."""
    manifest = read_manifest(folder)
    for name, part in manifest.parts.items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != part.nbytes:
                raise DamagedCheckpoint(f"{path} has {size} bytes instead of {part.nbytes}")
            if _checksum(path) != part.sha256:
                raise DamagedCheckpoint(f"{path} has another checksum than its manifest says")
        except OSError as error:
            raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest. Raises DamagedCheckpoint where there is none, or one that is not as it was written."""
    path = folder / MANIFEST
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedCheckpoint(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict) or "pipetrain_checkpoint" not in data:
        raise DamagedCheckpoint(f"{path} is no manifest")
    if data["pipetrain_checkpoint"] != VERSION:
        raise DamagedCheckpoint(
            f"{path} is of version {data['pipetrain_checkpoint']}, and this pipetrain reads version {VERSION}"
        )
    if data.pop("sha256", None) != _digest(data):
        raise DamagedCheckpoint(f"{path} has another checksum than it says")
    names = {field.name for field in fields(Manifest)}
    values = {key: value for key, value in data.items() if key in names}
    position = Position(**values.pop("position"))
    parts = {name: Part(**part) for name, part in values.pop("parts").items()}
    if any("/" in name or name.startswith(".") for name in parts):
        raise DamagedCheckpoint(f"{path} names files outside of its folder")
    return Manifest(position=position, parts=parts, **values)


class Tensors:
    """The tensors of a checkpoint, by name, read as they are asked for. Close it after use."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        self._metadata: dict[str, dict[str, str]] = {}
        for name in names:
            path = folder / name
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DamagedCheckpoint(f"{path} cannot be read: {error}") from error
            self._metadata[name] = file.metadata() or {}  # type: ignore[no-untyped-call]
            self._files |= dict.fromkeys(file.keys(), file)  # type: ignore[no-untyped-call]

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def names(self, prefix: str) -> list[str]:
        """Return all names that begin so, without that beginning."""
        return [name.removeprefix(prefix) for name in self._files if name.startswith(prefix)]

    def metadata(self, file: str) -> Mapping[str, str]:
        """Return what is written in a file beside its tensors."""
        return self._metadata[file]


def _folders(checkpoints: Path) -> list[Path]:
    found = (path for path in checkpoints.glob("update-*") if path.is_dir() and path.suffix != PARTIAL)
    return sorted(found, key=lambda path: path.name, reverse=True)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
