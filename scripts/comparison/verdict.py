"""What a comparison found, in plain words: which method is fastest, what that costs, and whether it is noise.

Computed from the same rows as the table, by rules that are said with the figures: a time within five
percent is a tie, and a difference of times or accuracies is noise as long as Welch's 95 % interval holds 0.
The best of several methods is better than it should be by chance alone, so the 5 % are divided by the number
of methods that the first is compared with (Bonferroni). With one seed, or seeds that all came out the same,
nothing is said of noise, because nothing is known of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from comparison.table import Row
from comparison.text import duration

TIE = 0.05
TOO_FEW = "too few seeds to say what of it is noise"


def verdict(rows: Sequence[Row], failed: int, missing: int, total: int) -> list[str]:
    """Return a paragraph for each model, then what is missing: runs that failed, or are not made yet."""
    models = list(dict.fromkeys(row.model for row in rows))
    said = [_of_model([row for row in rows if row.model == model]) for model in models]
    if failed:
        said.append(f"{failed} of {total} runs failed, so what stands here is of the others.")
    if missing:
        said.append(f"The comparison is not finished: {missing} of {total} runs are not made yet.")
    return said


def _of_model(rows: Sequence[Row]) -> str:
    first, done = rows[0], [row for row in rows if row.eachtime is not None]
    where = f"{first.model or 'The model'}{f' on {done[0].dataset}' if done else ''}"
    if not done:
        return f"{where}: no run finished."
    if first.eachtime is None:
        return f"{where}: no run of {first.method} finished, so there is nothing to measure the others by."
    if len(done) == 1:
        return f"{where}: only {first.method} finished; there is nothing to compare it with."
    fastest = min(done, key=lambda row: row.eachtime or 0.0)
    return " ".join(
        [_speed(where, first, fastest, done), *_accuracy(first, fastest, done), *_bytes(first, fastest, done)]
    )


def _speed(where: str, first: Row, fastest: Row, done: Sequence[Row]) -> str:
    times = f"{_time(fastest.eachtime or 0)} against {_time(first.eachtime or 0)} an epoch of training"
    gain = (fastest.speedup or 1.0) - 1
    if fastest is first:
        return f"{where}: no method was faster than {first.method}."
    if gain <= TIE:
        tie = f"no method was faster than {first.method} by more than five percent"
        return f"{where}: {tie}; the fastest was {fastest.method}."
    factor = f"{1 + gain:.2f} times as fast as {first.method}"
    margin = _interval(first.train_dev, first.finished, fastest.train_dev, fastest.finished, len(done) - 1)
    if margin is None:
        sure = TOO_FEW
    else:
        apart = (first.eachtime or 0) - (fastest.eachtime or 0)
        sure = f"{'within the' if apart <= margin else 'more than'} noise of ±{_time(margin)} at 95 %"
    return f"{where}: {fastest.method} was the fastest, {factor} ({times}; {sure})."


def _time(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g}s"


def _accuracy(first: Row, fastest: Row, done: Sequence[Row]) -> list[str]:
    """Say what the fastest costs, and which is the most accurate."""
    best, others = max(done, key=lambda row: row.last_acc or 0.0), len(done) - 1
    said = []
    if fastest is not first:
        said.append(
            f"After the last epoch {fastest.method} stands at {fastest.last_acc:.2f} %, "
            f"{difference(fastest, first, others)}."
        )
    if best not in (fastest, first):
        said.append(
            f"The most accurate, {best.method}, has {best.last_acc:.2f} %, {difference(best, first, others)}."
        )
    return said


def difference(row: Row, first: Row, compared: int = 1) -> str:
    """Say how a row's last accuracy differs from another's, and whether that may be noise."""
    assert row.last_acc is not None
    assert first.last_acc is not None
    points = row.last_acc - first.last_acc
    direction = "above" if points > 0 else "below"
    said = f"{abs(points):.2f} points {direction} {first.method}" if points else f"the same as {first.method}"
    margin = noise(row, first, compared)
    if margin is None:
        return f"{said} ({TOO_FEW})"
    if abs(points) <= margin:
        return f"{said}, which is within the noise (±{margin:.2f} at 95 %)"
    return f"{said}, which is more than noise (±{margin:.2f} at 95 %)"


def noise(a: Row, b: Row, compared: int = 1) -> float | None:
    """Return half of Welch's 95 % interval of the difference of two rows' last accuracies, in points.

    `compared`: how many such differences are looked at. None where a row has one seed, or all seeds of both
    came out the same, which says nothing of the next one.
    """
    return _interval(a.last_dev, a.finished, b.last_dev, b.finished, compared)


def _interval(
    deviation_a: float | None, n_a: int, deviation_b: float | None, n_b: int, compared: int
) -> float | None:
    """Welch 1947; the degrees of freedom after Satterthwaite 1946."""
    from scipy.stats import t

    if deviation_a is None or deviation_b is None:
        return None
    va, vb = deviation_a**2 / n_a, deviation_b**2 / n_b
    if va + vb == 0:
        return None
    freedom = (va + vb) ** 2 / (va**2 / (n_a - 1) + vb**2 / (n_b - 1))
    return sqrt(va + vb) * float(t.ppf(1 - 0.025 / compared, freedom))


def _bytes(first: Row, fastest: Row, done: Sequence[Row]) -> list[str]:
    """Say which sent the least, and what that costs where it is not said yet."""
    least = min(done, key=lambda row: row.bytes_ratio if row.bytes_ratio is not None else 1.0)
    if least.bytes_ratio is None or least.bytes_ratio > 1 - TIE:
        return []
    said = [f"{least.method} sent the least: {least.bytes_ratio:.1%} of the bytes of {first.method}."]
    if least not in (first, fastest):
        said.append(f"It ends at {least.last_acc:.2f} %, {difference(least, first, len(done) - 1)}.")
    return said
