"""Saving beside training: each rank writes its stages' files, and rank 0 makes a checkpoint of them.

Training waits for the copy to the host alone. What was written, or why it was not, goes through a clone of
the run's store, so a rank that cannot write is named and the others need not see its disk; what became of it
comes back, so that each rank removes what it wrote for nothing. A save that fails leaves the checkpoints
before it as they are, and training goes on.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from torch import Tensor

from pipetrain.checkpoint.files import (
    CHECKPOINTS,
    PARTIAL,
    Manifest,
    Part,
    folder_name,
    mark_best,
    prove_size,
    prune,
    publish,
    remove_unfinished,
    stage_file,
    write_part,
)
from pipetrain.checkpoint.untrusted import DamagedCheckpoint
from pipetrain.seal import SealedStore

log = logging.getLogger("pipetrain")

POLL_S = 0.05
SEEN_S = 5.0  # how late a shared file system may show what another machine has written
_SAVED, _NOT_SAVED = "saved", "not saved"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one rank saves: the tensors of its files, copied, and what is written beside them; or why not."""

    files: Mapping[str, Mapping[str, Tensor]]
    metadata: Mapping[str, str]
    failure: str = ""


class Saver:
    """Saves one rank's part of every checkpoint into `run_dir`. One save at a time."""

    def __init__(
        self, run_dir: Path, rank: int, store: SealedStore | None, keep: int, timeout: float
    ) -> None:
        self._folder = run_dir / CHECKPOINTS
        self._rank = rank
        # Its own connection: a wait of the background's would hold up the engine's thread otherwise.
        self._store = None if store is None else store.clone()
        self._keep = keep
        self._timeout = timeout
        self._writer = ThreadPoolExecutor(1, "pipetrain-save")
        self._writing: Future[None] | None = None
        self.not_saved: int | None = None
        """The update of the newest save, where that has failed; rank 0 knows."""
        remove_unfinished(self._folder)  # on every rank: there may be one folder a machine, by mistake

    def save(self, update: int, snapshot: Snapshot, manifest: Manifest | None, best: bool) -> None:
        """Start to save; waits for the save before, if that still goes on.

        Rank 0 gives the manifest, whose parts are still to come: it names all files that there will be.
        """
        self.wait()
        self._writing = self._writer.submit(self._save, update, snapshot, manifest, best)

    def mark(self, folder: Path) -> None:
        """Remember a checkpoint as the best, if it is one of this run's folder."""
        if self._rank == 0 and folder.parent.resolve() == self._folder.resolve():
            try:
                mark_best(folder)
            except OSError as error:
                log.warning("pipetrain: %s cannot be marked as the best checkpoint: %s", folder.name, error)

    def wait(self) -> None:
        """Wait until what was saved last is on the disk, or has failed to get there."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        """Wait for the last save, and end."""
        self.wait()
        self._writer.shutdown()

    def _save(self, update: int, snapshot: Snapshot, manifest: Manifest | None, best: bool) -> None:
        partial = self._folder / (folder_name(update) + PARTIAL)
        parts: dict[str, Part] = {}
        failure = snapshot.failure
        try:
            for name, tensors in snapshot.files.items():
                parts[name] = write_part(partial, name, tensors, snapshot.metadata)
        except (OSError, DamagedCheckpoint) as error:
            failure = f"rank {self._rank} cannot write {partial}: {error}"
        if manifest is None:
            word = {"failure": failure, "parts": {name: asdict(part) for name, part in parts.items()}}
            self._say(update, json.dumps(word))
            if self._heard(update, 0, 2 * self._timeout) == _NOT_SAVED:
                shutil.rmtree(partial, ignore_errors=True)
            return
        try:
            parts |= self._gathered(update, manifest, failure)
            self._prove(partial, manifest, parts)
            final = publish(partial, replace(manifest, parts=parts))
            if best:
                mark_best(final)
            prune(self._folder, self._keep, final)
            self.not_saved = None
            self._say(update, _SAVED)
        except (OSError, _SaveFailed) as error:
            self.not_saved = update
            self._say(update, _NOT_SAVED)
            shutil.rmtree(partial, ignore_errors=True)
            log.warning(
                "pipetrain: the checkpoint of update %d was NOT saved: %s; training goes on, and the "
                "checkpoints before it are as they were",
                *(update, error),
            )

    def _gathered(self, update: int, manifest: Manifest, failure: str) -> dict[str, Part]:
        """Wait for what the other ranks wrote. Raises _SaveFailed."""
        parts: dict[str, Part] = {}
        end = time.monotonic() + self._timeout
        for rank in sorted(set(manifest.pipeline["placement"]) - {self._rank}):
            said = self._heard(update, rank, end - time.monotonic())
            if said is None:
                raise _SaveFailed(f"rank {rank} wrote nothing for {self._timeout:g} s")
            word = json.loads(said)
            failure = failure or word["failure"]
            parts |= {name: Part(**part) for name, part in word["parts"].items()}
        if failure:
            raise _SaveFailed(failure)
        return parts

    def _prove(self, partial: Path, manifest: Manifest, parts: Mapping[str, Part]) -> None:
        """Prove that each stage's file, and no other, is where this rank looks for it. Raises _SaveFailed."""
        owners = {stage_file(stage): rank for stage, rank in enumerate(manifest.pipeline["placement"])}
        if parts.keys() != owners.keys():
            raise _SaveFailed(f"the ranks wrote {', '.join(sorted(parts))} instead of {', '.join(owners)}")
        end = time.monotonic() + min(SEEN_S, self._timeout)
        for name, rank in owners.items():
            while (unseen := _unseen(partial / name, parts[name])) and time.monotonic() < end:
                time.sleep(POLL_S)
            if unseen:
                raise _SaveFailed(
                    f"rank {rank} has written {name}, and rank {self._rank} does not see it ({unseen}); "
                    f"run_dir must be a folder that all machines share"
                )

    def _say(self, update: int, word: str) -> None:
        if self._store is not None:
            self._store.set(_key(update, self._rank), word)

    def _heard(self, update: int, rank: int, seconds: float) -> str | None:
        """Wait for another rank's word about a save; None where it says none for so long."""
        assert self._store is not None
        end = time.monotonic() + seconds
        while not self._store.check(_key(update, rank)):
            if time.monotonic() > end:
                return None
            time.sleep(POLL_S)
        return self._store.get(_key(update, rank))


def _unseen(path: Path, part: Part) -> DamagedCheckpoint | None:
    try:
        prove_size(path, part)
    except DamagedCheckpoint as damage:
        return damage
    return None


class _SaveFailed(Exception):
    """A rank's part was not written, or not where it is looked for; says which, and why."""


def _key(update: int, rank: int) -> str:
    return f"saved/{update}/{rank}"
