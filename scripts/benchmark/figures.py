"""From times to rows of the table: medians, ratios within a round, targets met or missed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

Series = Mapping[str, Sequence[float]]
"""By contestant: what each round gave, in the order of the rounds."""

DIGITS = 3
"""Ratios are printed, and held against their targets, to so many decimals."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target as a person reads it, and whether it was met."""

    target: str
    met: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `values`: one a round, in `unit`; `ratios`: by column."""

    benchmark: str
    contestant: str
    values: Sequence[float]
    unit: str
    ratios: Mapping[str, float] = field(default_factory=dict)
    verdicts: Sequence[Verdict] = ()


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured. `quick` makes everything small, to see that it works and nothing else."""

    rounds: int = 5
    quick: bool = False
    profile: bool = False


def ratio(reference: Sequence[float], own: Sequence[float]) -> float:
    """Say how many times as fast as its reference a contestant is: the median over the rounds' ratios."""
    return median(r / o for r, o in zip(reference, own, strict=True))


def timed_row(
    benchmark: str,
    name: str,
    series: Series,
    against: Mapping[str, str],
    least: Mapping[str, float] | None = None,
) -> Row:
    """Make the row of a contestant whose series is in seconds.

    `against`: for each column of ratios, the contestant to compare with. `least`: what they should be.
    """
    ratios = {column: ratio(series[reference], series[name]) for column, reference in against.items()}
    verdicts = [
        Verdict(f"{column} >= {wanted:.2f}", round(ratios[column], DIGITS) >= wanted)
        for column, wanted in (least or {}).items()
    ]
    return Row(benchmark, name, [1000 * s for s in series[name]], "ms", ratios, verdicts)
