"""Somebody else's figures for the same methods, and the table that has them beside ours.

A record is shown as it was reported, with what is known to be wrong with it in footnotes. Absolute times
are of other machines, so what is to be compared is the ratio, to the same method on both sides: a speed-up of
ours is over our first row of the model, one of the record's over what it has beside that row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from comparison import table
from comparison.experiment import Record, ReportedRow
from comparison.metric import ACCURACY
from comparison.table import Row, aligned, dash, duration, times, two

OURS = (table.MODEL, table.METHOD, table.BEST, table.LAST, table.EACHTIME, table.SPEEDUP)
AS_PRINTED = ("method", "model", "device", "data_worker", "buffer_size")
THEIRS = (*AS_PRINTED, "epoch", "acc", "eachtime", "speedup", "notes")
TEXT = ("method", "model", "device", "notes")
LEGEND = (
    "A dash: not reported, or no time to measure by. speedup: over our first row of the model; the record's "
    "over what it has beside that row."
)


@dataclass(frozen=True, slots=True)
class Pair:
    """One of our rows and one of the record's, where it has one, with the record's own speed-up."""

    ours: Row
    theirs: ReportedRow | None
    speedup: float | None


def pairs(rows: Sequence[Row], record: Record) -> list[Pair]:
    """Set the record's rows beside ours, by model and method; nothing where it has none of ours.

    What the record has of models that are not compared here is left out.
    """

    def beside(row: Row) -> list[ReportedRow]:
        return [one for one in record.rows if one.beside == [row.model, row.method]]

    found: list[Pair] = []
    for row in rows:
        base = next(iter(beside(row.first or row)), None)
        for one in beside(row):
            known = base and base.eachtime and one.eachtime
            found.append(Pair(row, one, base.eachtime / one.eachtime if known else None))  # type: ignore
        if not beside(row):
            found.append(Pair(row, None, None))
    return found if any(pair.theirs for pair in found) else []


def cells(found: Sequence[Pair], record: Record) -> list[list[str]]:
    """Return the lines of the table that has both: the columns OURS and THEIRS. Missing is a dash."""
    lines: list[list[str]] = []
    last: Row | None = None
    for pair in found:
        ours = [column.cell(pair.ours) if pair.ours is not last else "" for column in OURS]
        last, row = pair.ours, pair.theirs
        if row is None:
            lines.append([*ours, *["-"] * (len(THEIRS) - 1), ""])
            continue
        notes = " ".join(f"[{number}]" for number in _numbers(row, record))
        figures = [dash(row.epoch, str), dash(row.acc, two), dash(row.eachtime, duration)]
        figures += [dash(pair.speedup, times), notes]
        lines.append([*ours, *(getattr(row, key) for key in AS_PRINTED), *figures])
    return lines


def _numbers(row: ReportedRow, record: Record) -> list[int]:
    return [1 + list(record.faults).index(name) for name in row.faults]


def notes(found: Sequence[Pair], record: Record) -> list[tuple[int, str]]:
    """Return the footnotes of the rows that are shown, with their numbers."""
    used = sorted({number for pair in found if pair.theirs for number in _numbers(pair.theirs, record)})
    return [(number, list(record.faults.values())[number - 1]) for number in used]


def remarks(found: Sequence[Pair]) -> list[str]:
    """Say where the two sides are not of the same data set: a sentence, or nothing."""
    ours = {pair.ours.alike("data") for pair in found if pair.theirs} - {""}
    theirs = {pair.theirs.dataset for pair in found if pair.theirs} - {""}
    if not ours or not theirs or ours == theirs:
        return []
    both = f"ours are of {', '.join(sorted(ours))}, the record's of {', '.join(sorted(theirs))}"
    return [f"Accuracies and times are not to be compared: {both}."]


def markdown(rows: Sequence[Row], record: Record) -> str:
    """Return ours beside the record as a Markdown table with footnotes; nothing where it has none of ours."""
    found = pairs(rows, record)
    if not found:
        return ""
    head = [*(column.head(ACCURACY) for column in OURS), *(f"record: {name}" for name in THEIRS)]
    lines = [f"Beside the record: {record.source}. {LEGEND}", *remarks(found)]
    lines += [f"[{number}] {fault}" for number, fault in notes(found, record)]
    return aligned([head, *cells(found, record)], TEXT) + "\n" + "\n".join(lines) + "\n"
