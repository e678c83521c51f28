"""`scripts/compare.py --experiment NAME` for a published record, or `all` of them for one page.

Whatever is not a published record goes on to the comparison's own command line.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from comparison import cli as comparison
from comparison.processes import interruptible
from comparison.request import RECORDS
from comparison.runs import claim
from pipetrain.errors import ConfigError, one_line
from published import page
from published.record import Record
from published.running import file_of, make

ALL, STUDY = "all", "staleness"  # the study is nobody's record: it has a folder of its own
DOCS = Path(__file__).resolve().parents[2] / "docs"
FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a record, or all, or compare; return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if (options := read(words)) is None:
        return comparison.main(words)
    kept = {ALL: DOCS / "results" / "records", STUDY: DOCS / "results" / STUDY}
    names = (
        [n for n in RECORDS if not n.startswith(STUDY)] if options.experiment == ALL else [options.experiment]
    )
    out = options.out or (
        kept[options.experiment]
        if options.experiment in kept and not options.quick
        else Path("comparisons") / f"{options.experiment}{'-quick' * options.quick}"
    )
    try:
        with interruptible(), claim(out):
            return make_all(names, out, options.quick, options.fresh)
    except ConfigError as error:
        print(f"compare: {error}", file=sys.stderr)
        return REFUSED


def read(words: Sequence[str]) -> argparse.Namespace | None:
    """Return the options of a record, or None where no record is asked for."""
    own = argparse.ArgumentParser(prog="compare.py", add_help=False, allow_abbrev=False)
    own.add_argument("--experiment")
    if own.parse_known_args(words)[0].experiment not in (*RECORDS, ALL):
        return None
    own.add_argument("--out", type=Path, metavar="DIR", help="default: comparisons/ and the record's name")
    own.add_argument("--quick", action="store_true", help="a tiny version, to see that it works")
    own.add_argument("--fresh", action="store_true", help="make again what is kept")
    own.add_argument("--help", "-h", action="help")
    return own.parse_args(words)


def record_of(name: str) -> Record:
    """Return a record by its name."""
    record = import_module(f"published.experiments.{name.replace('-', '_')}").RECORD
    assert isinstance(record, Record)
    return record


def make_all(names: Sequence[str], out: Path, quick: bool, fresh: bool) -> int:
    """Make what is not kept of these records, write their page, and say what did not come back."""
    sections, missing = [], {}
    for name in names:
        record = record_of(name)
        if fresh:
            file_of(out, name).unlink(missing_ok=True)
        try:
            kept = make(name, record, out, quick)
        except KeyboardInterrupt:
            print(f"interrupted\nwhat is done is kept in {out}; the same command goes on there", flush=True)
            return INTERRUPTED
        except Exception as error:  # whatever a step raises; the other records can be made
            print(f"FAILED: {one_line(error)}", flush=True)
            missing[name] = one_line(error)
            continue
        words = ["python", "scripts/compare.py", "--experiment", name, *["--quick"] * quick]
        sections.append(page.section(name, record, kept, out, shlex.join(words)))
        print(
            f"\n{sections[-1].verdict.markdown}\n{''.join(table.markdown for table in sections[-1].tables)}"
        )
    at = DOCS / page.PAGE if out.resolve() == DOCS / "results" / "records" else out / page.PAGE
    page.write(sections, missing, at, out)
    for sentence in page.failed(sections):
        print(f"did not come back: {sentence}")
    print(f"written to {at} and {out / page.REPORT}")
    return FAILED if missing else 0
