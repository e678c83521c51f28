"""A run's processes: started by the command `pipetrain`, and ended with all that they have started.

They are known by a mark in their environment, which they inherit however they were started and whoever has
adopted them since.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import pipetrain

MARK = "PIPETRAIN_COMPARISON"
PATIENCE_S = 10.0  # that killed processes have to be gone
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PIPETRAIN = (sys.executable, "-m", "pipetrain.commands.launcher")


def run(command: Sequence[str], nproc: int, log: Path, keep_open: Sequence[int] = ()) -> int:
    """Run a command with its output in `log`; return its exit status. No process of it remains.

    It has this pipetrain's code, and the cores shared between `nproc` ranks. The file descriptors `keep_open`
    stay open in it, and with them a lock that hangs on one.
    """
    code = str(Path(pipetrain.__file__).resolve().parents[1])
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), **os.environ, MARK: mark}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=keep_open,
            start_new_session=True,
        )
    try:
        return process.wait()
    finally:
        _kill_marked(f"{MARK}={mark}")
        process.wait()


def _kill_marked(mark: str) -> None:
    """Kill all processes with this `NAME=value` in their environment, and wait until they are gone."""
    with interruptible(signal.SIG_IGN):  # a second Ctrl-C does not stop the cleaning up
        deadline = time.monotonic() + PATIENCE_S
        while (left := marked(mark)) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def marked(mark: str) -> set[int]:
    """Return the processes with this `NAME=value` in their environment. Where there is no /proc: none."""
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is somebody else's
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                pids.add(int(folder.name))
    return pids


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def interruptible(handler: object = _interrupt) -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, unless they are ignored.

    `handler`: what all three are to do instead.
    """
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
