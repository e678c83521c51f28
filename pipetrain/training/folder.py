"""The folder of one run: one run at a time, and a finished one is not written over.

The file that is locked also holds the key with which the run's ranks prove themselves to each other (see
pipetrain.seal). So nobody else may read it, and a rank that can has shown that it sees the same folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from pipetrain.checkpoint.files import CHECKPOINTS, folders
from pipetrain.errors import ConfigError
from pipetrain.seal import SECRET

METRICS, UPDATES = "metrics.csv", "updates.csv"
SUMMARY, CONFIG, EVENTS = "summary.json", "config.yaml", "events.out.tfevents.*"
PROFILE_FILE, TRACE, RAN = "profile.json", "trace.json", "ran.txt"
LOCK, KEY_BYTES = ".lock", 32
# Not through a link, nor waiting for whoever is at the other end of a pipe, nor open in what we start.
_ITSELF = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


_LOCKS: set[int] = set()


def _let_go() -> None:
    """In a process that was forked off, such as a data worker, which may outlive us: hold no lock."""
    while _LOCKS:
        os.close(_LOCKS.pop())


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def claim(
    folder: Path, resuming: bool = False, finished: bool = False, patience_s: float = 0.0
) -> Iterator[str]:
    """Take a folder for this run; give the key that only this user can read there, if that can be.

    Waits up to `patience_s` seconds for a run that is about to end. Raises ConfigError where one is going on
    in the folder, or has finished there, unless it may be `finished`, or has left checkpoints to go on from,
    unless this one is `resuming`; and where the folder cannot be made.
    """
    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | _ITSELF, 0o600)
            _LOCKS.add(lock)
            held.callback(_release, lock)
            _wait_for(lock, folder, patience_s)
            if not finished and (folder / SUMMARY).exists():
                raise ConfigError(f"run_dir={folder} holds a finished run; choose another, or remove it")
            if not resuming and folders(folder / CHECKPOINTS):
                raise ConfigError(
                    f"run_dir={folder} holds the checkpoints of a run that did not finish; go on with "
                    f"resume=auto, choose another folder, or remove it"
                )
            key = _made_key(lock)
        except OSError as error:
            why = f"run_dir={folder} cannot be written: {error.strerror}"
            raise ConfigError(f"{why}; choose another") from error
        yield key


def _release(lock: int) -> None:
    if lock in _LOCKS:  # it is not where this process was forked off
        _LOCKS.remove(lock)
        os.close(lock)


def _wait_for(lock: int, folder: Path, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while not _locked(lock):
        if time.monotonic() >= end:
            raise ConfigError(f"run_dir={folder} is in use by a run that is going on; choose another")
        time.sleep(0.1)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_key(folder: Path) -> str:
    """Return the key that a run of this user has written into a folder; nothing where there is none."""
    with suppress(OSError, ValueError):
        handle = os.open(folder / LOCK, os.O_RDONLY | _ITSELF)
        try:
            return _key(handle)
        finally:
            os.close(handle)
    return ""


def _key(handle: int) -> str:
    """Read the key in an open file; nothing where others could have written or read it."""
    status = os.fstat(handle)
    ours = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    if not stat.S_ISREG(status.st_mode) or not (ours or os.environ.get(SECRET)):
        return ""
    text = os.pread(handle, 2 * KEY_BYTES, 0).decode("ascii", "replace")
    return text if re.fullmatch(f"[0-9a-f]{{{2 * KEY_BYTES}}}", text) else ""


def _made_key(lock: int) -> str:
    """Return the key in our file, a new one where there is none; nothing where others can read it."""
    if not _key(lock):
        os.ftruncate(lock, 0)
        os.fchmod(lock, 0o600)
        os.pwrite(lock, secrets.token_hex(KEY_BYTES).encode(), 0)
        os.fsync(lock)
    return _key(lock)


def clear(folder: Path, names: Sequence[str] = (METRICS, UPDATES, TRACE, RAN, PROFILE_FILE)) -> None:
    """Remove the records that a run which did not finish has left, and TensorBoard's.

    `names`: of those that a resumed one writes again.
    """
    for left in [*(folder / name for name in names), *folder.glob(EVENTS)]:
        with suppress(OSError):  # it will be written over, or said that it cannot be
            left.unlink()


def discard(folder: Path, log: str) -> None:
    """Remove the folder of a refused run, if it holds nothing but its log and no other run has it."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {log, LOCK}:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | _ITSELF, 0o600)
            try:
                if _locked(lock):
                    for name in (log, LOCK):
                        (folder / name).unlink(missing_ok=True)
                    folder.rmdir()
            finally:
                os.close(lock)


def is_finished(folder: Path, cfg: DictConfig | None) -> bool:
    """Whether a folder holds a finished run: of this configuration but for `resume`, unless that is None."""
    return (folder / SUMMARY).exists() and (cfg is None or is_of(folder, cfg, {"resume"}))


def is_of(folder: Path, cfg: DictConfig, apart_from: set[str]) -> bool:
    """Whether a folder's run has this configuration, some keys left out."""
    try:
        theirs = OmegaConf.to_container(OmegaConf.load(folder / CONFIG))
    except Exception:  # whatever it is, it is not this configuration
        return False
    mine = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(mine, dict)
    without = dict.fromkeys(apart_from)
    return isinstance(theirs, dict) and {**mine, **without} == {**theirs, **without}


def rename_after(folder: Path, asked: str, used: str) -> Path:
    """Let a folder that is called after a data set be called after the one used; return where it is."""
    if asked == used or not folder.name.startswith(f"{asked}-"):
        return folder
    return folder.rename(folder.with_name(used + folder.name.removeprefix(asked)))
