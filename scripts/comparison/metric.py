"""The metric by which runs are compared: the first of their task, which also decides their best epoch.

A run says its metrics in its `summary.json`. Without any, its loss is compared. Percentages are shown, and
computed with, as percent: 97.5 for a share of 0.975.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf, isfinite, isnan, log10
from typing import Any

TITLES = {"acc": "accuracy", "ppl": "perplexity", "miou": "mean IoU", "mse": "squared error"}


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's name (in tables and records), whether higher is better, and whether it is a percentage."""

    name: str
    higher: bool
    percent: bool

    @property
    def title(self) -> str:
        """Its name in a sentence."""
        return TITLES.get(self.name, self.name)

    @property
    def heading(self) -> str:
        """Its name at the start of a line."""
        return self.title[:1].upper() + self.title[1:]

    @property
    def slug(self) -> str:
        """Its name as a part of a file's name: `mean_iou`."""
        return re.sub(r"\W+", "_", self.title.lower())

    @property
    def direction(self) -> str:
        """Which values are better, in words."""
        return f"{'higher' if self.higher else 'lower'} is better"

    def value(self, summary: dict[str, Any], of: str) -> float:
        """Return a summary's value of it, as shown: `val` of the last epoch, `best_val` of the best one."""
        return float(self.scale * summary[f"{of}_{self.name}"])

    @property
    def scale(self) -> int:
        """What a recorded value is multiplied by to be shown."""
        return 100 if self.percent else 1

    def worth(self, value: float) -> float:
        """Return a number that is higher for a better value; NaN is the worst."""
        if isnan(value):
            return -inf
        return value if self.higher else -value

    def number(self, value: float, level: float | None = None) -> str:
        """Write a value without its unit: percent to hundredths, any other to four digits.

        `level`: where this is a deviation or a difference, the value beside which it stands, for the digits.
        """
        level = value if level is None else level
        digits = 2 if self.percent or not level or not isfinite(level) else 3 - floor(log10(abs(level)))
        return f"{value:.{max(0, digits)}f}"

    def text(self, value: float) -> str:
        """Write a value with its unit."""
        return self.number(value) + " %" * self.percent


ACCURACY = Metric("acc", higher=True, percent=True)
LOSS = Metric("loss", higher=False, percent=False)


def metrics_of(summary: dict[str, Any]) -> list[Metric]:
    """Return a run's metrics, the one to compare by first. A run that says nothing of them has accuracy."""
    if "metrics" not in summary:
        return [ACCURACY]
    return [Metric(one["name"], one["higher"], one["percent"]) for one in summary["metrics"]] or [LOSS]


def metric_of(summaries: Sequence[dict[str, Any]]) -> Metric:
    """Return the metric to compare by; accuracy where there is no run."""
    return metrics_of(summaries[0])[0] if summaries else ACCURACY
