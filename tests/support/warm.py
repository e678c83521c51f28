"""Programs in processes that are forked where torch is imported already, in place of started ones.

To import torch and pipetrain takes 2 seconds of a processor, in torchrun and in each of its ranks. A program
that is forked has its own arguments, folder, variables (in /proc too), output, session and status, and
torchrun forks its ranks likewise. What it has not is what Python does before a program and after it: a test
of the imports, or of the end of the interpreter, starts one.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import os
import resource
import runpy
import signal
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic, sleep
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

PRELOADED = ["torch._dynamo", "torch.distributed.run", "sklearn.datasets", "pipetrain.train"]
PRELOADED += ["matplotlib.figure", "matplotlib.backends.backend_agg", "torch.utils.tensorboard"]
PRELOADED += ["benchmark.contestants", "tests.support.jobs"]
PRELOADED += [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bert")]
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1}
POLL_S = 0.02
ENVIRONMENT = slice(47, 49)  # in /proc/self/stat, behind the name: where the variables of the start lie


def context() -> Any:
    """Return the multiprocessing context whose server has imported what tests need; there is one server."""
    made: Any = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()
    return made


class Program:
    """Python with `words` as its command line. It is used as a subprocess.Popen that reads what is said."""

    def __init__(self, words: Sequence[object], folder: Path, variables: Mapping[str, str]) -> None:
        read, write = os.pipe()
        largest = resource.getrlimit(resource.RLIMIT_FSIZE)
        given = [str(word) for word in words], str(folder), dict(variables), Connection(write), largest
        self._process = context().Process(target=_started, args=given)
        self._process.start()
        self.pid: int = self._process.pid
        self.mark = ""
        self.stdout = open(read, errors="replace")  # noqa: SIM115 - closed with this object

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self) -> int | None:
        self._process.join()
        return self.poll()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _started(
    words: Sequence[str], folder: str, variables: Mapping[str, str], out: Connection, largest: tuple[int, int]
) -> NoReturn:
    os.setsid()
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    out.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, largest)
    os.chdir(folder)
    subprocess_handler.Popen = Forked  # type: ignore[misc,assignment]
    _become(words, variables)


class Forked:
    """What torchrun has of a rank: a subprocess.Popen that forks this process."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **_: object) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what a handler raises at a fork is lost
        self.pid = os.fork()
        if not self.pid:
            os.setsid()
            _forget()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if not self.pid:
            _become(args[1:], env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and monotonic() > end:
                raise TimeoutExpired("a rank", timeout or 0)
            sleep(POLL_S)
        return code


def _forget() -> None:
    """Leave to torchrun what it has set up for itself: its handlers, folders and sockets."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    logging.disable(logging.NOTSET)
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    os.closerange(3, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _become(words: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Run what a Python with this command line would, and end as it would."""
    _take(variables)
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
    if kind == "-m":
        name, *sys.argv[1:] = rest
        if not hasattr(sys.modules.get(name), "__path__"):
            sys.modules.pop(name, None)  # runpy warns of it
        sys.path.insert(0, os.getcwd())
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, *sys.argv[1:] = rest
        exec(code, {"__name__": "__main__"})
    else:
        sys.argv = [kind, *rest]
        sys.path.insert(0, str(Path(kind).resolve().parent))
        runpy.run_path(kind, run_name="__main__")


def _take(variables: Mapping[str, str]) -> None:
    """Have these variables alone, and let /proc show them, in the place of those of the parent's start."""
    os.environ.clear()
    os.environ.update(variables)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[ENVIRONMENT])
    shortest_first = sorted(variables.items(), key=lambda variable: len(variable[1]))
    shown = "".join(f"{name}={value}\0" for name, value in shortest_first).encode()
    ctypes.memmove(start, shown[: end - start].ljust(end - start, b"\0"), end - start)
