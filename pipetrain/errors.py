"""The errors that a person who runs pipetrain sees: one sentence each, printed before a command exits.

Every module may raise them, so this one imports none. The schedules have their own `ScheduleError`.
"""

from __future__ import annotations


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
