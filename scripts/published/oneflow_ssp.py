"""The numbers of OneFlow's SSP document, by its versions of December 2020.

In oneflow_ssp.csv, from github.com/ouyangyu/oneflow-test: `document` 6 is test_ssp.md, 7, 7b and 7c are
2020_12_07_test_ssp.md, 2020_12_07_2_test_ssp.md and 2020_12_07_3_ssp.md, 8 is 20201208_of_ssp.md. `oneflow`:
the commit of its branch dev_ssp; `images`: on a device of stage 0 at once; `static`: stage static scheduling,
as far as it is said; MiB of a process, as in its tables, or else on most devices; and the utilisation of one
moment.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

from published.record import Check, Finding, How, Series

FILE = Path(__file__).with_suffix(".csv")
WHOLE = "8"  # the version that has times and memory of the same runs, and data parallelism beside them
UNITS = ("MiB", "s", "%")


def rows() -> dict[tuple[str, str, str], dict[str, str]]:
    """Return the rows by version of the document, what was run, and static scheduling, on or off."""
    with FILE.open(newline="") as file:
        return {(row["document"], row["what"], row["static"]): row for row in csv.DictReader(file)}


def epochs_and_peak(what: str, static: str = "") -> dict[str, float] | None:
    """Return the median `seconds` of the epochs and the `peak` of the fullest device, in MiB.

    None if the one version of the document that has both has no such run.
    """
    if (row := rows().get((WHOLE, what, static))) is None:
        return None
    return {"seconds": median(epochs_of(row)), "peak": float(row["stage 0 MiB"])}


def epochs_of(row: Mapping[str, str]) -> list[float]:
    """Return the seconds of the epochs of a run."""
    return [float(seconds) for name, seconds in row.items() if name.startswith("epoch") and seconds]


def documented() -> Iterator[Finding]:
    """Give all numbers of the record by version of its document, and what static scheduling changes there."""
    every = rows()
    names = {
        key: f"{key[0]} Dec, {row['oneflow'] or 'not said'}: {row['what']}, {row['images']} images"
        + f", static {row['static']}" * bool(row["static"])
        for key, row in every.items()
    }
    for column in next(iter(every.values())):
        quantity, _, unit = column.rpartition(" ")
        if unit not in UNITS:
            continue
        values = {names[key]: float(row[column]) for key, row in every.items() if row[column]}
        yield Series("", quantity, "", values, How.PUBLISHED, unit)
    changes = [
        100 * median(epochs_of(row)) / median(epochs_of(every[document, what, "off"])) - 100
        for (document, what, static), row in every.items()
        if static == "on" and (document, what, "off") in every
    ]
    says = "orders are always static: there is nothing to switch"
    published = f"by {min(changes):.1f} to {max(changes):+.1f} %"
    yield Check("an epoch changes by static scheduling", published, "the same", says, None, How.PLANNED)
