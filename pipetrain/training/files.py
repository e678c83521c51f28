"""Rank 0's files, written so that a full disk ends no run: what fails is said once, and tried again later.

Any file can fail with an OSError at any time: no room, a quota, a file system that has become read-only. The
run goes on without it, and whoever writes can make again what is missing when there is room.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path

log = logging.getLogger("pipetrain")


class Files:
    """The files that are to be written. `failed`: those that could not be when it was tried last, and why."""

    def __init__(self) -> None:
        self._due: dict[Path, tuple[Callable[[], object], str]] = {}
        self.failed: dict[Path, str] = {}

    def due(self, path: Path, write: Callable[[], object], said: str = "") -> None:
        """Let `write` be called when files are written, until it raises no OSError; `said` is said then."""
        self._due[path] = write, said

    def whole(self, path: Path, write: Callable[[Path], object], said: str = "") -> None:
        """Let a file be what `write` makes of the path that it is given."""
        self.due(path, partial(write_whole, path, write), said)

    def text(self, path: Path, text: str) -> None:
        """Let a file hold a text."""
        self.whole(path, partial(Path.write_text, data=text))

    def write(self) -> None:
        """Write all that is due, each file apart from the others."""
        for path, (write, said) in list(self._due.items()):
            try:
                write()
            except OSError as error:
                if path not in self.failed:
                    warn(path, error)
                self.failed[path] = why(error)
            else:
                del self._due[path]
                self.failed.pop(path, None)
                if said:
                    log.info("%s", said)


class Growing:
    """A file that gets longer part by part; `part` returns any of them, by its number."""

    def __init__(self, path: Path, part: Callable[[int], bytes]) -> None:
        self.path = path
        self._part = part
        self._parts = self._size = 0  # what is there

    def grow(self, parts: int) -> None:
        """Add what it lacks of so many parts: all, where it is not as it was left. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() or self.path.stat().st_size != self._size:
            self._parts = self._size = 0
        try:
            with self.path.open("ab" if self._size else "wb") as file:
                size = self._size + sum(file.write(self._part(n)) for n in range(self._parts, parts))
        except OSError:
            with suppress(OSError):
                os.truncate(self.path, self._size)  # half a part would spoil what comes after it
            raise
        self._parts, self._size = parts, size


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside, which then takes the place of the old one. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(new)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)  # half of it would take the room of something else
        raise


def why(error: OSError) -> str:
    """Return what was wrong, without the path."""
    return error.strerror or str(error)


def warn(path: Path | str, error: OSError) -> None:
    """Say that a file cannot be written, and that this is no end."""
    log.warning(
        "pipetrain: %s cannot be written: %s; training goes on, and it is written again when there is room",
        *(path, why(error)),
    )


class LogFile(logging.FileHandler):
    """A log file. A line that cannot be written is kept, and stands before the next one that can be.

    The handlers of Python's own print a traceback for each such line, and may lose it.
    """

    def __init__(self, filename: str) -> None:
        super().__init__(filename, delay=True)
        self._file: FileIO | None = None
        self._kept = b""
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, after those that are kept."""
        try:
            self._kept += f"{self.format(record)}\n".encode()
            self._write()
        except OSError as error:
            first, self._failed = not self._failed, True
            if first and record.levelno < logging.ERROR:  # an error is the run's end
                warn(self.baseFilename, error)  # which comes here too, and is kept
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Try to write what is kept."""
        self.acquire()
        try:
            with suppress(OSError):
                self._write()
        finally:
            self.release()

    def close(self) -> None:
        """Try a last time."""
        self.flush()
        if self._file:
            self._file.close()
            self._file = None
        super().close()

    def _write(self) -> None:
        while self._kept:
            self._file = self._file or FileIO(self.baseFilename, "a")
            self._kept = self._kept[self._file.write(self._kept) :]
        self._failed = False
