"""What a comparison found, in plain words: how fast each method is, what it costs, and whether it is noise.

Computed from the same rows as the table, by a rule that is said with the figures: a difference of times or of
the metric is noise as long as its 95 % interval by Welch's t-test holds 0. The best of several methods is
better than it should be by chance alone, so the 5 % are divided by the number of methods that the first is
compared with (Bonferroni). With one seed, or seeds that all came out the same, nothing is said of noise,
because nothing is known of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import isfinite
from statistics import fmean

from comparison.table import Row, by_model

BUSY = 0.25  # cores that other programs may take before it is said


def verdict(rows: Sequence[Row], failed: int, missing: int, total: int) -> list[str]:
    """Return sentences for each model, and what is missing: failed or not made yet."""
    said = [sentence for model, of_model in by_model(rows).items() for sentence in _of_model(model, of_model)]
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


def _of_model(model: str, rows: Sequence[Row]) -> list[str]:
    """Say where the first method stands, and each of the others beside it, the fastest one first."""
    first, others = rows[0], [row for row in rows[1:] if row.done]
    if not first.done:
        return [f"{model}: no run of {first.method} finished, so there is nothing to measure others by."]
    metric, seconds = first.metric, fmean(first.seconds)
    said = (
        f"{model} on {first.alike('data')}: by {first.method} an epoch of training takes {seconds:.3g} s, "
        f"and the last one leaves {metric.title} ({'higher' if metric.higher else 'lower'} is better) at "
        f"{metric.text(fmean(first.last))}."
    )
    others.sort(key=lambda row: fmean(row.seconds))
    return [said, *(_beside(row, first, len(others)) for row in others)]


def _beside(row: Row, first: Row, compared: int) -> str:
    mine, theirs, metric = fmean(row.seconds), fmean(first.seconds), first.metric
    speed = _noise_of(theirs - mine, noise(row.seconds, first.seconds, compared), "{:.2g} s".format)
    gap = fmean(row.last) - fmean(first.last)
    stands = f"{metric.title} is {metric.text(fmean(row.last))}"
    if isfinite(gap):
        unit, direction = " points" * metric.percent, "above" if gap > 0 else "below"
        stands += f", {metric.number(abs(gap))}{unit} {direction}" if gap else ", the same"
        stands += f" ({_noise_of(gap, noise(row.last, first.last, compared), metric.number)})"
    return f"{row.method} is {theirs / mine:.2f} times as fast ({mine:.3g} s: {speed}); {stands}."


def _noise_of(difference: float, margin: float | None, form: Callable[[float], str]) -> str:
    if margin is None:
        return "too few seeds to say what of it is noise"
    return f"{'within' if abs(difference) <= margin else 'more than'} the noise of ±{form(margin)} at 95 %"


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
