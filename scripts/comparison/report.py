"""The report: one HTML file that shows what a comparison found, to be looked at, passed on and printed.

It holds everything that it shows, so that it reads the same from a mail, a browser without a network or a
CI artifact, and has no script. What was compared may be unfinished or may have failed: each part says what
there is. What it looks like is said in the template `report.html`, which escapes all that comes from outside
(names, overrides, a run's last words); this says what stands in it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from comparison import record, table
from comparison.metric import ACCURACY, Metric
from comparison.plots import Picture, timelines
from comparison.request import Request
from comparison.runs import Outcome, Runs, Spec, Summary, words
from comparison.table import Column, Row, by_model, compared, dash, duration, two
from comparison.verdict import verdict

FILE = "report.html"
RUN = ("run", "state", "last {}", "best {}", "s an epoch", "whole run", "other load", "started", "records")


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of the page. `blocks`: lines under a heading each, which is shown where there are several.

    `text`: the columns that hold words. `over`: headings over so many columns each.
    """

    name: str
    head: Sequence[str]
    blocks: Sequence[tuple[str, Sequence[Sequence[str]]]]
    text: Sequence[str] = ()
    over: Sequence[tuple[str, int]] = ()


def write(
    asked: Request, outcomes: Sequence[Outcome], runs: Runs, rows: Sequence[Row], pictures: Sequence[Picture]
) -> None:
    """Write report.html beside the table."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    failed = [outcome for outcome in outcomes if outcome.summary is None]
    said = verdict(rows, len(failed), len(asked.specs) - len(outcomes), len(asked.specs))
    drawn, missing = timelines(asked.specs)
    shown = [*(table.RECORD if asked.record else []), *table.filled(table.RESULTS, rows)]
    page = environment.get_template(FILE).render(
        title=_title(asked),
        facts=_facts(asked, outcomes),
        verdict=said or ["No run was made."],
        results=_results(asked, rows),
        notes=[table.meaning(shown, rows), *(n for n in table.remarks(rows) if n not in said)]
        if rows
        else [],
        failures=[
            (o.spec.title, o.failure, duration(o.wall_s), "\n".join(runs.last_words(o.spec))) for o in failed
        ],
        beside=_beside(asked, rows),
        metric=compared(rows).heading,
        pictures=pictures,
        wide=len(by_model(rows)) > 1,
        timelines=drawn,
        missing=missing,
        ran=_ran(rows),
        runs=_every_run(asked, outcomes, compared(rows)),
        commands="\n\n".join(shlex.join(_command(spec, asked)) for spec in asked.specs),
        overrides=_overrides(asked),
        machine=_machine(outcomes),
        revisions=_each(outcome.made.get("pipetrain", "unknown") for outcome in outcomes),
        again=f"python scripts/compare.py {asked.typed}",
        logs=shlex.quote(str(asked.out / "runs")),
        date=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    )
    (asked.out / FILE).write_text(page)


def _title(asked: Request) -> str:
    if asked.experiment:
        return asked.experiment.title
    names = asked.methods
    return " against ".join(names) if len(names) < 4 else f"{len(names)} methods compared"


def _facts(asked: Request, outcomes: Sequence[Outcome]) -> list[str]:
    done = [outcome.summary for outcome in outcomes if outcome.summary]
    seeds = sorted({spec.seed for spec in asked.specs})
    dates = sorted(date[:10] for outcome in outcomes if (date := outcome.made.get("date")))
    facts = [
        _each(f"{summary['model']} on {summary['data']}" for summary in done),
        _each(f"{summary['epochs']} epochs" for summary in done),
        f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}",
        _each(summary["device"] for summary in done),
        _each(dates[:1] + dates[-1:], " to "),
    ]
    return [fact for fact in facts if fact]


def _each(values: Iterable[str], between: str = ", ") -> str:
    """Join values, each once."""
    return between.join(dict.fromkeys(values))


def _results(asked: Request, rows: Sequence[Row]) -> list[Grid]:
    """Return what is to be trusted first, then the columns of the record where there is one."""
    grids = [_grid("Results", [table.METHOD, *table.filled(table.RESULTS, rows)], rows)]
    if asked.record:
        grids.append(_grid("In the record's columns", table.RECORD, rows))
    return grids if rows else []


def _grid(name: str, columns: Sequence[Column], rows: Sequence[Row]) -> Grid:
    blocks = [
        (model, [[column.cell(row) for column in columns] for row in of_model])
        for model, of_model in by_model(rows).items()
    ]
    return Grid(name, [column.head(compared(rows)) for column in columns], blocks, table.TEXT)


def _beside(asked: Request, rows: Sequence[Row]) -> dict[str, Any] | None:
    """Return our rows beside the record's; nothing where it has none of ours."""
    reported = asked.record
    found = record.pairs(rows, reported) if reported else []
    if reported is None or not found:
        return None
    ours, theirs = [column.head(ACCURACY) for column in record.OURS[1:]], record.THEIRS[:-1]
    blocks = []
    for model in by_model(rows):
        lines = record.cells([pair for pair in found if pair.ours.model == model], reported)
        # The model is the heading of its block, and the footnotes stand at the record's name of the method.
        at = len(record.OURS)
        blocks.append(
            (model, [[*line[1:at], f"{line[at]} {line[-1]}".strip(), *line[at + 1 : -1]] for line in lines])
        )
    over = [("ours", len(ours)), ("the record", len(theirs))]
    return {
        "grid": Grid("Our figures beside the record's", [*ours, *theirs], blocks, record.TEXT, over),
        "source": reported.source,
        "legend": record.LEGEND,
        "notes": record.notes(found, reported),
        "remarks": record.remarks(found),
    }


def _by_stage(key: str, form: str = "{}") -> Callable[[Summary], str]:
    """Return what writes a figure of each stage, first to last."""

    def write(summary: Summary) -> str:
        stages = summary.get("per_stage", [])
        found = [stage[key] for stage in stages if stage.get(key) is not None]
        return " | ".join(form.format(value) for value in found) or "-"

    return write


def _codecs(summary: Summary) -> str:
    codecs = summary.get("codec_forward"), summary.get("codec_backward")
    return " | ".join(map(str, codecs)) if any(codecs) else "-"


def _plain(key: str) -> Callable[[Summary], str]:
    return lambda summary: str(summary.get(key, "-"))


RAN: dict[str, Callable[[Summary], str]] = {
    "partition": _plain("partition"),
    "microbatches": _plain("microbatches"),
    "window": lambda summary: "an epoch" if summary.get("window", 0) is None else _plain("window")(summary),
    "updates": _plain("updates"),
    "codecs": _codecs,
    "in flight": _by_stage("peak_in_flight"),
    "versions": _by_stage("peak_versions"),
    "staleness": _by_stage("mean_staleness", "{:.2f}"),
    "at most": _by_stage("max_staleness"),
    "computing": _by_stage("busy_fraction", "{:.0%}"),
    "parameters": _by_stage("params", "{:,}"),
}


def _ran(rows: Sequence[Row]) -> Grid | None:
    """Return how the first finished run of each model and method ran."""
    blocks = [
        (model, [[r.method, *(write(r.done[0]) for write in RAN.values())] for r in of_model if r.done])
        for model, of_model in by_model(rows).items()
    ]
    blocks = [(model, lines) for model, lines in blocks if lines]
    return Grid("How each method ran", ["method", *RAN], blocks, ("method", "codecs")) if blocks else None


def _every_run(asked: Request, outcomes: Sequence[Outcome], metric: Metric) -> Grid:
    """Return a line for each run that was asked for, also where it is not made yet."""
    made = {outcome.spec: outcome for outcome in outcomes}
    lines = []
    for spec in asked.specs:
        if (outcome := made.get(spec)) is None:
            lines.append([spec.title, "not made yet", *["-"] * (len(RUN) - 2)])
            continue
        s, name = outcome.summary, quote(spec.name)
        links = Markup('<a href="runs/{}.log">output</a>').format(name)
        if s is not None:
            links += Markup(' <a href="runs/{}/">folder</a>').format(name)
        figures = ["-"] * 3
        if s is not None:
            figures = [*(metric.number(metric.value(s, of)) for of in ("val", "best_val")), two(s["epoch_s"])]
        load = dash(outcome.other_load, two)
        date = outcome.made.get("date", "-")
        state = "failed" if s is None else "done"
        lines.append([spec.title, state, *figures, duration(outcome.wall_s), load, date, links])
    head = [name.format(metric.name) for name in RUN]
    return Grid("Every run", head, [("", lines)], ("run", "state", "started", "records"))


def _command(spec: Spec, asked: Request) -> list[str]:
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={spec.nproc}", "-m", "pipetrain"]
    return [*launcher, *words(spec, asked.out / "runs" / spec.name)]


def _overrides(asked: Request) -> dict[str, str]:
    """Return the overrides by what they are for."""
    specs = asked.specs
    common = [w for w in specs[0].overrides if all(w in spec.overrides for spec in specs)]
    found = {"processes": str(specs[0].nproc), "every run": " ".join(common) or "the defaults"}
    for spec in specs:
        if spec.model:
            own = (word for word in spec.overrides if word not in common)
            found[spec.model] = " ".join([f"model={spec.model}", *own])
        found[spec.method.name] = " ".join(spec.method.overrides)
    return found


def _machine(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return what the runs were made on."""
    keys = dict.fromkeys(key for outcome in outcomes for key in outcome.made if key != "date")
    made = {key: _each((o.made[key] for o in outcomes if key in o.made), "; ") for key in keys}
    return made or {"machine": "unknown"}
