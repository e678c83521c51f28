"""`scripts/compare.py --experiment NAME` for a published record, or `all` of them for one page.

A record's steps are made one after another, and what each returned is kept in one file: one that was made
with the same arguments is not made again. So a record goes on where it was stopped, and its page can be
written again without measuring.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from comparison.figures import duration
from comparison.processes import interruptible
from comparison.request import RECORDS
from comparison.runs import claim, describe_machine, others_now
from comparison.verdict import BUSY
from pipetrain.errors import ConfigError, one_line
from published import page
from published.record import Record, Step

ALL, STUDY, MAP = "all", "staleness", "asynchrony"  # the last two are nobody's: each has its own folder
DOCS = Path(__file__).resolve().parents[2] / "docs"
WORDS = Path(__file__).with_name("records.yaml")
KEPT = {ALL: DOCS / "results" / "records", **{name: DOCS / "results" / name for name in (STUDY, MAP)}}
FAILED, REFUSED, INTERRUPTED = 1, 2, 130

STEP = {"asked", "result", "wall_s", "machine"}
Made = dict[str, dict[str, Any]]
"""By step: `asked`, `result`, `wall_s`, and `machine`, with the date and, where it is timed, `others`.

These are the cores that other programs kept busy just before it or just after, the more.
"""


def main(arguments: Sequence[str]) -> int:
    """Make a record, or all; return the exit status."""
    options = parser().parse_args(arguments)
    name = options.experiment
    records = [one for one in RECORDS if not one.startswith((STUDY, MAP))] if name == ALL else [name]
    kept = None if options.quick else KEPT.get(name)
    out = options.out or kept or Path("comparisons") / f"{name}{'-quick' * options.quick}"
    try:
        with interruptible(), claim(out):
            return make_all(records, out, options.quick, options.fresh)
    except ConfigError as error:
        print(f"compare: {error}", file=sys.stderr)
        return REFUSED


def asked_for(words: Sequence[str]) -> bool:
    """Return whether a command line asks for a record, and not for another comparison."""
    own = argparse.ArgumentParser(prog="compare.py", add_help=False, allow_abbrev=False)
    own.add_argument("--experiment")
    return named(own.parse_known_args(words)[0].experiment or "") in (*RECORDS, ALL)


def named(word: str) -> str:
    """Return the name that somebody means who writes zero_bubble."""
    return word.replace("_", "-")


def parser() -> argparse.ArgumentParser:
    """Make the parser of a record's options."""
    own = argparse.ArgumentParser(prog="compare.py", allow_abbrev=False)
    own.add_argument("--experiment", metavar="NAME", type=named, choices=[*RECORDS, ALL])
    own.add_argument("--out", type=Path, metavar="DIR", help="default: comparisons/ and the record's name")
    own.add_argument("--quick", action="store_true", help="a tiny version, to see that it works")
    own.add_argument("--fresh", action="store_true", help="make again what is kept")
    return own


def record_of(name: str) -> Record:
    """Return a record by its name."""
    experiment = import_module(f"published.experiments.{name.replace('-', '_')}")
    return Record(experiment.steps, experiment.show, **yaml.safe_load(WORDS.read_text())[name])


def make_all(names: Sequence[str], out: Path, quick: bool, fresh: bool) -> int:
    """Make what is not kept of these records, write their page, and say what did not come back."""
    sections, missing = [], {}
    for name in names:
        record = record_of(name)
        if fresh:
            file_of(out, name).unlink(missing_ok=True)
        try:
            made = make(name, record, out, quick)
        except KeyboardInterrupt:
            print(f"interrupted\nwhat is done is kept in {out}; the same command goes on there", flush=True)
            return INTERRUPTED
        except ConfigError:
            raise
        except Exception as error:  # whatever a step raises; the other records can be made
            print(f"FAILED: {one_line(error)}", flush=True)
            missing[name] = one_line(error)
            continue
        words = ["python", "scripts/compare.py", "--experiment", name, *["--quick"] * quick]
        try:
            sections.append(page.section(name, record, made, out, shlex.join(words)))
        except LookupError as error:
            file = file_of(out, name)
            raise ConfigError(f"{file} lacks {error}: other code made it; start over with --fresh") from error
        print("", sections[-1].verdict.markdown, *(of.markdown for of in sections[-1].tables), sep="\n")
    at = DOCS / page.PAGE if out.resolve() == KEPT[ALL] else out / page.PAGE
    page.write(sections, missing, at, out, quick)
    for sentence in (sentence for section in sections * (not quick) for sentence in section.failed):
        print(f"did not come back: {sentence}")
    print(f"written to {at} and {out / page.REPORT}")
    return FAILED if missing else 0


def file_of(folder: Path, name: str) -> Path:
    """Return the file of a record's results."""
    return folder / f"{name}.json"


def make(name: str, record: Record, folder: Path, quick: bool) -> Made:
    """Make the steps of a record that are not kept; return all. Raises whatever a step raises.

    What is done until an interruption or an error is kept. ConfigError: for a file that holds anything else,
    and for a step that docs/ would keep of a tree that is no commit's. RuntimeError: for one that docs/ would
    keep, whose times other programs have disturbed.
    """
    steps, file = record.steps(quick), file_of(folder, name)
    try:
        before: Made = json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{file} cannot be read: {error}; remove it, or choose another --out") from error
    are_steps = isinstance(before, dict) and all(isinstance(step, dict) for step in before.values())
    if not (are_steps and all(step.keys() >= STEP for step in before.values())):
        needs = ", ".join(sorted(STEP))
        raise ConfigError(f"{file} holds no steps, each with its {needs}; remove it, or choose another --out")
    made: Made = {}
    for number, (key, step) in enumerate(steps.items(), 1):
        print(f"[{number}/{len(steps)}] {name}: {key} ... ", end="", flush=True)
        asked = json.loads(json.dumps(step.asked))
        if key in before and before[key]["asked"] == asked:
            made[key] = before[key]
            print("kept from before")
            continue
        kept = folder.resolve() in KEPT.values()
        if kept and describe_machine()["pipetrain"].endswith("-dirty"):
            raise ConfigError("docs/ keeps what a commit has made: commit first, or choose another --out")
        made[key] = {"asked": asked, **_run(step)}
        if kept and (others := float(made[key]["machine"].get("others", 0))) > BUSY:
            raise RuntimeError(
                f"{key}: other programs kept {others:.1f} cores busy, and docs/ keeps only times without "
                "such: run it again when they are done, or choose another --out"
            )
        _write(file, before | made)
        print(duration(made[key]["wall_s"]), flush=True)
    _write(file, made)
    return made


def _run(step: Step) -> dict[str, Any]:
    machine, before = describe_machine(), others_now() if step.timed else 0.0
    start = time.perf_counter()
    result = step.function(**step.arguments)
    wall_s = round(time.perf_counter() - start, 1)
    if step.timed:
        machine["others"] = f"{max(before, others_now()):.2f}"
    return {"result": result, "wall_s": wall_s, "machine": machine}


def _write(path: Path, made: Mapping[str, Any]) -> None:
    """Write a file whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(made, indent=1) + "\n")
    new.replace(path)
