"""The folder of one run: one run at a time, and a finished one is not written over."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from omegaconf import DictConfig, OmegaConf

from pipetrain.checkpoint.files import CHECKPOINTS
from pipetrain.errors import ConfigError

METRICS, SUMMARY, CONFIG, EVENTS = "metrics.csv", "summary.json", "config.yaml", "events.out.tfevents.*"
PROFILE_FILE, TRACE, RAN = "profile.json", "trace.json", "ran.txt"


def claim(folder: Path, resuming: bool = False) -> TextIO:
    """Take a folder for this run; keep what is returned open as long as the run lasts.

    Raises ConfigError where no file can be made, a run is going on in the folder, or has finished there, or,
    unless this one is `resuming`, has left checkpoints to go on from.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"run_dir={folder} cannot be written: {error.strerror}; choose another") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"run_dir={folder} is in use by a run that is going on; choose another") from error
    if (folder / SUMMARY).exists():
        raise ConfigError(f"run_dir={folder} holds a finished run; choose another, or remove it")
    if not resuming and any((folder / CHECKPOINTS).glob("update-*")):
        raise ConfigError(
            f"run_dir={folder} holds the checkpoints of a run that did not finish; go on with resume=auto, "
            f"choose another folder, or remove it"
        )
    return lock


def clear(folder: Path, names: Sequence[str] = (METRICS, TRACE, RAN, PROFILE_FILE)) -> None:
    """Remove the records that a run which did not finish has left, and TensorBoard's.

    `names`: of those that a resumed one writes again.
    """
    for left in [*(folder / name for name in names), *folder.glob(EVENTS)]:
        with suppress(OSError):  # it will be written over, or said that it cannot be
            left.unlink()


def is_finished(folder: Path, cfg: DictConfig | None) -> bool:
    """Whether a folder holds a finished run: of this configuration but for `resume`, unless that is None."""
    if cfg is None or not (folder / SUMMARY).exists():
        return (folder / SUMMARY).exists()
    try:
        theirs = OmegaConf.to_container(OmegaConf.load(folder / CONFIG))
    except Exception:  # whatever it is, it is not this configuration
        return False
    mine = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(mine, dict)
    return isinstance(theirs, dict) and {**mine, "resume": None} == {**theirs, "resume": None}


def rename_after(folder: Path, asked: str, used: str) -> Path:
    """Let a folder that is called after a data set be called after the one used; return where it is."""
    if asked == used or not folder.name.startswith(f"{asked}-"):
        return folder
    return folder.rename(folder.with_name(used + folder.name.removeprefix(asked)))
