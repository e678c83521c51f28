"""A published record and what is found here: figures, checks that can fail, and charts.

What was run here and what only the plan predicts are never mixed: each figure and each line says which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comparison.table import Table

Results = Mapping[str, Any]
"""What the steps of a record returned, by their names."""


class How(StrEnum):
    """Where a number comes from."""

    PUBLISHED = "published"
    RUN = "run here"
    PLANNED = "planned here"
    BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Step:
    """Something to measure: a function, and its arguments by name. Both can be written as JSON."""

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def asked(self) -> dict[str, Any]:
        """What is measured, as JSON: a step that was made before is kept as long as this is the same."""
        return {"function": f"{self.function.__module__}.{self.function.__qualname__}", **self.arguments}


@dataclass(frozen=True, slots=True)
class Figure:
    """A line of a record's table. `spread`: the least and the most of what was measured here.

    `published`, `here`, `bound`: in `unit`; None where there is none. `how`: where `here` comes from.
    """

    what: str
    published: float | None = None
    here: float | None = None
    how: How = How.RUN
    spread: tuple[float, float] | None = None
    bound: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Check:
    """A line of the verdict: what must come back, in words or figures, and whether it did.

    `came_back`: None for what could not be tried here; `here` says why.
    """

    what: str
    published: str
    here: str
    came_back: bool | None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart through points (x, y). `band`: the least and the most at each point."""

    name: str
    how: How
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over one axis. `logs`: which axes have a logarithmic scale, such as `xy`."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    logs: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a record's results say. `notes`: what a reader of the tables has to know.

    `tables`: in place of figures; `files`: more to write beside the page, by name; `text`: what came out, in
    paragraphs.
    """

    figures: Sequence[Figure]
    checks: Sequence[Check]
    charts: Sequence[Chart]
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    text: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """A published record. `steps`: what is measured, with True a tiny version; `show`: what it says.

    `source`: who published it, and on what; `wrong`: what is wrong in it, as far as is known; `beside`: what
    the numbers here stand beside.
    """

    title: str
    source: str
    steps: Callable[[bool], Mapping[str, Step]]
    show: Callable[[Results], Findings]
    wrong: str = ""
    beside: str = "published"
