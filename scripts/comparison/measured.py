"""What a paper on pipelines compares beside accuracy: time to a target, bubble, staleness and memory.

All of it is measured, and stands in a run's records. An older run may lack some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from statistics import fmean

from comparison.figures import Metric, spread
from comparison.runs import Outcome
from pipetrain.records.sweep_table import figures_of

MEANING = (
    "epochs, seconds: until the first epoch that reaches it, evaluations included; speedup: those seconds of "
    "the model's first row over those of the row. bubble: the share of all ranks' time in which they do not "
    "compute, measured, and in % on paper. staleness: updates that the weights of a forward are late, in the "
    "mean and at most. versions: of weights that a stage holds at most. MiB: what the fullest rank holds, as "
    "the sum of the peaks of its stages."
)


def common(runs: Sequence[Outcome], metric: Metric) -> float | None:
    """Return the best value that all finished runs reach; None where one of them has none."""
    values = [metric.value(run.summary, "best_val") for run in runs if run.summary]
    return min(values, key=metric.worth) if values and all(map(isfinite, values)) else None


def reached(run: Outcome, metric: Metric, target: float) -> tuple[float, float] | None:
    """Return the first epoch that is as good as the target, and the seconds until its end."""
    worst = metric.worth(target) - 1e-4 * abs(target)  # metrics.csv has six digits
    columns = zip(*(run.curves[key] for key in ("epoch", "elapsed_s", f"val_{metric.name}")), strict=True)
    goals = (end for *end, value in columns if metric.worth(metric.scale * value) >= worst)
    return next(((epoch, seconds) for epoch, seconds in goals), None)


def cells(
    runs: Sequence[Outcome], first: Sequence[Outcome], metric: Metric, target: float | None
) -> dict[str, str]:
    """Return what a row says. `runs`: its finished ones; `first`: those of the model's first row."""
    mine, theirs = ([target and reached(run, metric, target) for run in of] for of in (runs, first))
    goals, before = ([one for one in of if one] for of in (mine, theirs))
    figures = [figures for run in runs if run.summary and (figures := figures_of(run.summary))]
    whole = len(goals) == len(mine)
    speedup = "-"
    if goals and before and whole and len(before) == len(theirs):
        speedup = f"{fmean(s for _, s in before) / fmean(s for _, s in goals):.2f}x"

    def over(key: str, form: Callable[[float], str], of: Callable[[Sequence[float]], float] = fmean) -> str:
        return form(of([one[key] for one in figures])) if figures else "-"

    return {
        "target": "-" if target is None else metric.number(target),
        "epochs": spread([epoch for epoch, _ in goals], "{:.1f}".format) if whole else "-",
        "seconds": spread([s for _, s in goals]) if whole or not target else f"{len(goals)} of {len(mine)}",
        "speedup": speedup,
        "bubble": spread([one["bubble"] for one in figures], "{:.1f}".format),
        "on paper": over("bubble_on_paper", "{:.1f}".format),
        "staleness": over("mean_staleness", "{:.2f}".format),
        "most late": over("max_staleness", "{:.0f}".format, max),
        "versions": over("max_versions", "{:.0f}".format, max),
        "MiB": over("fullest_rank_mib", "{:.1f}".format, max),
    }
