"""Golden files: each schedule's small programs as text, and some with skips, to be read once and then pinned.

After a change that is meant: `python -m tests.schedule.golden`, and read the diff.
"""

from __future__ import annotations

from pathlib import Path

from pipetrain.schedule.actions import Edge, Schedule, format_program
from pipetrain.schedule.check import check
from pipetrain.schedule.lower import lower
from pipetrain.schedule.programs import gpipe, interleaved_1f1b, one_f_one_b, pipedream
from tests.schedule.cases import CASES, NAMES, Case, accepted

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


def text_of(name: str) -> str:
    """Return what the file `name`.txt should have."""
    return _text_of_skips() if name == "skips" else _text_of_case(CASES[NAMES.index(name)])


def _text_of_case(case: Case) -> str:
    lines = [FIRST]
    for (ranks, batches, microbatches), program in accepted(case, SIZES):
        title = f"# {case.name}: {ranks} ranks, {batches} batches of {microbatches} microbatches\n"
        lines += ["\n", title, format_program(program)]
    return "".join(lines)


def _text_of_skips() -> str:
    lines = [FIRST]
    for name, schedule, (ranks, batches, microbatches), routes in SKIPS:
        program = lower(schedule(ranks, batches, microbatches), routes)
        check(program, batches, microbatches, routes)
        size = f"{ranks} ranks, {batches} batches of {microbatches} microbatches"
        ways = ", ".join(f"{source} to {to}" for source, to in routes)
        lines += ["\n", f"# {name}: {size}; routes {ways}\n", format_program(program)]
    return "".join(lines)


if __name__ == "__main__":
    for each in [*NAMES, "skips"]:
        (FOLDER / f"{each}.txt").write_text(text_of(each))
