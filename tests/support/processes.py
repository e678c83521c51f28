"""pipetrain in processes of its own, as a person starts it, and killed with all that it started.

To import torch and pipetrain takes 2 seconds of a processor, in torchrun and in each of its ranks. So a
program is forked from a server that has imported them, and torchrun forks its ranks likewise. What it has not
is what Python does before a program and after it: a test of imports, or of the end, starts a `cold` one.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Timer
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from pipetrain.checkpoint.files import CHECKPOINTS, Manifest, folders, read_whole
from pipetrain.typed_json import DamagedCheckpoint
from tests.support import DEADLINE_S
from tests.support.fork_server import TORCHRUN as TORCHRUN
from tests.support.fork_server import context

CHECKOUT = Path(__file__).parents[2]
SMALL = ["model=mlp", "data=digits", "data.train_limit=384", "data.test_limit=64", "batch_size=64"]
SMALL += ["device=cpu", "threads=1"]
FAULTY = ["model._target_=tests.support.models.faulty", "partition=[2]"]
LAUNCHER = "pipetrain.commands.launcher"
TWO = ["-m", TORCHRUN, "--standalone", "--nproc_per_node=2"]
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}


class Program:
    """Python with `words` as its command line, used as a subprocess.Popen that reads what is said."""

    def __init__(self, words: Sequence[object], folder: Path, variables: Mapping[str, str]) -> None:
        read, write = os.pipe()
        largest = resource.getrlimit(resource.RLIMIT_FSIZE)
        given = [str(word) for word in words], str(folder), dict(variables), Connection(write), largest
        self._process = context().Process(target=_started, args=given)
        self._process.start()
        self.pid: int = self._process.pid
        self.stdout = open(read, errors="replace")  # noqa: SIM115 - closed with this object

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def wait(self) -> int | None:
        self._process.join()
        return self.poll()

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class Forked(Program):
    """What torchrun has of a rank: a subprocess.Popen that forks this process."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **_: object) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=_forked, args=(args[1:], env))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what a handler raises at a fork is lost
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid = self._process.pid or 0
        while self.poll() is None and os.getpgid(self.pid) != self.pid:  # torchrun ends it by its group
            time.sleep(0.001)

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0)
        return self.poll()


class Cold(subprocess.Popen[str]):
    """A Program in an interpreter that is started for it."""

    def __init__(self, words: Sequence[object], folder: Path, variables: Mapping[str, str]) -> None:
        command, pipe = [sys.executable, *map(str, words)], subprocess.PIPE
        out = {"stdout": pipe, "stderr": subprocess.STDOUT, "text": True}
        super().__init__(command, cwd=folder, env=variables, start_new_session=True, **out)  # type: ignore[call-overload]


def _started(
    words: Sequence[str], folder: str, variables: Mapping[str, str], out: Connection, largest: tuple[int, int]
) -> NoReturn:
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    out.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, largest)
    os.chdir(folder)
    subprocess_handler.Popen = Forked  # type: ignore[misc,assignment]
    _become(words, variables)


def _forked(words: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Leave to torchrun what it has set up for itself: its handlers, folders and sockets."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    logging.disable(logging.NOTSET)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    _become(words, variables)


def _become(words: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Run what a Python with this command line would, and end as it would."""
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    multiprocessing.set_start_method("fork", force=True)  # as in any process of Linux
    status = 0
    try:
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        _run([word for word in words if word != "-u"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(words: Sequence[str]) -> None:
    kind, *rest = words
    sys.path.insert(0, os.getcwd() if kind == "-m" else str(Path(kind).resolve().parent))
    if kind == "-m":
        name, *sys.argv[1:] = rest
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # runpy warns of it
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, *sys.argv[1:] = rest
        exec(code, {"__name__": "__main__"})
    else:
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


Started = Program | Cold


@contextmanager
def running(
    folder: Path,
    words: Sequence[object],
    variables: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    cold: bool = False,
) -> Iterator[Started]:
    """Run Python with these words; whatever is left of it, and of what it started, at the end is killed."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(CHECKOUT), "CUDA_VISIBLE_DEVICES": ""}
    process = (Cold if cold else Program)(words, folder, {**os.environ, **own, **(variables or {})})
    deadline = Timer(deadline_s, kill, (process,))  # whoever reads what it says then comes to an end
    deadline.start()
    try:
        yield process
    finally:
        deadline.cancel()
        kill(process)
        process.wait()


@contextmanager
def started(
    folder: Path,
    words: Sequence[str],
    *,
    restarts: int = 0,
    ranks: int = 2,
    launcher: str = TORCHRUN,
    cold: bool = False,
) -> Iterator[Started]:
    """Start some ranks under torchrun, or one without."""
    alone = ranks == 1 and not restarts
    before = ["--standalone", f"--nproc_per_node={ranks}", f"--max-restarts={restarts}"]
    command = [*([] if alone else ["-m", launcher, *before]), "-m", "pipetrain", *SMALL, *words]
    with running(folder, command, cold=cold) as process:
        yield process


@dataclass(frozen=True)
class Ended:
    """What is left of a program: its status, what it said, how many of its processes still live, its run."""

    status: int
    out: str
    living: int
    run: Path

    @classmethod
    def of(cls, process: Started, run: Path, seen: str = "") -> Ended:
        """Wait for the end. `seen`: what was read before."""
        out = seen + ended(process)
        return cls(int(process.wait() or 0), out, len(living(process)), run)

    @property
    def checkpoints(self) -> list[str]:
        return list(checkpoints(self.run))


def checkpoints(run: Path) -> dict[str, Manifest]:
    """The checkpoints of a run that are whole, the newest first."""
    whole: dict[str, Manifest] = {}
    for folder in folders(run / CHECKPOINTS):
        with suppress(DamagedCheckpoint):
            whole[folder.name] = read_whole(folder)
    return whole


def finished(folder: Path, words: Sequence[object], **options: Any) -> Ended:
    """Run Python with these words to its end."""
    with running(folder, words, **options) as process:
        return Ended.of(process, folder / "run")


def kill(process: Started) -> None:
    """Kill a program and all that it started: a stopped process would outlive its torchrun."""
    for pid in living(process):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def living(process: Started) -> list[int]:
    """The pids of a program and of what it started, by whomever: they say what they say through one pipe."""
    mine, found = os.fstat(process.stdout.fileno()).st_ino, []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):  # it has just ended, or is somebody else's
            if os.readlink(path) == f"pipe:[{mine}]":
                found.append(int(path.parts[2]))
    return sorted(found)


def ended(process: Started) -> str:
    """Wait for the end, and return what was said."""
    out = process.stdout.read()
    process.wait()
    return out


BUSY = r"pipetrain: (it takes time to|rank \d+ still waits to meet the others) "


def lines_of(out: str) -> list[str]:
    """The lines of what was said, but for those that a busy machine adds."""
    return [line for line in out.splitlines() if not re.match(BUSY, line)]


def said(out: str) -> str:
    return "\n".join(line for line in lines_of(out) if line.startswith("pipetrain: "))


def rank_of(process: Started, rank: int) -> int:
    """The pid of a rank: torchrun starts them in turn."""
    children = Path(f"/proc/{process.pid}/task").glob("*/children")
    started = {int(pid) for path in children for pid in path.read_text().split()}
    return sorted(started.intersection(living(process)))[rank]


def await_line(process: Started, start: str) -> str:
    """Read what is said until a line with a word; return that and all before it."""
    seen = ""
    for line in process.stdout:
        seen += line
        if start in line:
            return seen
    raise AssertionError(seen)


def await_epoch(process: Started, epoch: int) -> str:
    """Read what is said until an epoch is done."""
    return await_line(process, f"epoch {epoch}/")
