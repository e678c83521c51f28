"""Somebody else's figures for the same methods, and the table that has them beside ours.

A record is shown as it was reported, with what is known to be wrong with it in footnotes. Absolute times
are of other machines, so what is to be compared is the ratio, to the same method on both sides: a speed-up of
ours is over our first row of the model, one of the record's over what it has beside that row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comparison.table import Row
from comparison.text import aligned, dash, duration, plus_minus
from pipetrain.errors import ConfigError

PRINTED = ("method", "dataset", "model", "device", "lr", "batch_size", "data_worker", "buffer_size")
NUMBERS = ("epoch", "acc", "eachtime")
OURS = ("model", "method", "acc", "last_acc", "eachtime", "speedup")
AS_PRINTED = ("method", "model", "device", "data_worker", "buffer_size")
THEIRS = (*AS_PRINTED, "epoch", "acc", "eachtime", "speedup", "notes")
TEXT = ("method", "model", "device", "notes")
LEGEND = (
    "A dash: not reported, or no time to measure by. speedup: over our first row of the model; the record's "
    "over what it has beside that row."
)


@dataclass(frozen=True, slots=True)
class RecordRow:
    """A row as it was reported. `beside`: our model and method. `faults`: the numbers of its footnotes."""

    beside: tuple[str, str]
    printed: Mapping[str, str]
    epoch: float | None
    acc: float | None  # percent
    eachtime: float | None  # seconds
    faults: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """Where the rows come from, and what is wrong with them: footnotes, counted from 1."""

    source: str
    rows: tuple[RecordRow, ...]
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """One of our rows and one of the record's, where it has one, with the record's own speed-up."""

    ours: Row
    theirs: RecordRow | None
    speedup: float | None


def read_record(data: Any, where: str) -> Record:
    """Read what a file says of a record. Raises ConfigError for what cannot be meant."""
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise ConfigError(f"{where} must have rows, a list")
    faults: dict[str, str] = data.get("faults") or {}
    rows = []
    for number, row in enumerate(data["rows"], 1):
        here = f"{where}, row {number}"
        if not isinstance(row, dict) or not isinstance(row.get("beside"), list) or len(row["beside"]) != 2:
            raise ConfigError(f"{here} must say beside: [our model, our method]")
        known = {"beside", "faults", *PRINTED, *NUMBERS}
        if unknown := [
            key for key in (*row, *row.get("faults", [])) if key not in known and key not in faults
        ]:
            raise ConfigError(f"{here} has {unknown[0]}, which is neither a column nor one of the faults")
        row = {**(data.get("common") or {}), **row}
        numbers = {key: row.get(key) for key in NUMBERS}
        for key, value in numbers.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ConfigError(f"{here}: {key} must be a number; got {value}")
        rows.append(
            RecordRow(
                beside=(str(row["beside"][0]), str(row["beside"][1])),
                printed={key: str(row[key]) for key in PRINTED if key in row},
                faults=tuple(1 + list(faults).index(key) for key in row.get("faults", [])),
                **numbers,
            )
        )
    return Record(str(data.get("source", "")), tuple(rows), tuple(map(str, faults.values())))


def pairs(rows: Sequence[Row], record: Record) -> list[Pair]:
    """Set the record's rows beside ours, by model and method; ours without one stand alone.

    What the record has of models that are not compared here is left out.
    """
    found = []
    for row in rows:
        theirs = [one for one in record.rows if one.beside == (row.model, row.method)]
        first = next(one for one in rows if one.model == row.model)
        base = next((one for one in record.rows if one.beside == (first.model, first.method)), None)
        found += [Pair(row, one, _speedup(one, base)) for one in theirs] or [Pair(row, None, None)]
    return found


def _speedup(row: RecordRow, base: RecordRow | None) -> float | None:
    return base.eachtime / row.eachtime if base and base.eachtime and row.eachtime else None


def cells(found: Sequence[Pair]) -> list[list[str]]:
    """Return the lines of the table that has both: the columns OURS and THEIRS. Missing is a dash."""
    lines: list[list[str]] = []
    last: Row | None = None
    for pair in found:
        ours = [""] * len(OURS)
        row = pair.ours
        if row is not last:
            ours = [row.model, row.method, dash(row.acc, "{:.2f}"), plus_minus(row.last_acc, row.last_dev)]
            ours += [dash(row.eachtime, duration), dash(row.speedup, "{:.2f}x")]
        last = row
        lines.append(ours + _theirs(pair))
    return lines


def _theirs(pair: Pair) -> list[str]:
    row = pair.theirs
    if row is None:
        return ["-"] * (len(THEIRS) - 1) + [""]
    return [
        *(row.printed.get(key, "-") for key in AS_PRINTED),
        dash(row.epoch, "{:.0f}"),
        dash(row.acc, "{:.2f}"),
        dash(row.eachtime, duration),
        dash(pair.speedup, "{:.2f}x"),
        " ".join(f"[{number}]" for number in row.faults),
    ]


def notes(found: Sequence[Pair], record: Record) -> list[tuple[int, str]]:
    """Return the footnotes of the rows that are shown."""
    used = sorted({number for pair in found if pair.theirs for number in pair.theirs.faults})
    return [(number, record.faults[number - 1]) for number in used]


def remarks(found: Sequence[Pair]) -> list[str]:
    """Say where the two sides are not of the same data set: a sentence, or nothing."""
    ours = {pair.ours.dataset for pair in found if pair.theirs and pair.ours.dataset}
    theirs = {
        pair.theirs.printed["dataset"] for pair in found if pair.theirs and "dataset" in pair.theirs.printed
    }
    if not ours or not theirs or ours == theirs:
        return []
    both = f"ours are of {', '.join(sorted(ours))}, the record's of {', '.join(sorted(theirs))}"
    return [f"Accuracies and times are not to be compared: {both}."]


def markdown(rows: Sequence[Row], record: Record) -> str:
    """Return ours beside the record as a Markdown table with footnotes; nothing where it has none of ours."""
    found = pairs(rows, record)
    if not any(pair.theirs for pair in found):
        return ""
    head = [*OURS, *(f"record: {name}" for name in THEIRS)]
    table = aligned([head, *cells(found)], [name not in TEXT for name in (*OURS, *THEIRS)])
    lines = [f"Beside the record: {record.source}. {LEGEND}"]
    lines += remarks(found)
    lines += [f"[{number}] {fault}" for number, fault in notes(found, record)]
    return f"{table}\n" + "\n".join(lines) + "\n"
