"""What several records measure or plan. Arguments and results can be written as JSON.

What is timed takes turns in one world of processes, each with one thread, so that all contestants pay for
the same machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmark.contestants import Make, rows_of_race
from benchmark.report import progress
from benchmark.tasks import Scale


def raced(make: Make, ranks: int, rounds: int) -> dict[str, Any]:
    """Race contestants; return for each the `seconds` of a batch in each round, or its `failure`.

    Those that have a bound say which share of their speed `of bound` is.
    """
    rows = rows_of_race("race", ranks, make, Scale(rounds), progress, {}, {})
    return {
        row.contestant: {
            "seconds": [ms / 1e3 for ms in row.values],
            "of bound": row.ratios.get("of bound"),
            "failure": row.failure,
        }
        for row in rows
    }


@dataclass(frozen=True, slots=True)
class Race:
    """What `raced` returned, read: a contestant that failed raises RuntimeError with its failure."""

    of: Mapping[str, Any]

    def seconds(self, name: str) -> list[float]:
        """Return the seconds of a batch in each round."""
        if failure := self.of[name]["failure"]:
            raise RuntimeError(f"{name} failed: {failure}")
        return list(self.of[name]["seconds"])

    def of_bound(self, name: str) -> float:
        """Return which share of its bound's speed it reaches: the median over the rounds."""
        return float(self.of[name]["of bound"])

    def ratio(self, name: str, other: str) -> float:
        """Return how many times as fast as another one it is: the median over the rounds."""
        return median(self.ratios(name, other))

    def ratios(self, name: str, other: str) -> list[float]:
        """Return how many times as fast as another one it is, in each round."""
        return [theirs / own for theirs, own in zip(self.seconds(other), self.seconds(name), strict=True)]

    def spread(self, name: str, other: str) -> tuple[float, float]:
        """Return the least and the most of these."""
        ratios = self.ratios(name, other)
        return min(ratios), max(ratios)
