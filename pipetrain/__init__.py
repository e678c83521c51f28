"""pipetrain: trains one model over several processes, by a schedule that is checked before the start.

    pipe = pipetrain.Pipeline(model, loss=..., optimizer=..., schedule="1f1b", microbatches=4)

The names below are imported at their first use, because torch takes a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipetrain.version import __version__ as __version__

if TYPE_CHECKING:
    from pipetrain.errors import ActionFailed as ActionFailed
    from pipetrain.errors import ChannelError as ChannelError
    from pipetrain.errors import ConfigError as ConfigError
    from pipetrain.errors import TrainingStopped as TrainingStopped
    from pipetrain.model.chain import Pop as Pop
    from pipetrain.model.chain import Stash as Stash
    from pipetrain.schedule.actions import Action as Action
    from pipetrain.schedule.actions import Op as Op
    from pipetrain.schedule.actions import ScheduleError as ScheduleError
    from pipetrain.tasks import Classification as Classification
    from pipetrain.tasks import LanguageModelling as LanguageModelling
    from pipetrain.tasks import Mean as Mean
    from pipetrain.tasks import Metric as Metric
    from pipetrain.tasks import ModelLoss as ModelLoss
    from pipetrain.tasks import Regression as Regression
    from pipetrain.tasks import Segmentation as Segmentation
    from pipetrain.tasks import Task as Task
    from pipetrain.trainer.fit import fit as fit
    from pipetrain.trainer.pipeline import Pipeline as Pipeline
    from pipetrain.trainer.pipeline import schedules as schedules

_NAMES = {
    "errors": "ActionFailed ChannelError ConfigError TrainingStopped",
    "trainer.fit": "fit",
    "model.chain": "Pop Stash",
    "trainer.pipeline": "Pipeline schedules",
    "schedule.actions": "Action Op ScheduleError",
    "tasks": "Classification LanguageModelling Mean Metric ModelLoss Regression Segmentation Task",
}
_HOMES = {name: f"pipetrain.{home}" for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
