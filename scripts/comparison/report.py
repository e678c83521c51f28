"""The report: one HTML file that shows what a comparison found, to be looked at, passed on and printed.

It holds everything that it shows, so that it reads the same from a mail, a browser without a network or a
CI artifact, and has no script. What was compared may be unfinished or may have failed: each part says what
there is. All that comes from outside (names, overrides, a run's last words) is escaped where it enters the
page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from statistics import fmean
from string import Template

from comparison import charts, record, sections, table
from comparison.request import Request
from comparison.runs import Outcome, Runs, columns
from comparison.sections import card, grid, section
from comparison.table import Row, mean
from comparison.text import duration, size
from comparison.timelines import timelines
from comparison.verdict import verdict

FILE = "report.html"
RESULTS = (
    "last_acc",
    "speedup",
    "best_acc",
    "train_s",
    "whole_s",
    "bytes",
    "bytes_ratio",
    "codec_s",
    "seeds",
)
TEMPLATE = Path(__file__).with_name(FILE)


def write(asked: Request, outcomes: Sequence[Outcome], runs: Runs, typed: str) -> None:
    """Write report.html beside the table. `typed`: the arguments of the command that made it."""
    (asked.out / FILE).write_text(page(asked, outcomes, runs, typed))


def page(asked: Request, outcomes: Sequence[Outcome], runs: Runs, typed: str) -> str:
    """Return the report as HTML."""
    rows = table.make_rows(outcomes)
    failed = sum(outcome.summary is None for outcome in outcomes)
    said = verdict(rows, failed, len(asked.specs) - len(outcomes), len(asked.specs))
    parts = [
        section("Results", _results(rows, outcomes)),
        *([sections.failures(outcomes, runs)] if failed else []),
        _beside(rows, asked),
        *_models(outcomes, _styles(asked)),
        _timelines(asked),
        section("How each method ran", sections.ran(outcomes)),
        section("Every run", sections.every_run(asked, outcomes, runs)),
        section("Settings", sections.settings(asked, outcomes)),
        section("To make it again", sections.reproduce(asked, outcomes, typed)),
    ]
    return Template(TEMPLATE.read_text()).substitute(
        title=escape(_title(asked)),
        facts="".join(f"<span>{escape(fact)}</span> " for fact in _facts(asked, outcomes)),
        verdict="\n".join(f"<p>{escape(sentence)}</p>" for sentence in said or ["No run was made."]),
        sections="\n".join(filter(None, parts)),
        date=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
    )


def _title(asked: Request) -> str:
    if asked.experiment:
        return asked.experiment.title
    names = list(dict.fromkeys(spec.method.name for spec in asked.specs))
    return " against ".join(names) if len(names) < 4 else f"{len(names)} methods compared"


def _facts(asked: Request, outcomes: Sequence[Outcome]) -> list[str]:
    done = [outcome.summary for outcome in outcomes if outcome.summary]
    seeds = sorted({spec.seed for spec in asked.specs})
    facts = [", ".join(dict.fromkeys(f"{s['model']} on {s['data']}" for s in done))]
    facts += [", ".join(dict.fromkeys(f"{s['epochs']} epochs" for s in done))]
    facts += [f"{len(seeds)} seeds" if len(seeds) > 1 else f"seed {seeds[0]}"]
    facts += [", ".join(dict.fromkeys(str(s["device"]) for s in done))]
    dates = sorted(date[:10] for outcome in outcomes if (date := outcome.made.get("date")))
    facts += [" to ".join(dict.fromkeys((dates[0], dates[-1])))] if dates else []
    return [fact for fact in facts if fact]


def _styles(asked: Request) -> dict[str, int]:
    """Give each method a number, which is a colour and a marker."""
    return {name: n for n, name in enumerate(dict.fromkeys(spec.method.name for spec in asked.specs))}


def _results(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """Return what is to be trusted first, then what the record's columns say."""
    if not rows:
        return "<p>No run was made.</p>"
    notes = [table.meaning(outcomes), *table.remarks(outcomes)]
    return (
        grid("Results", ["method", *RESULTS], _blocks(rows, _result), ("method",))
        + "<h3>In the record's columns</h3>"
        + grid("In the record's columns", table.RECORD, _blocks(rows, _as_recorded), table.TEXT)
        + "".join(f'<p class="small">{escape(note)}</p>' for note in notes)
    )


def _blocks(rows: Sequence[Row], line: Callable[[Row], list[str]]) -> list[tuple[str, list[list[str]]]]:
    """Return the lines of the rows by model."""
    models = dict.fromkeys(row.model for row in rows)
    return [(model, [line(row) for row in rows if row.model == model]) for model in models]


def _result(row: Row) -> list[str]:
    cells = table.cells(row) | ({} if row.finished else {"last_acc": "failed"})
    return [row.method, *(cells[name] for name in RESULTS)]


def _as_recorded(row: Row) -> list[str]:
    return [table.cells(row)[name] for name in table.RECORD]


def _beside(rows: Sequence[Row], asked: Request) -> str:
    """Return our rows beside the record's; nothing where it has none of ours."""
    reported = asked.experiment.record if asked.experiment else None
    found = record.pairs(rows, reported) if reported else []
    if reported is None or not any(pair.theirs for pair in found):
        return ""
    ours, theirs = record.OURS[1:], record.THEIRS[:-1]  # the model is a heading, notes stand at the name
    blocks = [
        (model, [_with_notes(line) for line in record.cells([p for p in found if p.ours.model == model])])
        for model in dict.fromkeys(row.model for row in rows)
    ]
    over = [("ours", len(ours)), ("the record", len(theirs))]
    notes = "".join(
        f'<li value="{number}">{escape(note)}</li>' for number, note in record.notes(found, reported)
    )
    return section(
        "Beside the record",
        grid("Our figures beside the record's", [*ours, *theirs], blocks, record.TEXT, over)
        + f'<div class="small">The record: {escape(reported.source)}. {escape(record.LEGEND)} Its times '
        f"are of other machines; what is known to be wrong with it: <ol>{notes}</ol></div>"
        + "".join(f'<p class="small">{escape(remark)}</p>' for remark in record.remarks(found)),
    )


def _with_notes(line: list[str]) -> list[str]:
    """Take a line's model away, and set its footnotes behind the record's name of the method."""
    _, *cells, footnotes = line
    name = len(record.OURS) - 1
    return [*cells[:name], f"{cells[name]} {footnotes}".strip(), *cells[name + 1 :]]


def _models(outcomes: Sequence[Outcome], styles: dict[str, int]) -> list[str]:
    """Return a section of charts for each model that has a finished run."""
    found = []
    for model in dict.fromkeys(outcome.spec.model for outcome in outcomes):
        done = [o for o in outcomes if o.spec.model == model and o.summary]
        groups = {name: mine for name in styles if (mine := [o for o in done if o.spec.method.name == name])}
        if groups:
            name, data = done[0].model, (done[0].summary or {})["data"]
            found.append(section(f"{name} on {data}", _charts(f"{name} on {data}", groups, styles)))
    return found


def _charts(where: str, groups: dict[str, list[Outcome]], styles: dict[str, int]) -> str:
    by_epoch = [_curve(name, styles[name], mine, "epoch") for name, mine in groups.items()]
    by_time = [_curve(name, styles[name], mine, "elapsed_s") for name, mine in groups.items()]
    last = {curve.name: f"{curve.mean[-1]:.2f} %" for curve in by_epoch}
    told = "; ".join(f"{name} {value}" for name, value in last.items())
    several = max(map(len, groups.values())) > 1
    band = " Line: mean of the seeds; band: from least to most." if several else ""
    pictures = (
        (by_epoch, "epoch", "Accuracy by epoch", True),
        (by_time, "seconds since the start, evaluation included", "Accuracy by time", False),
    )
    shown = [
        card(
            f"<figure><h3>{title}</h3>"
            + charts.accuracy(curves, label, f"{title}, {where}. After the last epoch: {told}", whole)
            + f"<figcaption>Test accuracy in %, on an axis stretched towards 100.{band}</figcaption></figure>"
        )
        for curves, label, title, whole in pictures
    ]
    bars = card(charts.bars(_seconds(groups, styles), "Seconds per epoch", ("method", "training + rest")))
    sent = _bytes(groups, styles)
    if sent:
        bars += card(charts.bars(sent, "Bytes per epoch", ("method", "on the wire")))
    shown_styles = {name: styles[name] for name in groups}
    return charts.legend(shown_styles, last) + f'<div class="pair">{"".join(shown)}{bars}</div>'


def _curve(name: str, style: int, outcomes: Sequence[Outcome], key: str) -> charts.Curve:
    """Join a method's seeds."""
    percent = [[100 * value for value in column] for column in columns(outcomes, "val_acc")]
    by_epoch = list(zip(*percent, strict=True))
    return charts.Curve(
        name,
        style,
        [fmean(values) for values in zip(*columns(outcomes, key), strict=True)],
        [fmean(values) for values in by_epoch],
        [min(values) for values in by_epoch],
        [max(values) for values in by_epoch],
    )


def _seconds(groups: dict[str, list[Outcome]], styles: dict[str, int]) -> list[charts.Bar]:
    bars = []
    for name, mine in groups.items():
        done = [outcome.summary or {} for outcome in mine]
        train = mean([s["epoch_s"] for s in done]) or 0.0
        rest = max(0.0, (mean([s["total_s"] / s["epochs"] for s in done]) or 0.0) - train)
        bars.append(charts.Bar(name, styles[name], (train, rest), f"{duration(train)} + {duration(rest)}"))
    return bars


def _bytes(groups: dict[str, list[Outcome]], styles: dict[str, int]) -> list[charts.Bar]:
    sent = {
        name: mean([(outcome.summary or {}).get("bytes_per_epoch") for outcome in mine])
        for name, mine in groups.items()
    }
    return [
        charts.Bar(name, styles[name], (value,), size(value))
        for name, value in sent.items()
        if value is not None
    ]


def _timelines(asked: Request) -> str:
    drawn = timelines(asked.specs)
    there = {name for one in drawn for name in one.methods}
    missing = [name for name in _styles(asked) if name not in there]
    figures = "".join(
        card(
            f"<figure><h3>{escape(', '.join(one.methods))}</h3>"
            f"{sections.scrolled('Timeline', one.svg)}"
            f"<figcaption>{escape(one.words)}</figcaption></figure>"
        )
        for one in drawn
    )
    what = "A short window on paper, a forward as the unit of time, a backward twice that, messages free."
    what += " Of a schedule that decides while it runs, an example."
    what += f" Not drawn: {', '.join(missing)}." if missing else ""
    return section("Timelines", f'<p class="small">{escape(what)}</p>{figures}')
