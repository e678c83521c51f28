"""Golden files: each schedule's small programs as text, to be read once and then pinned.

After a change that is meant: `python -m tests.schedule.golden`, and read the diff.
"""

from __future__ import annotations

from pathlib import Path

from pipetrain.schedule.actions import format_program
from tests.schedule.cases import CASES, Case, accepted

FOLDER = Path(__file__).parents[1] / "golden"
SIZES = [(1, 2, 2), (2, 4, 1), (2, 3, 2), (3, 2, 3), (4, 1, 4)]


def text_of(case: Case) -> str:
    lines = ["# lowered programs, a line a rank; to write anew: python -m tests.schedule.golden\n"]
    for (ranks, batches, microbatches), program in accepted(case, SIZES):
        title = f"# {case.name}: {ranks} ranks, {batches} batches of {microbatches} microbatches\n"
        lines += ["\n", title, format_program(program)]
    return "".join(lines)


if __name__ == "__main__":
    for each in CASES:
        (FOLDER / f"{each.name}.txt").write_text(text_of(each))
