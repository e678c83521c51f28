"""A published record and what is found here: numbers, checks that can fail, and charts.

What was run here and what only the plan predicts are never mixed: each series and each line says which it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any

from comparison.table import Table

Results = Mapping[str, Any]
"""What the steps of a record returned, by their names."""
NOT = "-"
"""Of what nothing was published."""
Place = float | str
"""Where a number of a series stands, such as a number of stages or a method."""


def those(results: Results, start: str) -> dict[str, Any]:
    """Return the results of the steps whose names begin so, by what follows."""
    return {key.removeprefix(start): of for key, of in results.items() if key.startswith(start)}


class How(StrEnum):
    """Where a number comes from."""

    PUBLISHED = "published"
    RUN = "run here"
    PLANNED = "planned here"
    ARITHMETIC = "arithmetic"
    BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Step:
    """Something to measure: a function, and its arguments by name. Both can be written as JSON.

    `timed`: whether its result would be another one beside other programs.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    timed: bool = True

    @property
    def asked(self) -> dict[str, Any]:
        """What is measured, as JSON: a step that was made before is kept as long as this is the same."""
        return {"function": f"{self.function.__module__}.{self.function.__qualname__}", **self.arguments}


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart through points, x to y. `band`: the least and the most at each point."""

    name: str
    how: How
    points: Mapping[Any, float]
    band: Sequence[tuple[float, float]] | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Numbers of one kind at several places: a row of a table, and lines of a chart.

    `name`: what they are, `of` whom; `at`: what the places are. By place, in `unit`: `here`, `published`,
    `bound`, and `spread`, the least and the most that was measured. `how`: where `here` comes from.
    """

    of: str
    name: str
    at: str
    here: Mapping[Any, float]
    how: How = How.RUN
    unit: str = ""
    published: Mapping[Any, float] = field(default_factory=dict)
    bound: Mapping[Any, float] = field(default_factory=dict)
    spread: Mapping[Any, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def measured(
        cls,
        of: str,
        name: str,
        at: str,
        values: Mapping[Any, Sequence[float]],
        middle: Callable[[Sequence[float]], float] = median,
        **more: Any,
    ) -> Series:
        """Return the middle and the spread of what was measured several times."""
        here = {place: middle(each) for place, each in values.items()}
        spread = {place: (min(each), max(each)) for place, each in values.items()}
        return cls(of, name, at, here, spread=spread, **more)

    def line(self, name: str = "") -> Line:
        """Return the line of what was found here, with what was measured at least and at most."""
        band = [self.spread[place] for place in self.here] if self.spread else None
        return Line(name or self.of, self.how, self.here, band)

    def theirs(self, name: str = "") -> Line:
        """Return the line of what was published."""
        return Line(name or self.of, How.PUBLISHED, self.published)


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the verdict: what must come back, in words or figures, and whether it did.

    `what`: `case: what`, or what alone. `published`: by others, NOT if nothing was. `must`: what `here` has
    to be to come back. `came_back`: None for what could not be tried here, where `here` says why, or what is
    `untold`, as its interval is on both sides. `how`: whether `here` was run, or only planned, or is
    arithmetic, such as a count of parameters.
    """

    what: str
    published: str
    must: str
    here: str
    came_back: bool | None
    how: How
    untold: bool = False

    @property
    def came(self) -> str:
        """Whether it came back, in words."""
        if self.came_back is None:
            return "not told" if self.untold else "not tried"
        return "yes" if self.came_back else "no"

    @classmethod
    def of_interval(
        cls, what: str, published: str, limits: tuple[float, float], mean: float, half: float, unit: str
    ) -> Check:
        """Return whether all of the interval `mean` ± `half` of what was run is within limits, or none."""
        least, most = limits
        low, high = mean - half, mean + half
        within, touches = least <= low and high <= most, low <= most and high >= least
        must = f"at most {most}" if math.isinf(least) else f"{least} to {most}"
        here, untold = f"{mean:+.3g} ± {half:.2g} {unit}", touches and not within
        came = None if untold else within
        return cls(what, published, f"{must} {unit}, interval included", here, came, How.RUN, untold)

    @classmethod
    def of(
        cls,
        what: str,
        published: str,
        limits: tuple[float, float],
        value: float,
        how: How,
        here: str = "",
        unit: str = "",
    ) -> Check:
        """Return whether a value is within limits, both included. `here`: the value, as it is written."""
        least, most = (f"{limit:.3g}{unit}" for limit in limits)
        must = f"{least} to {most}"
        if limits[0] <= 0:
            must = f"at most {most}"
        elif math.isinf(limits[1]):
            must = f"at least {least}"
        came = limits[0] <= value <= limits[1]
        return cls(what, published, must, here or f"{value:.4g}{unit}", came, how)


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one axis. `logs`: which axes have a logarithmic scale, such as `xy`.

    `categories`: the names of 1, 2, 3 ... on the axis, if these are no numbers.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    logs: str = ""
    categories: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class File:
    """Something to write into the page's folder."""

    name: str
    text: str


class Rows(Table):
    """The rows of a published table, and where ours stand: it stands behind those of the series."""


Finding = Series | Check | Chart | Table | Rows | File | str
"""What a record says of its results; a table stands in place of those of the series, words before all."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a record says, by kind."""

    series: Sequence[Series]
    checks: Sequence[Check]
    charts: Sequence[Chart]
    tables: Sequence[Table]
    rows: Sequence[Rows]
    files: Sequence[File]
    text: Sequence[str]

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Findings:
        """Sort findings by their kinds."""
        by_kind: dict[type, list[Any]] = {kind: [] for kind in (Series, Check, Chart, Table, Rows, File, str)}
        for finding in findings:
            by_kind[type(finding)].append(finding)
        return cls(*by_kind.values())


@dataclass(frozen=True, slots=True)
class Record:
    """A published record. `steps`: what is measured, with True a tiny version; `show`: what it says.

    `rows`: what was published, where ours stands, and why not more.

    In words, see records.yaml.
    """

    steps: Callable[[bool], Mapping[str, Step]]
    show: Callable[[Results], Iterator[Finding]]
    title: str
    source: str
    notes: Sequence[str] = ()
    wrong: str = ""
    rows: Sequence[Sequence[str]] = ()
