"""Start a command, and end it with everything that it has started.

torchrun puts each worker into a session of its own, so a signal to torchrun's group reaches none of them, and
where torchrun itself is killed they train on. The run's processes are therefore known by a mark in their
environment, which they inherit however they were started and whoever has adopted them since.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

MARK = "PIPETRAIN_COMPARISON"
PATIENCE_S = 10.0  # between the request to end and the kill

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run(
    command: Sequence[str], log: Path, environment: Mapping[str, str], keep_open: Sequence[int] = ()
) -> int:
    """Run a command to its end with its output in `log`, and return its status.

    However this is left, by an exception too, no process of the command's remains. The file descriptors
    `keep_open` stay open in the command, and with them a lock that hangs on one.
    """
    mark = f"{MARK}={os.getpid()}-{time.monotonic_ns()}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, MARK: mark.partition("=")[2]},
            pass_fds=keep_open,
            start_new_session=True,
        )
        try:
            return process.wait()
        finally:
            with _undisturbed():
                _end(process, mark.encode())


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, unless they are ignored."""
    before = {
        number: signal.signal(number, _interrupt)
        for number in ENDING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore the signals that end us, so that a second Ctrl-C does not stop the cleaning up."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(process: subprocess.Popen[bytes], mark: bytes) -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + PATIENCE_S
    while (left := _marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: bytes) -> list[int]:
    """Return the live processes with this mark in their environment. Where there is no /proc: none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is somebody else's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
