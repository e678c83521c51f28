"""The comparison's side of its workers: start them, ask them for runs, end them with all that they started.

The ranks of a run and what they start themselves are known by a mark in their environment, which they inherit
however they were started and whoever has adopted them since.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pipetrain

MARK = "PIPETRAIN_COMPARISON"
PATIENCE_S = 10.0  # that killed processes have to be gone
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COMMAND = (sys.executable, "-P", str(Path(__file__).with_name("workers.py")))


class Workers:
    """The process that makes the runs, started with the first of them; see `workers`."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._mark = f"{MARK}={os.getpid()}-{time.monotonic_ns()}"
        self._cpu_s = 0.0

    def run(self, words: Sequence[str], nproc: int, log: Path, keep_open: Sequence[int]) -> tuple[int, float]:
        """Make a run with its output in `log`; return its exit status, and the seconds that it computed.

        No process of the run remains. The file descriptors `keep_open` stay open in its processes, and with
        them a lock that hangs on one.
        """
        process = self._process = self._process or self._started(nproc, log, keep_open)
        assert process.stdin is not None
        assert process.stdout is not None
        log.touch()
        answer = ""
        with suppress(BrokenPipeError):
            asked = json.dumps({"words": words, "nproc": nproc, "log": str(log)})
            print(asked, file=process.stdin, flush=True)
            answer = process.stdout.readline()
        if not answer:  # it has died, and the next run starts another one
            self.end()
            return process.returncode, 0.0
        said: dict[str, Any] = json.loads(answer)
        before, self._cpu_s = self._cpu_s, said["cpu_s"]
        self._kill(but=process.pid)
        return said["status"], self._cpu_s - before

    def _started(self, nproc: int, log: Path, keep_open: Sequence[int]) -> subprocess.Popen[str]:
        """Start the process, with this pipetrain's code, and the cores shared between the ranks."""
        code = str(Path(pipetrain.__file__).resolve().parents[1])
        name, _, value = self._mark.partition("=")
        environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // nproc)), **os.environ}
        environment |= {name: value, "PYTHONUNBUFFERED": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))
        self._cpu_s = 0.0
        with log.open("wb") as errors:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                pass_fds=keep_open,
                start_new_session=True,
            )

    def end(self) -> None:
        """End the workers and all that they have started, at once: an interrupted run is started over."""
        with interruptible(signal.SIG_IGN):  # a second Ctrl-C does not stop the cleaning up
            self._kill()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None

    def _kill(self, but: int = 0) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (left := marked(self._mark.encode()) - {but}) and time.monotonic() < deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def marked(mark: bytes) -> set[int]:
    """Return the processes with this `NAME=value` in their environment. Where there is no /proc: none."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended, or is somebody else's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def interruptible(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers = _interrupt,
) -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, unless they are ignored.

    `handler`: what all three are to do instead.
    """
    heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
