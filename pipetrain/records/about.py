"""What the records of a training say of it: its settings and plan, the task and the data."""

from __future__ import annotations

from dataclasses import dataclass

from pipetrain.data.sets import DataFacts
from pipetrain.plan.plan import Plan
from pipetrain.settings import Settings
from pipetrain.tasks import Task


@dataclass(frozen=True, slots=True)
class About:
    """A training of `settings.epochs` epochs of `batches` batches each. `settings.lr`: the peak rate."""

    settings: Settings
    plan: Plan
    task: Task
    data: DataFacts
    batches: int

    @property
    def updates(self) -> int:
        return self.settings.epochs * self.batches
