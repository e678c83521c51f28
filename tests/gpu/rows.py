"""What a check finds, as rows; what it needs to find it; and the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from time import monotonic
from typing import Any

from benchmark.report import gpu, machine
from benchmark.worlds import Place, Say, Work, run_world
from comparison.table import aligned

PASS, FAIL, SKIPPED, NOT_RUN, SEEN = "pass", "**FAIL**", "skipped", "not run", ""
TIMEOUT_S = 60.0  # of any wait between ranks
MIB = 2**20
WIDEST = 120  # figure, in characters


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at. SEEN is a figure without a target."""

    what: str
    figure: str
    target: str = ""
    outcome: str = SEEN


def judged(what: str, figure: str, target: str, met: bool) -> Row:
    """Make the row of a target that was met or missed."""
    return Row(what, figure, target, PASS if met else FAIL)


@dataclass(slots=True)
class Setting:
    """What the checks share. `end`: when the running one must be done; `kept`: what one leaves another.

    `patience`: by how much a check may take longer than it says, because a rehearsal may meet a busy machine.
    """

    device: str
    quick: bool
    out: Path
    say: Say
    patience: float = 1.0
    end: float = 0.0
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """Whether this is no rehearsal."""
        return self.device == "cuda"

    def world(
        self, work: Work, ranks: int, *arguments: Any, staged: bool = False, timeout: float = TIMEOUT_S
    ) -> list[Any]:
        """Run `work` on so many ranks of one GPU: over NCCL, or over gloo where `staged`. See run_world."""
        place = Place(self.device, staged if self.cuda else None, timeout)
        return run_world(work, ranks, self.say, *arguments, place=place, deadline=self.end - monotonic())


@dataclass(frozen=True, slots=True)
class Check:
    """A check, with the seconds that it must have to be started, and those after which it is given up."""

    name: str
    run: Callable[[Setting], Iterator[Row]]
    least: float
    most: float


Line = tuple[str, Row, float]
"""A check's name, a row of it, and the seconds that it took."""


def head(arguments: Sequence[str], device: str) -> dict[str, str]:
    """Say what runs this, and what was asked."""
    about = machine(arguments, "scripts/gpu_check.py")
    if device == "cuda":
        about |= gpu()
    else:
        about["GPU"] = "none: a REHEARSAL on the CPU, over gloo, which proves nothing of a GPU"
    return about


def markdown(about: Mapping[str, str], lines: Sequence[Line]) -> str:
    """Put the report together."""
    titles = ["check", "what", "figure", "target", "outcome", "seconds"]
    cells = []
    for name, row, seconds in lines:
        found = shorten(row.figure, WIDEST, placeholder=" ...")
        cells.append([name, row.what, found, row.target, row.outcome, f"{seconds:.1f}"])
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    count = {outcome: sum(row.outcome == outcome for _, row, _ in lines) for outcome in (PASS, FAIL, NOT_RUN)}
    return (
        "# GPU check\n\n"
        + "\n".join(f"- {key}: {value}" for key, value in about.items())
        + f"\n\n{aligned([titles, *escaped], titles[:-1])}\n"
        + f"{count[PASS]} passed, {count[FAIL]} failed, {count[NOT_RUN]} not run.\n"
    )
