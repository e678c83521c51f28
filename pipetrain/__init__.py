"""pipetrain: trains one model over several processes, by a schedule that is checked before the start.

    pipe = pipetrain.Pipeline(model, loss=..., optimizer=..., schedule="1f1b", microbatches=4)

The names below are imported at their first use, because torch takes a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipetrain.errors import ActionFailed, ChannelError, ConfigError, TrainingStopped
    from pipetrain.fitting import fit
    from pipetrain.network.chain import Pop, Stash
    from pipetrain.pipeline import Pipeline, schedules
    from pipetrain.schedule.actions import Action, Op, ScheduleError
    from pipetrain.tasks import (
        Classification,
        LanguageModelling,
        Metric,
        ModelLoss,
        Regression,
        Segmentation,
        Task,
    )

_HOMES = {
    "pipetrain.pipeline": ("Pipeline", "schedules"),
    "pipetrain.fitting": ("fit",),
    "pipetrain.tasks": (
        "Classification",
        "LanguageModelling",
        "Metric",
        "ModelLoss",
        "Regression",
        "Segmentation",
        "Task",
    ),
    "pipetrain.network.chain": ("Pop", "Stash"),
    "pipetrain.errors": ("ActionFailed", "ChannelError", "ConfigError", "TrainingStopped"),
    "pipetrain.schedule.actions": ("Action", "Op", "ScheduleError"),
}
__all__ = [
    "Action",
    "ActionFailed",
    "ChannelError",
    "Classification",
    "ConfigError",
    "LanguageModelling",
    "Metric",
    "ModelLoss",
    "Op",
    "Pipeline",
    "Pop",
    "Regression",
    "ScheduleError",
    "Segmentation",
    "Stash",
    "Task",
    "TrainingStopped",
    "fit",
    "schedules",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
