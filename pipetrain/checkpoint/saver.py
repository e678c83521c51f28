"""Saves checkpoints between two windows, in the background.

Each rank writes the files of its stages; rank 0 adds the manifest. Training waits only for the copy to host
memory. The ranks report through a clone of the run's store whether their parts were written, so an error
names its rank, and rank 0 reports the outcome, so that each rank removes its part of a failed checkpoint. A
failed save leaves earlier checkpoints as they are, and training goes on.
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
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from pipetrain.checkpoint.asking import Asking
from pipetrain.checkpoint.files import (
    CHECKPOINTS,
    PARTIAL,
    Manifest,
    Part,
    Position,
    folder_name,
    mark_best,
    prove_size,
    prune,
    publish,
    remove_unfinished,
    stage_file,
    write_part,
)
from pipetrain.checkpoint.progress import Progress, best_epoch
from pipetrain.checkpoint.state import random_state, residual_state, state_of
from pipetrain.runtime.mesh import Mesh
from pipetrain.runtime.session import Session
from pipetrain.untrusted import DamagedCheckpoint, read_as

log = logging.getLogger("pipetrain")

POLL_S = 0.05
SEEN_S = 5.0  # seconds until a shared file system shows another machine's files
_SAVED, _NOT_SAVED = "saved", "not saved"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's part of a checkpoint: copies of each file's tensors, and metadata; or why there is none."""

    files: Mapping[str, Mapping[str, Tensor]]
    metadata: Mapping[str, str]
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Written:
    """One rank's report: the parts it wrote, or why it failed."""

    failure: str
    parts: Mapping[str, Part]


class _SaveFailed(Exception):
    """A rank's part was not written, or is not visible here; the message says which, and why."""


class Saver:
    """Saves one rank's part of every checkpoint into `run_dir`. One save at a time."""

    def __init__(self, run_dir: Path, rank: int, store: Store | None, keep: int, timeout: float) -> None:
        self._folder = run_dir / CHECKPOINTS
        self._rank = rank
        # A connection of its own: otherwise a wait in the background would block the engine's thread.
        self._store = None if store is None else store.clone()  # type: ignore[attr-defined]
        self._keep = keep
        self._timeout = timeout
        self._writer = ThreadPoolExecutor(1, "pipetrain-save")
        self._writing: Future[None] | None = None
        self.not_saved: int | None = None
        """The update of the last save if it failed, else None; known on rank 0."""
        remove_unfinished(self._folder)  # on every rank, in case run_dir is not shared

    def save(self, update: int, snapshot: Snapshot, manifest: Manifest | None, best: bool) -> None:
        """Start a save, after waiting for the previous one; rank 0 gives the manifest, yet without parts."""
        self.wait()
        self._writing = self._writer.submit(self._save, update, snapshot, manifest, best)

    def mark(self, folder: Path) -> None:
        """Record a checkpoint as the best, if it lies in this run's folder."""
        if self._rank == 0 and folder.parent.resolve() == self._folder.resolve():
            try:
                mark_best(folder)
            except OSError as error:
                log.warning("pipetrain: %s cannot be marked as the best checkpoint: %s", folder.name, error)

    def wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def close(self) -> None:
        self.wait()
        self._writer.shutdown()

    def _save(self, update: int, snapshot: Snapshot, manifest: Manifest | None, best: bool) -> None:
        partial = self._folder / (folder_name(update) + PARTIAL)
        written = self._write(partial, snapshot)
        if manifest is None:
            self._report(update, json.dumps(asdict(written)))
            if self._await_report(update, 0, 2 * self._timeout) == _NOT_SAVED:
                shutil.rmtree(partial, ignore_errors=True)
            return
        try:
            parts = self._gathered(update, manifest, written)
            self._prove(partial, manifest, parts)
            final = publish(partial, replace(manifest, parts=parts))
            if best:
                mark_best(final)
            prune(self._folder, self._keep, final)
            self.not_saved = None
            self._report(update, _SAVED)
        except (OSError, _SaveFailed) as error:
            self.not_saved = update
            self._report(update, _NOT_SAVED)
            shutil.rmtree(partial, ignore_errors=True)
            log.warning(
                "pipetrain: the checkpoint of update %d was NOT saved: %s; training goes on, and the "
                "checkpoints before it are as they were",
                *(update, error),
            )

    def _write(self, partial: Path, snapshot: Snapshot) -> _Written:
        try:
            files = snapshot.files.items()
            parts = {name: write_part(partial, name, tensors, snapshot.metadata) for name, tensors in files}
        except (OSError, DamagedCheckpoint) as error:
            return _Written(f"rank {self._rank} cannot write {partial}: {error}", {})
        return _Written(snapshot.failure, parts)

    def _gathered(self, update: int, manifest: Manifest, mine: _Written) -> dict[str, Part]:
        """Wait for the other ranks' reports; return the parts of all. Raises _SaveFailed."""
        written = [mine]
        end = time.monotonic() + self._timeout
        for rank in sorted(set(manifest.pipeline["placement"]) - {self._rank}):
            report = self._await_report(update, rank, end - time.monotonic())
            if report is None:
                raise _SaveFailed(f"rank {rank} wrote nothing for {self._timeout:g} s")
            written.append(read_as(_Written, json.loads(report), f"what rank {rank} wrote"))
        if failures := [one.failure for one in written if one.failure]:
            raise _SaveFailed(failures[0])
        return {name: part for one in written for name, part in one.parts.items()}

    def _prove(self, partial: Path, manifest: Manifest, parts: Mapping[str, Part]) -> None:
        """Verify that exactly the stages' files were written and are visible here. Raises _SaveFailed."""
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

    def _report(self, update: int, word: str) -> None:
        if self._store is not None:
            self._store.set(f"saved/{update}/{self._rank}", word)

    def _await_report(self, update: int, rank: int, seconds: float) -> str | None:
        """Wait for another rank's message about a save; return None after `seconds` without one."""
        assert self._store is not None
        key = f"saved/{update}/{rank}"
        end = time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > end:
                return None
            time.sleep(POLL_S)
        return str(self._store.get(key), "utf-8")


def _unseen(path: Path, part: Part) -> DamagedCheckpoint | None:
    try:
        prove_size(path, part)
    except DamagedCheckpoint as damage:
        return damage
    return None


@dataclass(slots=True)
class Keeper:
    """Decides when to save: every `every` epochs or updates (None: never), at the best epoch, or on a signal.

    `run`, `conditions`, `config`: fields of the Manifest. `seen`: the update at the end of the last window.
    """

    saver: Saver
    asking: Asking
    every: int | None
    unit: str
    run: str
    conditions: Mapping[str, Any]
    config: Mapping[str, Any]
    seen: int = 0

    def due(self, position: Position, over: bool = False, best: bool = False) -> bool:
        """Return whether to save; called once per window, `over` at the run's end, `best` at a best epoch."""
        before, self.seen = self.seen, position.update
        if self.every is None or over or best:
            return self.every is not None
        if self.unit == "updates":
            return position.update // self.every > before // self.every
        return position.batch == 0 and position.epoch % self.every == 0

    def go_on(self, folder: Path, position: Position, progress: Progress) -> None:
        """Start from a checkpoint; mark it as the best if its run died before it could."""
        self.seen = position.update
        if is_best(position, progress):
            self.saver.mark(folder)

    def save(
        self,
        session: Session,
        mesh: Mesh,
        position: Position,
        progress: Progress,
        random: Mapping[str, Tensor],
    ) -> None:
        """Start a save; all ranks must call it with equal values, except for their stages and `random`.

        That is the random state from which the epoch's batches come again.
        """
        rank, stages = mesh.world.rank, session.stages
        metadata = {"run": self.run, "update": str(position.update)}
        try:
            files = {stage_file(index): state_of(stage) for index, stage in stages.items()}
            own = random_state(rank, mesh.device) | residual_state(session.coding.residuals)
            files[stage_file(min(stages))] |= {**own, **random}
            snapshot = Snapshot(files, metadata)
        except TypeError as error:  # possible with checkpoint.every=null, where only a signal makes it save
            snapshot = Snapshot({}, metadata, f"the optimizer of rank {rank} remembers {error}")
        manifest = None
        if rank == 0:
            pipeline: Any = session.plan.pipeline
            manifest = Manifest(
                self.run, position, self.conditions, pipeline, self.config, progress.to_json(), {}
            )
        self.saver.save(position.update, snapshot, manifest, is_best(position, progress))

    def close(self) -> None:
        self.asking.drained()
        self.saver.close()


def is_best(position: Position, progress: Progress) -> bool:
    """Return whether a run is at the end of its most accurate epoch so far."""
    history = progress.history
    return bool(history) and not position.batch and best_epoch(history) is history[-1]
