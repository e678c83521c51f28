"""The report: one HTML file that shows what a comparison found, to be looked at, passed on and printed.

It holds everything that it shows, so that it reads the same from a mail, a browser without a network or a
CI artifact, and has no script. What was compared may be unfinished or may have failed: each part says what
there is. What it looks like is said in the template `report.html`, which escapes all that comes from outside
(names, overrides, a run's last words); this says what stands in it.
"""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from comparison.figures import duration
from comparison.request import Request
from comparison.runs import Outcome, Runs, words
from comparison.table import Row, Table
from comparison.verdict import verdict

FILE = "report.html"


def write(
    asked: Request,
    outcomes: Sequence[Outcome],
    runs: Runs,
    rows: Sequence[Row],
    results: Sequence[Table],
    pictures: Sequence[str],
) -> None:
    """Write report.html beside the table, with the pictures of these files in it."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    failed = [outcome for outcome in outcomes if outcome.summary is None]
    said = verdict(rows, len(failed), len(asked.specs) - len(outcomes), len(asked.specs))
    keys = dict.fromkeys(key for outcome in outcomes for key in outcome.machine if key != "date")
    page = environment.get_template(FILE).render(
        title=asked.title,
        verdict=said or ["No run was made."],
        tables=results,
        failures=[
            (o.spec.title, o.failure, duration(o.wall_s), "\n".join(runs.last_words(o.spec))) for o in failed
        ],
        pictures=[(Path(name).stem.replace("_", " by "), _address(asked.out / name)) for name in pictures],
        runs=_every_run(asked, outcomes),
        commands="\n\n".join(
            shlex.join(["pipetrain", *words(spec, asked.out / "runs" / spec.name)]) for spec in asked.specs
        ),
        machine={key: _each(o.machine[key] for o in outcomes if key in o.machine) for key in keys},
        again=f"python scripts/compare.py {asked.typed}",
        logs=shlex.quote(str(asked.out / "runs")),
        date=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    )
    (asked.out / FILE).write_text(page)


def _each(values: Iterable[str]) -> str:
    """Join values, each once."""
    return ", ".join(dict.fromkeys(values))


def _address(picture: Path) -> str:
    return f"data:image/png;base64,{b64encode(picture.read_bytes()).decode()}"


def _every_run(asked: Request, outcomes: Sequence[Outcome]) -> Table:
    """Return a line for each run that was asked for, also where it is not made yet."""
    by_spec = {outcome.spec: outcome for outcome in outcomes}
    lines = []
    for spec in asked.specs:
        if (outcome := by_spec.get(spec)) is None:
            lines.append([spec.title, "not made yet", *["-"] * 3])
            continue
        link = Markup('<a href="runs/{}.log">output</a>').format(quote(spec.name))
        state = "failed" if outcome.summary is None else "done"
        lines.append([spec.title, state, duration(outcome.wall_s), outcome.machine.get("date", "-"), link])
    head = ["run", "state", "whole run", "started", "records"]
    note = "The figures of each run, and of its stages, are in runs.csv and in the run's own summary.json."
    return Table("Every run", head, lines, [note], ("run", "state", "started", "records"))
