"""The errors that a person who runs pipetrain sees: one sentence each, printed before a command exits.

Every part can refuse what it is given without knowing who called it: a command runs inside `guarded`, which
prints the sentence. The schedules have their own `ScheduleError`, as they import nothing of the package.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable

from pipetrain.schedule.actions import ScheduleError

REFUSED, FAILED, INTERRUPTED = 2, 1, 130


class ConfigError(ValueError):
    """A wrong configuration or input, refused in one sentence that says what, where and what to do."""


class TrainingStopped(RuntimeError):
    """A run that had to stop; the sentence says where it was and why."""


class ActionFailed(TrainingStopped):
    """An action whose layers failed or ran out of memory; its cause is the error that they raised."""


class NotRecorded(RuntimeError):
    """A run that came to its end, or was stopped, but whose records or weights could not be written."""


class ChannelError(RuntimeError):
    """A message that did not come or could not go; says which, and between whom."""


def guarded(action: Callable[[], int]) -> int:
    """Run `action`; turn each error that a person can meet into one sentence and an exit status."""
    try:
        return action()
    except (ConfigError, ScheduleError) as error:
        return _complain(error, REFUSED)
    except ActionFailed as error:
        if error.__cause__ is not None:  # most likely of a model that is not ours
            traceback.print_exception(error.__cause__)
        return _complain(error, FAILED)
    except (ChannelError, NotRecorded, TrainingStopped) as error:
        return _complain(error, FAILED)
    except KeyboardInterrupt as stop:
        if os.environ.get("RANK", "0") == "0":
            _complain(str(stop) or "interrupted", INTERRUPTED)
        return INTERRUPTED


def _complain(error: object, status: int) -> int:
    text = "pipetrain: " + " ".join(str(error).split())
    print(text, file=sys.stderr, flush=True)
    record = logging.LogRecord("pipetrain", logging.ERROR, __file__, 0, text, None, None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
    return status
