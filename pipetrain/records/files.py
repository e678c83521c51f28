"""Rank 0's files. A write may fail with an OSError, such as a full disk: the run goes on and tries again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from io import FileIO
from pathlib import Path

log = logging.getLogger("pipetrain")


class Files:
    """What is to be written into a run's folder, if there is one. `failed`: what could not be, and why."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._due: dict[str, Callable[[Path], object]] = {}
        self.failed: dict[str, str] = {}

    def due(self, name: str, write: Callable[[Path], object]) -> None:
        """Call `write` with the path at each `Files.write` until it raises no OSError."""
        self._due[name] = write

    def whole(self, name: str, write: Callable[[Path], object]) -> None:
        """Let `write` make a file."""
        self.due(name, lambda path: write_whole(path, write))

    def text(self, name: str, text: str) -> None:
        self.whole(name, lambda new: new.write_text(text))

    def write(self) -> None:
        """Write all that is due; a failure does not affect the others."""
        if self._folder is None:
            return
        for name, write in list(self._due.items()):
            path = self._folder / name
            try:
                write(path)
            except OSError as error:
                if name not in self.failed:
                    warn(path, error)
                self.failed[name] = error.strerror or str(error)
            else:
                del self._due[name]
                self.failed.pop(name, None)


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


def warn(path: Path, error: OSError) -> None:
    """Log that a file cannot be written now."""
    log.warning(
        "pipetrain: %s cannot be written: %s; training goes on, and it is written again when there is room",
        *(path, error.strerror or error),
    )


class LogFile(logging.Handler):
    """A log file that keeps lines which cannot be written, where Python's would print a traceback."""

    def __init__(self, filename: str) -> None:
        super().__init__()
        self._path = Path(filename).absolute()
        self._kept = b""
        self._error: OSError | None = None

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._kept += f"{self.format(record)}\n".encode()
        except Exception:
            self.handleError(record)
        before = self._error
        self.flush()
        if self._error and not before and record.levelno < logging.ERROR:  # after an error, the run ends
            warn(self._path, self._error)  # this line comes here too, and is kept

    def flush(self) -> None:
        try:
            with FileIO(self._path, "a") as file:
                while self._kept:
                    self._kept = self._kept[file.write(self._kept) :]
            self._error = None
        except OSError as error:
            self._error = error
