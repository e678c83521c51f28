"""Rank 0's files, written so that a full disk ends no run: what fails is said once, and tried again later.

Any file can fail with an OSError at any time: no room, a quota, a file system that has become read-only. The
run goes on without it, and whoever writes can make again what is missing when there is room.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from io import FileIO
from pathlib import Path

log = logging.getLogger("pipetrain")


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
