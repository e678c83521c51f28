"""What a comparison found, in plain words: which method is fastest, what that costs, and whether it is noise.

Computed from the same rows as the table, by rules that are said with the figures: a time within five
percent is a tie, and a difference of times or of the metric is noise as long as its 95 % interval by Welch's
t-test holds 0. The best of several methods is better than it should be by chance alone, so the 5 % are
divided by the number of methods that the first is compared with (Bonferroni). With one seed, or seeds that
all came out the same, nothing is said of noise, because nothing is known of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import isfinite
from statistics import fmean

from comparison.figures import duration
from comparison.table import Row, by_model

TIE = 0.05
BUSY = 0.25  # cores that other programs may take before it is said
TOO_FEW = "too few seeds to say what of it is noise"


def verdict(rows: Sequence[Row], failed: int, missing: int, total: int) -> list[str]:
    """Return a paragraph for each model, and what is missing: failed or not made yet."""
    said = [_of_model(model, of_model) for model, of_model in by_model(rows).items()]
    if failed:
        said.append(f"{failed} of {total} runs failed, so what stands here is of the others.")
    if missing:
        said.append(f"The comparison is not finished: {missing} of {total} runs are not made yet.")
    runs = [outcome for row in rows for outcome in row.outcomes]
    if disturbed := [run for run in runs if run.others > BUSY]:
        most = max(disturbed, key=lambda run: run.others)
        said.append(
            f"Other programs ran beside {len(disturbed)} of {len(runs)} runs and make their times uncertain: "
            f"they kept {most.others:.1f} cores busy at most, during {most.spec.title}."
        )
    return said


def _of_model(model: str, rows: Sequence[Row]) -> str:
    first, done = rows[0], [row for row in rows if row.done]
    where = (model or "The model") + (f" on {done[0].alike('data')}" if done else "")
    if not done:
        return f"{where}: no run finished."
    if not first.done:
        return f"{where}: no run of {first.method} finished, so there is nothing to measure the others by."
    if len(done) == 1:
        return f"{where}: only {first.method} finished; there is nothing to compare it with."
    fastest = min(done, key=lambda row: fmean(row.values("epoch_s")))
    return f"{where}: {_speed(first, fastest, len(done) - 1)} {_quality(first, fastest, done)}"


def _speed(first: Row, fastest: Row, compared: int) -> str:
    """Say which method is the fastest, and whether that may be noise."""
    if fastest is first:
        return f"no method was faster than {first.method}."
    a, b = fmean(first.values("epoch_s")), fmean(fastest.values("epoch_s"))
    if a / b <= 1 + TIE:
        tie = f"no method was faster than {first.method} by more than five percent"
        return f"{tie}; the fastest was {fastest.method}."
    times = f"{_time(b)} against {_time(a)} an epoch of training"
    margin = noise(first.values("epoch_s"), fastest.values("epoch_s"), compared)
    if margin is not None and a - b <= margin:
        noisy = f"{fastest.method} took {times}, a difference within the noise (±{_time(margin)} at 95 %)"
        return f"no method was measurably faster than {first.method}: {noisy}."
    sure = TOO_FEW if margin is None else f"more than the noise of ±{_time(margin)} at 95 %"
    return f"{fastest.method} was the fastest, {a / b:.2f} times as fast as {first.method} ({times}; {sure})."


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g}s"


def _quality(first: Row, fastest: Row, done: Sequence[Row]) -> str:
    """Say where the methods stand: the first, the fastest, and the best; all where the first is fastest."""
    metric = first.metric
    best = max(done, key=lambda row: metric.worth(fmean(row.last)))
    shown = [row for row in done if fastest is first or row in (fastest, best)]
    said = [f"{first.method} stands at {metric.text(fmean(first.last))}"]
    said += [
        f"{row.method}{' (the best)' * (row is best)} at {metric.text(fmean(row.last))}, "
        f"{difference(row, first, len(done) - 1)}"
        for row in shown
        if row is not first
    ]
    return f"After the last epoch, in {metric.title} ({metric.direction}), {'; '.join(said)}."


def difference(row: Row, first: Row, compared: int) -> str:
    """Say how a row's last value of the metric differs from another's, and whether that may be noise."""
    metric, level, gap = first.metric, fmean(first.last), fmean(row.last) - fmean(first.last)
    if not isfinite(gap):
        return "which cannot be compared"
    unit, direction = " points" * metric.percent, "above" if gap > 0 else "below"
    said = f"{metric.number(abs(gap), level)}{unit} {direction}" if gap else "the same"
    margin = noise(row.last, first.last, compared)
    if margin is None:
        return f"{said} ({TOO_FEW})"
    within = "within the noise" if abs(gap) <= margin else "more than noise"
    return f"{said}, which is {within} (±{metric.number(margin, level)} at 95 %)"


def noise(ours: Sequence[float], theirs: Sequence[float], compared: int = 1) -> float | None:
    """Return half of Welch's 95 % interval of the difference of two rows' means, of a value a seed.

    `compared`: how many such differences are looked at. None where a row has one seed, or all seeds of both
    came out the same, which says nothing of the next one.
    """
    from scipy.stats import ttest_ind

    if min(len(ours), len(theirs)) < 2 or len({*ours}) == len({*theirs}) == 1:
        return None
    with warnings.catch_warnings():  # scipy warns where all seeds of one of them came out the same
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = ttest_ind(ours, theirs, equal_var=False).confidence_interval(1 - 0.05 / compared)
    return float(interval.high - interval.low) / 2
