"""How a command ends: each error that a person can meet is one sentence and an exit status.

The statuses: 0 finished, or stopped and saved; 1 failed; 2 refused before anything was trained; 130 Ctrl-C.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipetrain.errors import ActionFailed, ChannelError, ConfigError, NotRecorded, TrainingStopped
from pipetrain.schedule.actions import ScheduleError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
ENDED = "PIPETRAIN_ENDED"  # a folder into which each rank writes its status, for pipetrain.launcher


def guarded(action: Callable[[], int]) -> int:
    """Run `action` and return its status; an error that a person can meet is said, and has a status too."""
    try:
        return action()
    except KeyboardInterrupt as stop:
        return _say(str(stop) or "interrupted", INTERRUPTED) if _rank() == 0 else INTERRUPTED
    except (ConfigError, ScheduleError) as error:
        return _say(error, REFUSED)
    except (ChannelError, NotRecorded, TrainingStopped) as error:
        if isinstance(error, ActionFailed) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)  # most likely of the user's own model
        return _say(error, FAILED)


def leave(status: int) -> None:
    """Exit at once: destructors of a broken process group may hang, and those of a whole one take long."""
    if (folder := os.environ.get(ENDED)) is not None:
        with suppress(OSError):
            Path(folder, str(_rank())).write_text(str(status))
    if status == 0:
        atexit._run_exitfuncs()  # those of a model's own libraries too
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _say(error: object, status: int) -> int:
    """Say a sentence on standard error and in the run's log."""
    text = "pipetrain: " + " ".join(str(error).split())
    print(text, file=sys.stderr, flush=True)
    record = logging.LogRecord("pipetrain", logging.ERROR, __file__, 0, text, None, None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
    return status
