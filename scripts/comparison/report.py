"""The report: one HTML file that shows what a comparison found, to be looked at, passed on and printed.

It holds everything that it shows, so that it reads the same from a mail, a browser without a network or a
CI artifact, and has no script. What was compared may be unfinished or may have failed: each part says what
there is. What it looks like is said in the template `report.html`, which escapes all that comes from outside
(names, overrides, a run's last words); this says what stands in it.
"""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from comparison.figures import dash, duration, two
from comparison.request import Request, Spec
from comparison.runs import Outcome, Runs, Summary, words
from comparison.table import Row, Table, compared, results
from comparison.verdict import verdict

FILE = "report.html"


def write(
    asked: Request, outcomes: Sequence[Outcome], runs: Runs, rows: Sequence[Row], pictures: Sequence[str]
) -> None:
    """Write report.html beside the table, with the pictures of these files in it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    failed = [outcome for outcome in outcomes if outcome.summary is None]
    said = verdict(rows, len(failed), len(asked.specs) - len(outcomes), len(asked.specs))
    page = environment.get_template(FILE).render(
        title=asked.experiment.title or " against ".join(asked.methods),
        facts=_facts(asked, outcomes),
        verdict=said or ["No run was made."],
        tables=[results(rows), _ran(rows)] if rows else [],
        failures=[
            (o.spec.title, o.failure, duration(o.wall_s), "\n".join(runs.last_words(o.spec))) for o in failed
        ],
        pictures=[(_words(name, rows), _address(asked.out / name)) for name in pictures],
        runs=_every_run(asked, outcomes),
        commands="\n\n".join(_command(spec, asked) for spec in asked.specs),
        machine=_machine(outcomes),
        again=f"python scripts/compare.py {asked.typed}",
        logs=shlex.quote(str(asked.out / "runs")),
        date=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    )
    (asked.out / FILE).write_text(page)


def _facts(asked: Request, outcomes: Sequence[Outcome]) -> list[str]:
    done = [outcome.summary for outcome in outcomes if outcome.summary]
    seeds = sorted({spec.seed for spec in asked.specs})
    facts = [
        _each(f"{summary['model']} on {summary['data']}" for summary in done),
        _each(f"{summary['epochs']} epochs" for summary in done),
        f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}",
        _each(summary["device"] for summary in done),
    ]
    return [fact for fact in facts if fact]


def _each(values: Iterable[str]) -> str:
    """Join values, each once."""
    return ", ".join(dict.fromkeys(values))


def _words(name: str, rows: Sequence[Row]) -> str:
    """Say what a picture shows."""
    metric = compared(rows)
    over = "epoch" if name.endswith("_epoch.png") else "time"
    last = (f"{r.model} by {r.method}: {metric.text(sum(r.last) / len(r.last))}" for r in rows if r.done)
    return f"{metric.heading} by {over}. After the last epoch {'; '.join(last)}"


def _address(picture: Path) -> str:
    return f"data:image/png;base64,{b64encode(picture.read_bytes()).decode()}"


def _by_stage(key: str, form: str = "{}") -> Callable[[Summary], str]:
    """Return what writes a figure of each stage, first to last."""

    def write(summary: Summary) -> str:
        found = [stage[key] for stage in summary.get("per_stage", []) if stage.get(key) is not None]
        return " | ".join(form.format(value) for value in found) or "-"

    return write


def _plain(key: str) -> Callable[[Summary], str]:
    return lambda summary: str(summary.get(key, "-"))


RAN: dict[str, Callable[[Summary], str]] = {
    "partition": _plain("partition"),
    "microbatches": _plain("microbatches"),
    "updates": _plain("updates"),
    "codecs": lambda s: f"{s.get('codec_forward', '-')} | {s.get('codec_backward', '-')}",
    "in flight": _by_stage("peak_in_flight"),
    "versions": _by_stage("peak_versions"),
    "staleness": _by_stage("mean_staleness", "{:.2f}"),
    "at most": _by_stage("max_staleness"),
    "computing": _by_stage("busy_fraction", "{:.0%}"),
}
RAN_MEANS = (
    "Of the first seed. partition: the first layer of each stage but the first. codecs: of activations | of "
    "gradients. By stage, first to last: in flight, the most microbatches held; versions, the most weight "
    "versions; staleness, the updates that gradients were late by, in the mean and at most; computing, the "
    "share of training in which it computed."
)


def _ran(rows: Sequence[Row]) -> Table:
    """Return how the first finished run of each model and method ran."""
    lines = [[r.method, r.model, *(write(r.done[0]) for write in RAN.values())] for r in rows if r.done]
    return Table(
        "How each method ran", ["method", "model", *RAN], lines, [RAN_MEANS], ("method", "model", "codecs")
    )


def _every_run(asked: Request, outcomes: Sequence[Outcome]) -> Table:
    """Return a line for each run that was asked for, also where it is not made yet."""
    made = {outcome.spec: outcome for outcome in outcomes}
    lines = []
    for spec in asked.specs:
        if (outcome := made.get(spec)) is None:
            lines.append([spec.title, "not made yet", *["-"] * 4])
            continue
        links = Markup('<a href="runs/{}.log">output</a>').format(quote(spec.name))
        state = "failed" if outcome.summary is None else "done"
        load, date = dash(outcome.other_load, two), outcome.made.get("date", "-")
        lines.append([spec.title, state, duration(outcome.wall_s), load, date, links])
    note = "other load: cores that other programs kept busy meanwhile, in the mean. Figures are in runs.csv."
    head = ["run", "state", "whole run", "other load", "started", "records"]
    return Table("Every run", head, lines, [note], ("run", "state", "started", "records"))


def _command(spec: Spec, asked: Request) -> str:
    return shlex.join(["pipetrain", *words(spec, asked.out / "runs" / spec.name)])


def _machine(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what the runs were made on."""
    keys = dict.fromkeys(key for outcome in outcomes for key in outcome.made if key != "date")
    return {key: _each(o.made[key] for o in outcomes if key in o.made) for key in keys}
