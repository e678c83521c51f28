"""The report's tables and texts: HTML of what a comparison was asked for, ran with and left behind."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from typing import Any

from pipetrain.comparison.request import Request
from pipetrain.comparison.runs import Outcome, Runs, torchrun
from pipetrain.comparison.table import dash, duration

RAN: tuple[str, ...] = (
    "method",
    "model",
    "partition",
    "microbatches",
    "window",
    "updates",
    "codec forward",
    "codec backward",
)
RAN += ("in flight", "versions", "staleness: mean", "most", "computing", "parameters")
RUN = ("run", "state", "last acc", "best acc", "s an epoch", "whole run", "started", "records")


def section(title: str, body: str) -> str:
    """Return a part of the page under its heading. `body` is HTML."""
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>"


def card(body: str) -> str:
    """Return HTML on a sheet of its own."""
    return f'<div class="card">{body}</div>'


def grid(
    name: str,
    head: Sequence[Sequence[str]],
    lines: Sequence[Sequence[str]],
    text: Sequence[bool],
    groups: Sequence[tuple[str, int]] = (),
) -> str:
    """Return a table that scrolls by itself where the page is too narrow; its first column stays in view.

    `text`: which columns hold words. `groups`: headings over so many columns each, a rule before each but the
    first.
    """
    edges = {sum(count for _, count in groups[:i]) for i in range(1, len(groups))}
    kinds = [" ".join(["text"] * word + ["edge"] * (i in edges)) for i, word in enumerate(text)]
    classes = [f' class="{kind}"' if kind else "" for kind in kinds]
    over = "".join(
        f'<th scope="colgroup" colspan="{count}" class="group{" edge" * (i > 0)}">{escape(title)}</th>'
        for i, (title, count) in enumerate(groups)
    )
    top = f"<tr>{over}</tr>" if groups else ""
    top += "".join(
        "<tr>"
        + "".join(f'<th scope="col"{k}>{escape(c)}</th>' for k, c in zip(classes, h, strict=True))
        + "</tr>"
        for h in head
    )
    body = "".join(
        f'<tr><th scope="row">{escape(line[0])}</th>'
        + "".join(_cell(cell, k) for cell, k in zip(line[1:], classes[1:], strict=True))
        + "</tr>"
        for line in lines
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}"><table>'
        f"<thead>{top}</thead><tbody>{body}</tbody></table></div>"
    )


def _cell(cell: str, kind: str) -> str:
    return f'<td class="bad">{cell}</td>' if cell == "failed" else f"<td{kind}>{escape(cell)}</td>"


def failures(outcomes: Sequence[Outcome], runs: Runs) -> str:
    """Return what failed, and its last words."""
    parts = []
    for outcome in outcomes:
        if outcome.summary is None:
            words = "\n".join(runs.last_words(outcome.spec)) or "It said nothing."
            parts.append(
                card(
                    f"<h3>{escape(outcome.spec.title)}</h3><p>It failed ({escape(outcome.failure)}) after "
                    f'{duration(outcome.wall_s)}. Its last words:</p><pre class="words">{escape(words)}</pre>'
                )
            )
    return section("What failed", "".join(parts))


def ran(outcomes: Sequence[Outcome]) -> str:
    """Return how the first finished run of each model and method ran: figures by stage, first to last."""
    first: dict[tuple[str, str], Outcome] = {}
    for outcome in outcomes:
        if outcome.summary:
            first.setdefault((outcome.model, outcome.spec.method.name), outcome)
    lines = [_ran(outcome.spec.method.name, outcome.summary or {}) for outcome in first.values()]
    if not lines:
        return "<p>No run finished.</p>"
    text = [name in ("method", "model", "codec forward", "codec backward") for name in RAN]
    return grid("How each method ran", [RAN], lines, text) + (
        '<p class="small">Of the first seed. partition: the first layer of each stage but the first. By '
        "stage, first to last: in flight, the most microbatches held; versions, the most weight versions; "
        "staleness, updates that a gradient was late by; computing, the share of training in which it "
        "computed.</p>"
    )


def _ran(method: str, summary: dict[str, Any]) -> list[str]:
    stages = [stage for stage in summary.get("per_stage", []) if isinstance(stage, dict)]

    def each(key: str, form: str) -> str:
        found = [stage[key] for stage in stages if stage.get(key) is not None]
        return " | ".join(form.format(value) for value in found) if found else "-"

    def one(key: str) -> str:
        value = summary.get(key)
        return "-" if value is None else str(value)

    window = "an epoch" if summary.get("window", 0) is None else one("window")
    return [
        method,
        *map(one, ("model", "partition", "microbatches")),
        window,
        *map(one, ("updates", "codec_forward", "codec_backward")),
        each("peak_in_flight", "{}"),
        each("peak_versions", "{}"),
        each("mean_staleness", "{:.2f}"),
        each("max_staleness", "{}"),
        each("busy_fraction", "{:.0%}"),
        each("params", "{:,}"),
    ]


def every_run(asked: Request, outcomes: Sequence[Outcome], runs: Runs) -> str:
    """Return a line for each run that was asked for, with links to what it left beside the report."""
    made = {outcome.spec: outcome for outcome in outcomes}
    head = "".join(
        f'<th scope="col"{" class=text" * (i in (0, 1, 6, 7))}>{c}</th>' for i, c in enumerate(RUN)
    )
    body = "".join(_run_line(spec.title, spec.name, made.get(spec)) for spec in asked.specs)
    commands = "\n\n".join(shlex.join(_command(spec, asked)) for spec in asked.specs)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="Every run"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        "<details><summary>The command of each run</summary>"
        f"<pre tabindex=0>{escape(commands)}</pre></details>"
    )


def _command(spec: Any, asked: Request) -> list[str]:
    return ["python", *torchrun(spec, asked.out / "runs" / spec.name)[1:]]


def _run_line(title: str, name: str, outcome: Outcome | None) -> str:
    summary = outcome.summary if outcome else None
    state = "not made yet" if outcome is None else "failed" if summary is None else "done"
    links = "-"
    if outcome:
        links = f'<a href="runs/{escape(name)}.log">output</a>'
        links += f' <a href="runs/{escape(name)}/">folder</a>' if summary else ""
    cells = [
        f'<th scope="row">{escape(title)}</th>',
        f'<td class="{"bad" if state == "failed" else "text"}">{state}</td>',
    ]
    figures = [summary.get(key) if summary else None for key in ("val_acc", "best_val_acc", "epoch_s")]
    cells += [f"<td>{dash(None if v is None else 100 * v, '{:.2f}')}</td>" for v in figures[:2]]
    cells += [f"<td>{dash(figures[2], '{:.2f}')}</td>"]
    cells += [f"<td>{dash(outcome.wall_s if outcome else None, duration)}</td>"]
    cells += [f'<td class="text">{escape(outcome.made.get("date", "-") if outcome else "-")}</td>']
    return f'<tr>{"".join(cells)}<td class="text">{links}</td></tr>'


def settings(asked: Request, outcomes: Sequence[Outcome]) -> str:
    """Return the overrides by what they are for, and what the runs were made on."""
    specs = asked.specs
    common = [w for w in specs[0].overrides if all(w in spec.overrides for spec in specs)]
    items = [("processes", str(specs[0].nproc)), ("every run", " ".join(common) or "the defaults")]
    for model in dict.fromkeys(spec.model for spec in specs):
        own = next(spec.overrides for spec in specs if spec.model == model)
        words = " ".join(word for word in own if word not in common)
        items += [(str(model), f"model={model} {words}".strip())] if model else []
    methods = {spec.method.name: spec.method.overrides for spec in specs}
    items += [(name, " ".join(words)) for name, words in methods.items()]
    facts: dict[str, list[str]] = {}
    for outcome in outcomes:
        for key, value in outcome.made.items():
            facts.setdefault(key, [])
            facts[key] += [value] * (value not in facts[key])
    machine = [(key, "; ".join(values)) for key, values in facts.items() if key != "date"]
    left = card("<h3>Overrides</h3>" + _list(items, "code"))
    right = card("<h3>Made on</h3>" + _list(machine or [("machine", "unknown")], "span"))
    return f'<div class="pair">{left}{right}</div>'


def _list(items: Sequence[tuple[str, str]], tag: str) -> str:
    lines = (f"<dt>{escape(key)}</dt><dd><{tag}>{escape(value)}</{tag}></dd>" for key, value in items)
    return f"<dl>{''.join(lines)}</dl>"


def reproduce(asked: Request, outcomes: Sequence[Outcome], typed: str) -> str:
    """Return the command that made this, and that makes it again."""
    command = f"python scripts/compare.py {typed}"
    again = f"{command} --fresh"
    revisions = dict.fromkeys(filter(None, (outcome.made.get("pipetrain", "") for outcome in outcomes)))
    at = f" at revision {', '.join(map(escape, revisions))}" if revisions else ""
    return (
        f"<p>In a checkout of pipetrain{at}:</p><pre tabindex=0>{escape(command)}</pre>"
        f"<p>It keeps the runs that are done. To make all of them again: <code>{escape(again)}</code>. "
        "The curves of all runs, epoch by epoch:</p>"
        f"<pre tabindex=0>tensorboard --logdir {escape(shlex.quote(str(asked.out / 'runs')))}</pre>"
    )
