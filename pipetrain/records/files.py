"""Rank 0's files. A write may fail with an OSError, such as a full disk: the run continues and retries."""

from __future__ import annotations

import csv
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from io import FileIO, StringIO
from pathlib import Path
from typing import Any, TextIO

from pipetrain.exit import unread

log = logging.getLogger("pipetrain")


class Files:
    """Pending writes to a run's folder, if any. `failed`: files that could not be written, and why."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._due: dict[str, Callable[[Path], object]] = {}
        self.failed: dict[str, str] = {}

    def due(self, name: str, write: Callable[[Path], object]) -> None:
        """Call `write` with the path at each `Files.write` until it raises no OSError."""
        self._due[name] = write

    def whole(self, name: str, write: Callable[[Path], object]) -> None:
        """Let `write` make a new file, which then replaces the old one."""
        self.due(name, lambda path: _replace(path, write))

    def text(self, name: str, text: str) -> None:
        self.whole(name, lambda new: new.write_text(text))

    def write(self) -> None:
        """Write all pending files; a failure does not affect the others."""
        for name, write in list(self._due.items()) if self._folder else ():
            path = self._folder / name  # type: ignore[operator]
            try:
                write(path)
            except OSError as error:
                if name not in self.failed:
                    warn(path, error)
                self.failed[name] = error.strerror or str(error)
            else:
                del self._due[name]
                self.failed.pop(name, None)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    new = path.with_name(f"{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def warn(path: Path, error: OSError) -> None:
    """Log that a file cannot be written now."""
    log.warning(
        "pipetrain: %s cannot be written: %s; training goes on, and it is written again when there is room",
        *(path, error.strerror or error),
    )


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with a header of all their names, and numbers of six digits."""
    text = StringIO()
    writer = csv.DictWriter(text, {name: None for row in rows for name in row})
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {name: f"{cell:.6g}" if isinstance(cell, float) else cell for name, cell in row.items()}
        )
    return text.getvalue()


class Console(logging.StreamHandler[TextIO]):
    """Standard output: a run continues if a line cannot be written, or is not read, as after `| head`."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, BrokenPipeError):
            unread()
        elif not isinstance(error, OSError):
            super().handleError(record)


class LogFile(logging.FileHandler):
    """A log file that holds lines which cannot be written; Python's would print a traceback.

    It stays open, so it moves with its folder when that is renamed.
    """

    def __init__(self, filename: str) -> None:
        super().__init__(filename, delay=True)
        self._file: FileIO | None = None
        self._kept = b""
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception:  # the arguments of a user's message do not fit it: as Python's handlers
            self.handleError(record)
            return
        self._kept += f"{line}\n".encode(errors="backslashreplace")
        before = self._failed
        try:
            if self._file is None:
                self._file = FileIO(self.baseFilename, "a")
            while self._kept:
                self._kept = self._kept[self._file.write(self._kept) :]
            self._failed = False
        except OSError as error:
            self._failed = True
            if not before and record.levelno < logging.ERROR:  # after an error, the run ends
                warn(Path(self.baseFilename), error)  # this line is logged here too, and held

    def close(self) -> None:
        super().close()
        file, self._file = self._file, None
        if file is not None:
            file.close()
