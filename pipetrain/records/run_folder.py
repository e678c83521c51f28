"""The folder of one run: used by one run at a time, and never overwritten once finished."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from pipetrain.checkpoint.resume import Source, saved_by
from pipetrain.config.settings import Settings
from pipetrain.data.sampling import Sampler
from pipetrain.errors import ConfigError
from pipetrain.rules import COUNT
from pipetrain.typed_json import read_as, read_json

METRICS, UPDATES = "metrics.csv", "updates.csv"
RUNS = "runs"  # the folder of runs whose run_dir is not given
SUMMARY, CONFIG, EVENTS = "summary.json", "config.yaml", "events.out.tfevents.*"
PROFILE_FILE, TRACE, RAN = "profile.json", "trace.json", "ran.txt"
LOCK = ".lock"
LATE_S = 15.0  # until network file systems show files of another machine


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder, locked for it on rank 0, and the facts about the run for records and checkpoints.

    `run`: its unique name. `source`: the checkpoint to resume from. `config`: its configuration, with its
    loggers. `conditions`: what a checkpoint to resume from must share, besides the model's tensors and
    batches.
    """

    path: Path
    run: str
    source: Source | None
    config: Mapping[str, Any]
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def go_on(self) -> str:
        """The options that resume the run; the configuration of a program has no model."""
        if "model" in self.config:
            return f"run_dir={quote(str(self.path))} resume=auto"
        return f'fit(..., run_dir="{self.path}", resume="auto")'

    def saved_so_far(self) -> str:
        """Return which checkpoint an interrupted run has."""
        try:
            saved = saved_by(self.path)
        except ConfigError as error:
            return str(error)
        return f"{saved[0].name} is saved: go on with {self.go_on}" if saved else "there is no checkpoint yet"


@dataclass(frozen=True, slots=True)
class Before:
    """The state before a run: `names` in its folder, or the `missing` folders: this one and its parents."""

    names: frozenset[str] = frozenset()
    missing: tuple[Path, ...] = ()

    @classmethod
    def snapshot(cls, folder: Path) -> Before:
        missing = tuple(path for path in (folder, *folder.parents) if not os.path.exists(path))
        return cls(frozenset() if missing else frozenset(path.name for path in folder.glob("*")), missing)


@contextmanager
def claim(
    folder: Path, resuming: bool = False, finished: bool = False, patience_s: float = 0.0
) -> Iterator[None]:
    """Lock a folder for this run.

    Waits up to `patience_s` seconds for another run to end. Raises ConfigError if the folder cannot be made,
    is in use, holds a finished run (unless `finished`), or has checkpoints (unless `resuming`). An error
    before anything was written restores the earlier state.
    """
    before = Before.snapshot(folder)
    with ExitStack() as stack:
        why = ""
        stack.push(lambda kind, *error: None if kind is None else discard(folder, before))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not stack.enter_context(_lock(folder, patience_s)):
                why = "is in use by a run that is going on; choose another"
            elif not finished and is_finished(folder):
                why = (
                    "holds a finished run: go on with resume=auto, the same options and more epochs, choose "
                    "another folder, or remove it"
                )
            elif not resuming and saved_by(folder):
                why = (
                    "holds the checkpoints of a run that did not finish; go on with resume='auto', choose "
                    "another folder, or remove it"
                )
        except OSError as error:
            why = f"cannot be written: {error.strerror}; choose another"
        if why:
            raise ConfigError(f"run_dir={folder} {why}")
        yield


@contextmanager
def _lock(folder: Path, patience_s: float = 0.0) -> Iterator[bool]:
    """Lock a folder; yield whether it is locked, or False if another process holds the lock.

    The lock belongs to this open file, whatever else the process does with the file. A forked process, such
    as a data worker, which may outlive this one, closes it and so does not share the lock.
    """
    with FileIO(os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600), "r+") as lock:
        end, locked = time.monotonic() + patience_s, False
        _locks.append(lock)
        try:
            while not locked:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    locked = True
                except (BlockingIOError, PermissionError):
                    if time.monotonic() >= end:
                        break
                    time.sleep(0.1)
            yield locked
        finally:
            _locks.remove(lock)


_locks: list[FileIO] = []


def _close_locks() -> None:
    for lock in _locks:
        lock.close()


os.register_at_fork(after_in_child=_close_locks)


def require_shared(folder: Path) -> None:
    """Refuse a folder that rank 0 has claimed but this rank cannot see. Raises ConfigError."""
    end = time.monotonic() + LATE_S
    while not (folder / LOCK).exists():
        if time.monotonic() > end:
            raise ConfigError(
                f"{socket.gethostname()} does not see {folder / LOCK}, which rank 0 has written: give "
                f"run_dir a folder that all machines share, or train without checkpoints "
                f"(checkpoint.every=null)"
            )
        time.sleep(0.1)


def clear(folder: Path, names: Sequence[str] = (METRICS, UPDATES, TRACE, RAN, PROFILE_FILE)) -> None:
    """Remove an unfinished run's records `names`, and TensorBoard's files."""
    for left in [*(folder / name for name in names), *folder.glob(EVENTS), *folder.glob(f"stage*/{EVENTS}")]:
        with suppress(OSError):  # it will be overwritten, or writing fails with a warning
            left.unlink()


def discard(folder: Path, before: Before, log: str = LOCK) -> None:
    """Remove the log, lock and folders of a refused run, if it made nothing else and they are not in use."""
    with suppress(OSError):
        new = {path.name for path in folder.iterdir()} - before.names
        if new <= {log, LOCK}:
            with _lock(folder) as locked:
                for name in new | ({LOCK} - before.names) if locked else ():
                    (folder / name).unlink(missing_ok=True)
            for path in before.missing if locked else ():
                path.rmdir()  # unless it holds other runs


def is_finished(folder: Path, config: Mapping[str, Any] | None = None) -> bool:
    """Return whether a folder holds a finished run, with this configuration (except `resume`) if given."""
    return (folder / SUMMARY).exists() and (config is None or is_of(folder, config, {"resume"}))


def is_of(folder: Path, config: Mapping[str, Any], apart_from: set[str]) -> bool:
    """Return whether a folder's run has this configuration, except for some keys."""
    try:
        saved = yaml.safe_load((folder / CONFIG).read_text())
    except Exception:  # an unreadable file is not this configuration
        return False
    without = dict.fromkeys(apart_from)
    return isinstance(saved, dict) and {**config, **without} == {**saved, **without}


def lengthens(run_dir: Path, config: Mapping[str, Any], settings: Settings) -> bool:
    """Return whether more updates would continue the finished run in `run_dir`.

    Raises ConfigError if the learning rates of its finished updates would have been different.
    """
    finished = is_finished(run_dir) and saved_by(run_dir)
    if not (finished and is_of(run_dir, config, {"resume", "epochs", "max_updates"})):
        return False
    path = run_dir / SUMMARY
    summary = read_as(dict[str, Any], read_json(path), str(path))
    done, samples = (COUNT.read(f"{path}: {key}", summary.get(key)) for key in ("updates", "train_samples"))
    sampler = Sampler(samples, settings.batch_size, settings.microbatches, settings.seed, settings.drop_last)
    updates = settings.updates(len(sampler.batch_sizes))
    rate, other = settings.rate(done), settings.rate(updates)
    if updates > done and any(rate(update) != other(update) for update in range(done)):
        raise ConfigError(
            f"run_dir={run_dir} holds a run that finished after {done} updates, and with "
            f"lr_schedule={config['lr_schedule']} warmup={settings.warmup:g} the rates of {updates} updates "
            f"differ from the start: train anew in another run_dir, or go on there from its last weights "
            f"with resume={run_dir}"
        )
    return bool(updates > done)


def rename_after(folder: Path, requested: str, used: str) -> Path:
    """Rename a folder named after the requested data set to the one used; return its path."""
    if requested == used or not folder.name.startswith(f"{requested}-"):
        return folder
    return folder.rename(folder.with_name(used + folder.name.removeprefix(requested)))
