"""The errors that a person who runs pipetrain meets: a sentence each, never a traceback of ours.

They stand in a room of their own, under everything, so that each part can refuse what it is given without
knowing who called it; the program's edge prints the sentence and exits. The schedules have their own
`ScheduleError`, because that room imports nothing.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A wrong configuration or input, refused in one sentence that says what, where and what to do."""


class TrainingStopped(RuntimeError):
    """A run that had to stop; the sentence says where it was and why."""


class ActionFailed(TrainingStopped):
    """An action whose layers failed, or found no memory; the error that they raised is its cause."""


class NotRecorded(RuntimeError):
    """A run that came to its end, or was stopped, but whose records or weights could not be written."""
