"""What a check finds, as rows; what it needs to find it; and the table."""

from __future__ import annotations

import faulthandler
import pickle
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import shorten
from time import monotonic
from typing import Any

from benchmark.report import gpu, machine
from benchmark.worlds import Place, Say, Work, WorldFailed, run_world
from comparison.table import markdown_table
from pipetrain.runtime.comm.process_groups import ProcessGroups

PASS, FAIL, SKIPPED, SEEN = "pass", "**FAIL**", "skipped", ""
TIMEOUT_S = 60.0  # of any wait between ranks
START_S = 15.0  # of a world, at most
MIB = 2**20
WIDEST = 160  # figure, in characters


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

    @property
    def left(self) -> float:
        """The seconds until the running check must be done."""
        return self.end - monotonic()

    def world(
        self,
        work: Work,
        ranks: int,
        *arguments: Any,
        staged: bool = False,
        timeout: float = TIMEOUT_S,
        within: float = float("inf"),
        say: Say | None = None,
    ) -> list[Any]:
        """Run `work` on so many ranks of one GPU: over NCCL, or over gloo where `staged`. See run_world.

        It may take what is left to the check, and no more than `within` seconds.
        """
        place = Place(self.device, staged, timeout)
        deadline = max(1.0, min(self.left, within * self.patience))
        return run_world(work, ranks, say or self.say, *arguments, place=place, deadline=deadline)

    def each(
        self,
        work: Callable[[ProcessGroups, Any], Any],
        ranks: int,
        items: Sequence[Any],
        within: float = float("inf"),
        **options: Any,
    ) -> Iterator[tuple[Any, Any, str]]:
        """Run `work`(links, item) for one item after the other in one world; `options`: see `world`.

        Gives each item, what rank 0 returned for it, and why nothing was, if so. After one that failed, or
        took more than `within` seconds, the others go on in a new world.
        """
        items, found, most, began = list(items), {}, within * self.patience, float("inf")

        def hear(said: Any) -> None:
            nonlocal began
            began = monotonic()
            if isinstance(said, bytes):
                number, result = pickle.loads(said)
                found[number] = result
            else:
                self.say(said)

        while items:
            why = "there was no time left"
            found.clear()
            if self.left > START_S or not self.cuda:
                try:
                    self.world(_one_by_one, ranks, work, items, most, say=hear, **options)
                except WorldFailed as error:
                    traceback.print_exc()
                    rank = re.match(r"rank \d+(?=: )", str(error))
                    why = str(error).strip().splitlines()[-1] + (f" ({rank[0]})" if rank else "")
                    if monotonic() - began >= most:
                        why = f"it was still running after {most:.0f} s"
            done = len(found)
            yield from ((item, found[number], "") for number, item in enumerate(items[:done]))
            yield from ((item, None, why) for item in items[done : done + 1])
            items = items[done + 1 :]


def _one_by_one(
    groups: ProcessGroups,
    say: Say,
    work: Callable[[ProcessGroups, Any], Any],
    items: Sequence[Any],
    most: float,
) -> None:
    for number, item in enumerate(items):
        say(str(item))
        if most < float("inf"):  # by a thread that waits for nobody, whatever the host or the device do
            faulthandler.dump_traceback_later(most, exit=True)
        result = work(groups, item)
        if most < float("inf"):
            faulthandler.cancel_dump_traceback_later()
        if groups.world.rank == 0:
            say(pickle.dumps((number, result)))  # tensors do not outlive a pipe


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a group, and the seconds that it may take."""

    group: str
    name: str
    run: Callable[[Setting], Iterator[Row]]
    most: float


Line = tuple[str, Row, float]
"""A check's name, a row of it, and the seconds that it took."""


def head(arguments: Sequence[str], device: str) -> dict[str, str]:
    """Say what runs this, and what was asked."""
    about = machine(arguments, "scripts/gpu_check.py")
    if device == "cuda":
        return about | gpu()
    return about | {"GPU": "none: a REHEARSAL on the CPU, over gloo, which proves nothing of a GPU"}


SAME = ("software", "GPU", "libraries")  # what must be alike for rows to stand in one table
TITLES = ["check", "what", "figure", "target", "outcome", "seconds"]


def markdown(about: Mapping[str, str], lines: Sequence[Line]) -> str:
    """Put the report together."""
    cells = []
    for name, row, seconds in lines:
        found = shorten(row.figure, WIDEST, placeholder=" ...")
        cells.append([name, row.what, found, row.target, row.outcome, f"{seconds:.1f}"])
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in cells]
    passed, failed = (sum(row.outcome == one for _, row, _ in lines) for one in (PASS, FAIL))
    return (
        "# GPU check\n\n"
        + "\n".join(f"- {key}: {value}" for key, value in about.items())
        + f"\n\n{markdown_table([TITLES, *escaped], TITLES[:-1])}\n"
        + f"{passed} passed, {failed} failed.\n"
    )


def earlier(path: Path, about: Mapping[str, str]) -> list[Line]:
    """Return the lines of a report that was written before, by the same software on the same GPU."""
    text = path.read_text() if path.exists() else ""
    known = dict(re.findall(r"^- (\w+): (.*)$", text, re.MULTILINE))
    if any(known.get(key) != about.get(key) for key in SAME):
        return []
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip().replace("\\|", "|") for cell in row] for row in rows[2:]]
    return [(name, Row(*row), float(seconds)) for name, *row, seconds in cells]
