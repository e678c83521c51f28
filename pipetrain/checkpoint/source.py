"""Finds and verifies the checkpoint from which a run resumes, or which is exported."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from pipetrain.checkpoint.files import CHECKPOINTS, MANIFEST, Manifest, folders, read_manifest, read_whole
from pipetrain.checkpoint.progress import read_progress
from pipetrain.errors import ConfigError
from pipetrain.untrusted import DamagedCheckpoint

AUTO = "auto"

log = logging.getLogger("pipetrain")


@dataclass(frozen=True, slots=True)
class Source:
    """A verified checkpoint."""

    folder: Path
    manifest: Manifest


def find_source(resume: str, run_dir: Path) -> Source | None:
    """Find and verify the checkpoint that `resume=` names. Raises ConfigError.

    Damaged checkpoints are logged and the one before is taken, unless `resume` names one directly. Returns
    None for auto where the run has saved none yet.
    """
    if resume == AUTO:
        return _newest(run_dir)
    folder = Path(resume).expanduser().absolute()
    if (folder / CHECKPOINTS).is_dir():
        source = _newest(folder)
        if source is None:
            raise ConfigError(f"resume={resume} is the folder of a run that has saved no checkpoint")
        return source
    if not (folder / MANIFEST).exists() and not folder.name.startswith("update-"):
        raise ConfigError(
            f"resume={resume} is no checkpoint: give auto, the folder of a run, or one of its "
            f"{CHECKPOINTS}/update-... folders"
        )
    try:
        return _whole(folder)
    except DamagedCheckpoint as damage:
        raise ConfigError(f"resume={resume} is damaged: {damage}; choose another checkpoint") from damage


def refuse_older(source: Source, run_dir: Path) -> None:
    """Refuse a checkpoint if the same run has newer ones. Raises ConfigError."""
    if source.folder.parent.resolve() != (run_dir / CHECKPOINTS).resolve():
        return
    newest = _newest(run_dir)
    if newest is not None and newest.manifest.position.update > source.manifest.position.update:
        raise ConfigError(
            f"{source.folder} is older than {newest.folder.name} in the same run_dir, from which resume=auto "
            f"would go on later: choose another run_dir, or remove the newer ones"
        )


def _newest(run_dir: Path) -> Source | None:
    damaged: list[str] = []
    for folder in folders(run_dir / CHECKPOINTS):
        try:
            return _whole(folder)
        except DamagedCheckpoint as damage:
            damaged.append(folder.name)
            log.warning("pipetrain: checkpoint %s is damaged: %s; trying the one before", folder.name, damage)
    if damaged:
        raise ConfigError(
            f"no checkpoint of {run_dir} is whole ({', '.join(damaged)}): train anew in another run_dir, or "
            f"give resume= another run's checkpoint"
        )
    return None


def _whole(folder: Path) -> Source:
    manifest = read_whole(folder)
    read_progress(manifest)
    return Source(folder, manifest)


def read_source(folder: Path, rank: int) -> Source:
    """Read a checkpoint that rank 0 has verified. Raises ConfigError if this rank cannot."""
    try:
        return Source(folder, read_manifest(folder))
    except DamagedCheckpoint as damage:
        raise ConfigError(
            f"rank {rank} cannot read the checkpoint that rank 0 reads: {damage}; give run_dir (or resume) a "
            f"folder that all machines share"
        ) from damage
