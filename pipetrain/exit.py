"""How a command ends: each expected error is one sentence and an exit status.

The statuses: 0 finished, or stopped and saved; 1 failed; 2 refused before training; 130 Ctrl-C, saved or not;
143 ended by SIGTERM before all was saved.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import wraps
from inspect import isfunction, isgeneratorfunction
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from pipetrain.errors import (
    ActionFailed,
    ChannelError,
    ConfigError,
    NotRecorded,
    Refused,
    TrainingStopped,
    let_speak,
)
from pipetrain.schedule.actions import ScheduleError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Error = TypeVar("_Error", bound=BaseException)

log = logging.getLogger("pipetrain")

FAILED, REFUSED, INTERRUPTED, TERMINATED = 1, 2, 130, 143
EXPECTED = (ConfigError, ScheduleError, ChannelError, NotRecorded, TrainingStopped)
_INTERNAL = {"", "pipetrain", "torch", *sys.stdlib_module_names}  # packages
ENDED = "PIPETRAIN_ENDED"  # a folder where each rank writes its status, for commands/launcher.py


def guarded(action: Callable[[], int]) -> int:
    """Run `action` and return its status; print an expected error, and return its status."""
    try:
        return action()
    except KeyboardInterrupt as stop:
        return _report(str(stop) or "interrupted", INTERRUPTED) if _rank() == 0 else INTERRUPTED
    except EXPECTED as error:
        status = REFUSED if isinstance(error, ConfigError | ScheduleError) else FAILED
        if isinstance(error, SystemExit):  # another rank prints it
            if not isinstance(error, Refused):  # all ranks receive a refusal before one leaves
                let_speak()
            _log(_sentence(error))
            return status
        if isinstance(error, ActionFailed) and (cause := _brief(error).__cause__) is not None:
            traceback.print_exception(cause)  # of the failure, most likely in the user's model
        return _report(error, status)


def brief(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a public function raise an expected error without our frames: its text is complete."""

    @wraps(call)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return call(*args, **kwargs)
        except EXPECTED as error:
            raise _brief(error) from error.__cause__

    @wraps(call)
    def iterated(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        started = list[bool]()

        def results() -> Iterator[Any]:
            started.append(True)
            try:
                yield from call(*args, **kwargs)  # type: ignore[misc]
            except EXPECTED as error:
                raise _brief(error) from error.__cause__

        generator = results()
        weakref.finalize(generator, _say_unread, call.__name__, started)
        return generator

    return iterated if isgeneratorfunction(call) else called


def brief_methods(kind: type[_T]) -> type[_T]:
    """Apply `brief` to the public methods of a class."""
    for name, method in list(vars(kind).items()):
        if isfunction(method) and (name == "__init__" or not name.startswith("_")):
            setattr(kind, name, brief(method))
    return kind


def _say_unread(name: str, started: list[bool]) -> None:
    """Warn about a generator that was dropped before its first result was read: nothing has run."""
    if not started and not _rank():
        log.warning(
            "pipetrain: %s() has done nothing: it runs while its results are read, in a for loop", name
        )


def _brief(error: Exception) -> Exception:
    """Keep only frames from the user's code on, in an error and its cause; drop a cause without any."""
    if error.__cause__ and not _in_user_code(error.__cause__).__traceback__:
        error.__cause__ = None
    return _in_user_code(error)


def _in_user_code(error: _Error) -> _Error:
    frames = error.__traceback__
    while frames and frames.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _INTERNAL:
        frames = frames.tb_next
    return error.with_traceback(frames)


def unread() -> int:
    """Discard further output, as the reader is gone (after `| head`, say); return the status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILED


def terminate(error: object, status: int = TERMINATED) -> NoReturn:
    """End the process after a signal with one sentence, from any thread.

    Nothing else ends a main thread that is in C++. No checkpoint is damaged: it gets its name when complete.
    """
    text = _sentence(error)
    try:
        os.write(2, f"{text}\n".encode())  # sys.stderr may be redirected, as while a model is traced
        _log(text)
        leave(status)
    finally:  # also if the reader is gone
        os._exit(status)


def leave(status: int) -> NoReturn:
    """Exit at once: destructors of process groups may hang or take long."""
    if (folder := os.environ.get(ENDED)) is not None:
        with suppress(OSError):
            Path(folder, str(_rank())).write_text(str(status))
    if status == 0:
        atexit._run_exitfuncs()  # includes those of the libraries of a user's model
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the reader is gone
            stream.flush()
    os._exit(status)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _report(error: object, status: int) -> int:
    """Print a message on standard error and write it to the run's log."""
    text = _sentence(error)
    with suppress(OSError):  # the reader is gone
        print(text, file=sys.stderr, flush=True)
    _log(text)
    return status


def _sentence(error: object) -> str:
    return "pipetrain: " + " ".join(str(error).split())


def _log(text: str) -> None:
    """Write a message to the run's log."""
    record = logging.LogRecord("pipetrain", logging.ERROR, __file__, 0, text, None, None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
