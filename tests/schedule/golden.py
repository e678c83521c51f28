"""Golden files: each schedule's small programs as text, and some with skips, to be read once and then pinned.

After a change that is meant: `python -m tests.schedule.golden`, and read the diff.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipetrain.schedule.actions import Edge, Program, Schedule, format_program
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import gpipe, interleaved_1f1b, one_f_one_b, pipedream
from tests.schedule.cases import CASES, NAMES, accepted

FOLDER = Path(__file__).parents[1] / "golden"
SIZES = [(1, 2, 2), (2, 4, 1), (2, 3, 2), (3, 2, 3), (4, 1, 4)]
FIRST = "# lowered programs, a line a rank; to write anew: python -m tests.schedule.golden\n"

# name, schedule, (ranks, batches, microbatches), routes
SKIPS: list[tuple[str, Schedule, tuple[int, int, int], list[Edge]]] = [
    ("a U-Net on 1f1b", one_f_one_b, (4, 1, 4), [(0, 1), (0, 3), (1, 2), (2, 3)]),
    ("a mask on pipedream", pipedream, (3, 3, 1), [(0, 1), (0, 2), (1, 2)]),
    ("a U-Net on interleaved_1f1b", interleaved_1f1b, (2, 1, 2), [(0, 1), (0, 3), (1, 2), (2, 3)]),
    ("two branches on gpipe", gpipe, (4, 1, 2), [(0, 1), (0, 2), (1, 3), (2, 3)]),
]


def programs(name: str) -> Iterator[tuple[tuple[int, int, int], str, str, Program]]:
    """Yield the size of each program of a file, its title and what follows it there, and the program."""
    if name != "skips":
        for size, program in accepted(CASES[NAMES.index(name)], SIZES):
            yield size, name, "", program
        return
    for title, schedule, size, routes in SKIPS:
        program = lower(schedule(*size), routes)
        check(program, *size[1:], routes)
        yield size, title, "; routes " + ", ".join(f"{source} to {to}" for source, to in routes), program


def text_of(name: str) -> str:
    """Return what the file `name`.txt should have."""
    lines = [FIRST]
    for (ranks, batches, microbatches), title, more, program in programs(name):
        size = f"{ranks} ranks, {batches} batches of {microbatches} microbatches"
        lines += ["\n", f"# {title}: {size}{more}\n", format_program(program)]
    return "".join(lines)


if __name__ == "__main__":
    for each in [*NAMES, "skips"]:
        (FOLDER / f"{each}.txt").write_text(text_of(each))
