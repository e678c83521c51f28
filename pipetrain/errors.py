"""The errors that users see: one sentence each, printed before a command exits.

Every module may raise them, so this one imports none. The schedules have their own `ScheduleError`.
"""

from __future__ import annotations

import atexit
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

SPEAKING_S = 2.0  # that a rank may take to say an error

_Error = TypeVar("_Error", bound=Exception)


class ConfigError(ValueError):
    """An invalid option or input; the text says what is wrong, where, and what to do."""


class Refused(ConfigError):
    """A refusal that all ranks of a run have received."""


class TrainingStopped(RuntimeError):
    """A training that had to stop; the text says where and why."""


class ActionFailed(TrainingStopped):
    """An action whose layers raised an error or ran out of memory; its cause is that error."""

    def __init__(self, text: str, stage: int) -> None:
        super().__init__(text)
        self.stage = stage


class NotRecorded(RuntimeError):
    """A run that finished or was stopped, but whose records or weights could not be written."""


class ChannelError(RuntimeError):
    """A message between ranks that was not received or sent; the text says which, and between whom."""


def unsaid(error: _Error) -> _Error:
    """Return an error of the same kind that another rank says, too.

    It can be caught likewise; where nobody does, Python ends with status 1, and prints nothing. It ends later
    than the other rank, as torchrun ends all when one has.
    """
    atexit.unregister(let_speak)
    atexit.register(let_speak)
    kind = type(error)
    quiet = type(kind.__name__, (kind, SystemExit), {"code": 1, "__module__": kind.__module__})
    return quiet(*error.args)  # type: ignore[no-any-return]


def of_all(error: _Error, rank: int) -> _Error:
    """Return an error that all ranks raise as this `rank` does: rank 0 says it."""
    return unsaid(error) if rank else error


def let_speak() -> None:
    """Wait for the rank that says an error."""
    time.sleep(SPEAKING_S)


def cause_of(error: Exception) -> str:
    """Return what torch.distributed says of a failure, without gloo's source line and its advice."""
    text = str(error).strip().splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] |\. This is typically caused by .*", "", text)


def one_line(error: object) -> str:
    """Return the text of an error, or of anything else, as one line."""
    return " ".join(str(error).split())


@contextmanager
def failing(where: str, hint: str = "") -> Iterator[None]:
    """Raise what fails within, where a user's code may raise anything, as a ConfigError that says where."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        ours = type(error).__module__.startswith("pipetrain.")  # such as NotMade, which is no word of users
        plain = ours or type(error) in (TypeError, ValueError, RuntimeError)
        kind = "" if plain else type(error).__name__
        said = ": ".join(filter(None, (kind, one_line(error)))) or type(error).__name__
        raise ConfigError(f"{where}: {said}{hint}") from error
