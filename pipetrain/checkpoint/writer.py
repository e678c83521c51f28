"""Writes checkpoints between two windows, in the background, for fit and for Pipeline.save alike.

The first rank of each stage writes its file, see checkpoint/state.py; rank 0 adds the manifest. Training
waits only for the copy to host memory. Through a clone of the run's store each rank reports what it wrote, or
why it could not; rank 0 reports the outcome, and each rank then removes its part of a failed checkpoint.
Earlier checkpoints stay as they are.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from pipetrain.checkpoint.early import EarlyEnd
from pipetrain.checkpoint.files import (
    CHECKPOINTS,
    PARTIAL,
    Manifest,
    PartFile,
    Position,
    folder_name,
    prune,
    publish,
    remove_unfinished,
    write_part,
)
from pipetrain.checkpoint.progress import Progress, best_update
from pipetrain.checkpoint.state import snapshot
from pipetrain.errors import TrainingStopped
from pipetrain.runtime.links import Links
from pipetrain.runtime.ranks import Ranks
from pipetrain.runtime.session import Session
from pipetrain.schedule.timeline import StageStats
from pipetrain.signals import Signals

log = logging.getLogger("pipetrain")

POLL_S = 0.05
TURN_S = 0.5
SEEN_S = 5.0  # seconds until a shared file system shows another machine's files
Files = Mapping[str, Mapping[str, Tensor]]


class Writer:
    """Writes one rank's part of every checkpoint into `run_dir`, and keeps the newest `keep`; None: all."""

    def __init__(
        self, run_dir: Path, ranks: Ranks, store: Store | None, keep: int | None, timeout: float
    ) -> None:
        self._folder = run_dir / CHECKPOINTS
        self._ranks = ranks
        self._rank = ranks.world.rank
        # A connection of its own: otherwise a wait in the background would block the engine's thread.
        self._store = None if store is None else store.clone()  # type: ignore[attr-defined]
        self._keep = keep
        self._timeout = timeout
        self._thread = ThreadPoolExecutor(1, "pipetrain-save")
        self._writing: Future[Path] | None = None
        self._saves = 0
        self._end = math.inf  # of waiting for other ranks

    def save(self, manifest: Manifest, state: Callable[[], Files]) -> Future[Path]:
        """Start a save, after waiting for the previous one. All ranks must call it.

        `manifest`: that of rank 0 counts, yet without parts. `state`: returns copies of each file's tensors.
        The result is the checkpoint's folder, or on all ranks TrainingStopped.
        """
        self._finish()
        self._saves += 1
        files: Files = {}
        failure = ""
        try:
            files = state()
        except TypeError as error:
            failure = f"the optimizer of rank {self._rank} remembers {error}"
        self._writing = self._thread.submit(self._save, manifest, files, failure)
        return self._writing

    def close(self) -> None:
        """Wait for the last save. All ranks must call it."""
        self._finish()
        self._thread.shutdown()

    def leave(self) -> None:
        """Wait only a little longer for the other ranks, which may have left after an error too."""
        self._end = time.monotonic() + SEEN_S

    def _finish(self) -> None:
        """Wait until no rank is writing. All ranks ask each other every TURN_S, so a dead one is noticed."""
        writing = [self._writing] if self._writing else []
        while self._ranks.most("the end of a save", len(wait(writing, TURN_S).not_done)):
            pass

    def _save(self, manifest: Manifest, files: Files, failure: str) -> Path:
        unfinished, final = self._folder / (folder_name(manifest.position.update) + PARTIAL), ""
        parts: dict[str, PartFile] = {}
        try:
            if self._rank == 0:
                remove_unfinished(self._folder, without=unfinished)
            parts = {name: write_part(unfinished, name, tensors) for name, tensors in files.items()}
        except OSError as error:
            failure = f"rank {self._rank} cannot write {unfinished}: {error}"
        if self._rank:
            self._tell(failure, {name: asdict(part) for name, part in parts.items()})
            failure, final = self._hear(0, 2 * self._timeout)
        else:
            try:
                final = "" if failure else str(self._publish(unfinished, manifest, parts))
            except OSError as error:
                failure = str(error)
            self._tell(failure, final)
        if failure:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise TrainingStopped(failure)
        return Path(final)

    def _publish(self, unfinished: Path, manifest: Manifest, parts: dict[str, PartFile]) -> Path:
        """Give a checkpoint its name once all ranks have written it, remove older ones. Raises OSError."""
        end = time.monotonic() + self._timeout
        placed = manifest.pipeline
        for rank in sorted({*placed.get("ranks", placed["placement"])} - {self._rank}):
            failure, theirs = self._hear(rank, end - time.monotonic())
            if failure:
                raise OSError(failure)
            parts |= {name: PartFile(**part) for name, part in theirs.items()}
        seen = time.monotonic() + min(SEEN_S, self._timeout)
        for name, part in parts.items():
            path = unfinished / name
            while not (path.exists() and path.stat().st_size == part.nbytes):
                if time.monotonic() > seen:
                    raise OSError(
                        f"rank {self._rank} does not see all of {name}, which another rank has written: "
                        f"run_dir must be a folder that all machines share"
                    )
                time.sleep(POLL_S)
        final = publish(unfinished, replace(manifest, parts=parts))
        if self._keep is not None:
            best = best_update(manifest.progress.history)
            prune(final, self._keep, None if best is None else folder_name(best))
        return final

    def _tell(self, failure: str, written: Any) -> None:
        if self._store is not None:
            self._store.set(f"save {self._saves}/{self._rank}", json.dumps([failure, written]))

    def _hear(self, rank: int, seconds: float) -> Any:
        """Return what another rank reports of this save, within so many seconds."""
        assert self._store is not None
        key, end = f"save {self._saves}/{rank}", time.monotonic() + seconds
        while not self._store.check([key]):
            if time.monotonic() > min(end, self._end):
                return [f"rank {rank} wrote nothing for {self._timeout:g} s", None]
            time.sleep(POLL_S)
        return json.loads(self._store.get(key))


def save_now(
    folder: Path,
    session: Session,
    links: Links,
    conditions: Mapping[str, Any],
    config: Mapping[str, Any],
    keep: int | None,
) -> Path:
    """Write a checkpoint of stages that stand between two windows; return its folder.

    All ranks must call it. Raises TrainingStopped on all if one of them cannot write.
    """
    run: str = links.tell("the name of what is saved", uuid.uuid4().hex)
    position = Position(update=next(iter(session.stages.values())).weights.updates)
    progress = Progress(stages={stage: StageStats() for stage in range(session.plan.stages)})
    store = links.store and PrefixStore(run, links.store)
    writer = Writer(folder, links, store, keep, session.plan.settings.timeout)
    manifest = Manifest(run, position, conditions, session.plan.pipeline, config, progress)
    writing = writer.save(manifest, partial(snapshot, session, links, {}))
    try:
        writer.close()
    finally:
        writer.leave()
    return writing.result()


@dataclass(slots=True)
class Keeper:
    """Decides when to save: every `every` epochs or updates (None: never), at the best epoch, or on a signal.

    `run`, `conditions`, `config`: fields of the Manifest. `seen`: the update at the end of the last window.
    `not_saved`: the update of the last save if it failed, else None.
    """

    writer: Writer
    signals: Signals
    early: EarlyEnd
    every: int | None
    unit: str
    run: str
    conditions: Mapping[str, Any]
    config: Mapping[str, Any]
    seen: int = 0
    not_saved: int | None = None

    def due(self, position: Position, over: bool = False, best: bool = False) -> bool:
        """Return whether to save; called once per window, `over` at the run's end, `best` at a best epoch."""
        before, self.seen = self.seen, position.update
        if self.every is None or over or best:
            return self.every is not None
        if self.unit == "updates":
            return position.update // self.every > before // self.every
        return position.batch == 0 and position.epoch % self.every == 0

    def left(self, update: int) -> int:
        """Return the updates until one is due that is counted in updates."""
        return (
            sys.maxsize if self.every is None or self.unit != "updates" else self.every - update % self.every
        )

    def save(
        self,
        session: Session,
        links: Links,
        position: Position,
        progress: Progress,
        random: Mapping[str, Tensor],
    ) -> None:
        """Start a save. All ranks call it with equal values, except for their stages and `random`.

        `random`: the random state from which the epoch's batches come again, and other tensors of it.
        """
        pipeline = session.plan.pipeline
        manifest = Manifest(self.run, position, self.conditions, pipeline, self.config, progress)
        writing = self.writer.save(manifest, partial(snapshot, session, links, random))
        writing.add_done_callback(partial(self._note, position.update, links.world.rank))

    def _note(self, update: int, rank: int, writing: Future[Path]) -> None:
        failure = writing.exception()
        self.not_saved = update if failure else None
        if failure and not rank:
            log.warning(
                "pipetrain: the checkpoint of update %d was NOT saved: %s; training goes on, and the "
                "checkpoints before it are as they were",
                *(update, failure),
            )

    def close(self) -> None:
        self.signals.drained.set()
        self.writer.close()
