"""The metric by which runs are compared, and how figures are written.

It is the first metric of their task, which also decides their best epoch. A run says its metrics in its
`summary.json`. Without any, its loss is compared. Percentages are shown, and computed with, as percent: 97.5
for a share of 0.975.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan
from statistics import fmean, stdev
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
        return TITLES.get(self.name, self.name)

    @property
    def unit(self) -> str:
        return " in %" if self.percent else ""

    @property
    def scale(self) -> int:
        """What a recorded value is multiplied by to be shown."""
        return 100 if self.percent else 1

    def value(self, summary: dict[str, Any], of: str) -> float:
        """Return a summary's value of it, as shown: `val` of the last epoch, `best_val` of the best one."""
        return float(self.scale * summary[f"{of}_{self.name}"])

    def worth(self, value: float) -> float:
        """Return a number that is higher for a better value; NaN is the worst."""
        if isnan(value):
            return -inf
        return value if self.higher else -value

    def number(self, value: float) -> str:
        """Write a value without its unit: to hundredths, or to four digits below a tenth."""
        return f"{value:.2f}" if self.percent or not 0 < abs(value) < 0.1 else f"{value:.4g}"

    def text(self, value: float) -> str:
        """Write a value with its unit."""
        return self.number(value) + " %" * self.percent


ACCURACY = Metric("acc", higher=True, percent=True)
LOSS = Metric("loss", higher=False, percent=False)


def metric_of(summaries: Sequence[dict[str, Any]]) -> Metric:
    """Return the metric to compare by; accuracy where there is no run."""
    if not summaries:
        return ACCURACY
    metrics = summaries[0]["metrics"]
    one = next((one for one in metrics if one["higher"] is not None), None)
    return Metric(one["name"], one["higher"], one["percent"]) if one else LOSS


def duration(seconds: float) -> str:
    """Write seconds as `8.3s`, `21s`, `2m36s` or `1h02m`."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def spread(values: Sequence[float], form: Callable[[float], str] = "{:.2f}".format) -> str:
    """Write the mean of values and their sample deviation: `90.00 ± 1.00`; a dash where there is none."""
    if len(values) < 2:
        return form(values[0]) if values else "-"
    deviation = stdev(values) if all(map(isfinite, values)) else nan
    return f"{form(fmean(values))} ± {form(deviation)}"
