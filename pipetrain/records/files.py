"""Rank 0's files. A write may fail with an OSError, such as a full disk: the run goes on and tries again."""

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
    """The files to be written. `failed`: the last failures, with their reasons."""

    def __init__(self) -> None:
        self._due: dict[Path, tuple[Callable[[], object], str]] = {}
        self.failed: dict[Path, str] = {}

    def due(self, path: Path, write: Callable[[], object], note: str = "") -> None:
        """Call `write` at each `Files.write` until it raises no OSError; then log `note`."""
        self._due[path] = write, note

    def whole(self, path: Path, write: Callable[[Path], object], note: str = "") -> None:
        self.due(path, partial(write_whole, path, write), note)

    def text(self, path: Path, text: str) -> None:
        self.whole(path, partial(Path.write_text, data=text))

    def write(self) -> None:
        """Write all files that are due; a failure does not affect the others."""
        for path, (write, note) in list(self._due.items()):
            try:
                write()
            except OSError as error:
                if path not in self.failed:
                    warn(path, error)
                self.failed[path] = why(error)
            else:
                del self._due[path]
                self.failed.pop(path, None)
                if note:
                    log.info("%s", note)


class Growing:
    """A file to which parts are appended; `part(n)` returns part number n."""

    def __init__(self, path: Path, part: Callable[[int], bytes]) -> None:
        self.path = path
        self._part = part
        self._parts = self._size = 0  # in the file

    def grow(self, parts: int) -> None:
        """Append the missing ones of the first `parts` parts; rewrite a changed file. Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() or self.path.stat().st_size != self._size:
            self._parts = self._size = 0
        try:
            with self.path.open("ab" if self._size else "wb") as file:
                size = self._size + sum(file.write(self._part(n)) for n in range(self._parts, parts))
        except OSError:
            with suppress(OSError):
                os.truncate(self.path, self._size)  # remove a partly written part
            raise
        self._parts, self._size = parts, size


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a new file, which then replaces the old one. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(new)
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def why(error: OSError) -> str:
    """Return the error's reason, without the path."""
    return error.strerror or str(error)


def warn(path: Path | str, error: OSError) -> None:
    """Log that a file cannot be written now."""
    log.warning(
        "pipetrain: %s cannot be written: %s; training goes on, and it is written again when there is room",
        *(path, why(error)),
    )


class LogFile(logging.FileHandler):
    """A log file that keeps lines which cannot be written, where Python's would print a traceback."""

    def __init__(self, filename: str) -> None:
        super().__init__(filename, delay=True)
        self._file: FileIO | None = None
        self._kept = b""
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._kept += f"{self.format(record)}\n".encode()
            self._write()
        except OSError as error:
            first, self._failed = not self._failed, True
            if first and record.levelno < logging.ERROR:  # after an error, the run ends
                warn(self.baseFilename, error)  # this line comes here too, and is kept
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self.acquire()
        try:
            with suppress(OSError):
                self._write()
        finally:
            self.release()

    def close(self) -> None:
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
