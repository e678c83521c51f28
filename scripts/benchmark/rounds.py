"""Rounds: contestants in the same processes take turns, and every turn is timed from a barrier.

A turn takes from the first rank's start to the last rank's end. The order rotates, so that nobody always
comes after the same one; a warm-up round is not counted.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Protocol

from benchmark.figures import Series
from benchmark.worlds import Say
from pipetrain.runtime.mesh import Mesh

FULL = ", once full"


class Contestant(Protocol):
    """Something that trains, on one rank. `batches`: how many it does in a turn, each in `microbatches`."""

    name: str
    batches: int
    microbatches: int

    def run(self) -> float | None:
        """Take a turn. Returns the seconds a batch once the pipeline is full, where this rank knows them."""


def race(mesh: Mesh, contestants: Sequence[Contestant], rounds: int, say: Say, warmup: int = 1) -> Series:
    """Return the seconds a batch of each contestant in each round, on every rank alike.

    Where a contestant knows its time once full, that is a series of its own, named with FULL.
    """
    series: defaultdict[str, list[float]] = defaultdict(list)
    for number in range(-warmup, rounds):
        for contestant in rotated(contestants, number):
            say(
                f"round {number + 1}/{rounds}: {contestant.name}"
                if number >= 0
                else f"warm-up: {contestant.name}"
            )
            seconds, full = _turn(mesh, contestant)
            if number >= 0:
                series[contestant.name].append(seconds)
                if full is not None:
                    series[contestant.name + FULL].append(full)
    return dict(series)


def rotated(contestants: Sequence[Contestant], number: int) -> Iterable[Contestant]:
    """Return the order of a round."""
    first = number % len(contestants)
    return [*contestants[first:], *contestants[:first]]


def _turn(mesh: Mesh, contestant: Contestant) -> tuple[float, float | None]:
    gc.collect()  # nobody pays for what another left behind
    mesh.gather("the start of a turn", None)
    start = time.perf_counter()
    full = contestant.run()
    end = time.perf_counter()
    laps: list[tuple[float, float, float | None]] = mesh.gather("a turn's times", (start, end, full))  # type: ignore[assignment]
    starts, ends, known = zip(*laps, strict=True)
    seconds = (max(ends) - min(starts)) / contestant.batches
    return seconds, next((f for f in known if f is not None), None)
