"""Writes checkpoints between two windows, in the background, for fit and for Pipeline.save.

The first rank of each stage writes its file, see checkpoint/rank_state.py; rank 0 adds the manifest. Training
waits only for the copy to host memory. In the background each rank reports what it wrote, or why it could
not; rank 0 broadcasts the outcome, and each rank then removes its part of a failed checkpoint. Earlier
checkpoints are not changed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from pipetrain.checkpoint.epoch_record import best_update
from pipetrain.checkpoint.files import (
    CHECKPOINTS,
    PARTIAL,
    Manifest,
    PartFile,
    folder_name,
    prune,
    publish,
    remove_unfinished,
    write_part,
)
from pipetrain.errors import ChannelError, TrainingStopped
from pipetrain.runtime.comm.collectives import Ranks

POLL_S = 0.05
TURN_S = 0.5
SEEN_S = 5.0  # seconds until a shared file system shows files of another machine
Files = Mapping[str, Mapping[str, Tensor]]


class Writer:
    """Writes one rank's part of every checkpoint into `run_dir`; `keep`: the newest to keep; None: all."""

    def __init__(self, run_dir: Path, ranks: Ranks, keep: int | None) -> None:
        self._folder = run_dir / CHECKPOINTS
        self._ranks, self._aside = ranks, ranks.for_thread()
        self._rank = ranks.world.rank
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, "pipetrain-save")
        self._writing: list[Future[Path]] = []  # the last save

    def save(self, manifest: Manifest, state: Callable[[], Files]) -> Future[Path]:
        """Start a save, after waiting for the previous one. All ranks must call it.

        `manifest`: only rank 0's is used, still without parts. `state`: returns copies of each file's
        tensors. The result is the checkpoint's folder, or on all ranks TrainingStopped.
        """
        self._finish()
        files: Files = {}
        failure = ""
        try:
            files = state()
        except TypeError as error:
            failure = f"the optimizer of rank {self._rank} remembers {error}"
        self._writing = [self._thread.submit(self._save, manifest, files, failure)]
        return self._writing[0]

    def close(self) -> None:
        """Wait for the last save. All ranks must call it. Raises ChannelError for a lost rank."""
        self._finish()
        self._thread.shutdown()
        del self._aside  # its group would live as long as anything refers to this writer

    def leave(self) -> None:
        """Wait a little for the last save, in which other ranks may take part, before this rank leaves."""
        wait(self._writing, SEEN_S)

    def _finish(self) -> None:
        """Wait until no rank is writing. The ranks compare every TURN_S, so a dead one is noticed."""
        while self._ranks.maximum("the end of a save", len(wait(self._writing, TURN_S).not_done)):
            pass
        for writing in self._writing:
            if isinstance(lost := writing.exception(), ChannelError):
                raise lost

    def _save(self, manifest: Manifest, files: Files, failure: str) -> Path:
        name, final = folder_name(manifest.position.update), ""
        unfinished = self._folder / (name + PARTIAL)
        parts: dict[str, PartFile] = {}
        try:
            if self._rank == 0:
                remove_unfinished(self._folder, without=unfinished)
            parts = {name: write_part(unfinished, name, tensors) for name, tensors in files.items()}
        except OSError as error:
            failure = f"rank {self._rank} cannot write {unfinished}: {error}"
        reports = self._aside.gather(
            f"what they wrote of {name}", [failure, {name: asdict(part) for name, part in parts.items()}]
        )
        failure = next((why for why, _ in reports if why), "")
        if self._rank == 0 and not failure:
            try:
                parts = {name: PartFile(**part) for _, written in reports for name, part in written.items()}
                final = str(self._publish(unfinished, manifest, parts))
            except OSError as error:
                failure = str(error)
        failure, final = self._aside.broadcast(f"whether {name} is whole", [failure, final])
        if failure:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise TrainingStopped(failure)
        return Path(final)

    def _publish(self, unfinished: Path, manifest: Manifest, parts: dict[str, PartFile]) -> Path:
        """Rename a complete checkpoint to its final name, and remove older ones. Raises OSError."""
        seen = time.monotonic() + SEEN_S
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
