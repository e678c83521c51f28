"""The report's tables and texts: HTML of what a comparison was asked for, ran with and left behind."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from comparison.request import Request
from comparison.runs import Outcome, Runs, Spec, torchrun
from comparison.text import dash, duration

RAN: tuple[str, ...] = (
    "method",
    "partition",
    "microbatches",
    "window",
    "updates",
    "codecs",
    "in flight",
    "versions",
)
RAN += ("staleness", "at most", "computing", "parameters")
RUN = ("run", "state", "last acc", "best acc", "s an epoch", "whole run", "started", "records")


def section(title: str, body: str) -> str:
    """Return a part of the page under its heading. `body` is HTML."""
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>"


def card(body: str) -> str:
    """Return HTML on a sheet of its own."""
    return f'<div class="card">{body}</div>'


def grid(
    name: str,
    head: Sequence[str],
    blocks: Sequence[tuple[str, Sequence[Sequence[str]]]],
    text: Collection[str] = (),
    over: Sequence[tuple[str, int]] = (),
) -> str:
    """Return a table that scrolls by itself where the page is too narrow; its first column stays in view.

    `blocks`: lines under a heading each, which is left out where there is only one. `text`: the columns that
    hold words. `over`: headings over so many columns each, with a rule before all but the first.
    """
    edges = {sum(count for _, count in over[:i]) for i in range(1, len(over))}
    kinds = [" ".join(["text"] * (c in text) + ["edge"] * (i in edges)) for i, c in enumerate(head)]
    groups = "".join(
        f'<th scope="colgroup" colspan="{count}" class="group{" edge" * (i > 0)}">{escape(title)}</th>'
        for i, (title, count) in enumerate(over)
    )
    names = "".join(
        f'<th scope="col" class="{kind}">{escape(c)}</th>' for kind, c in zip(kinds, head, strict=True)
    )
    top = (f"<tr>{groups}</tr>" if groups else "") + f"<tr>{names}</tr>"
    bodies = ""
    for title, lines in blocks:
        block = (
            f'<tr><th scope="rowgroup" colspan="{len(head)}" class="block"><span>{escape(title)}</span></th>'
        )
        block = f"{block}</tr>" if len(blocks) > 1 else ""
        bodies += f"<tbody>{block}{''.join(_line(line, kinds) for line in lines)}</tbody>"
    return scrolled(name, f"<table><thead>{top}</thead>{bodies}</table>")


def scrolled(name: str, body: str) -> str:
    """Return HTML in a box that scrolls sideways, also by the keyboard."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">{body}</div>'


def _line(line: Sequence[str], kinds: Sequence[str]) -> str:
    cells = "".join(_cell(escape(cell), kind) for cell, kind in zip(line[1:], kinds[1:], strict=True))
    return f'<tr><th scope="row">{escape(line[0])}</th>{cells}</tr>'


def _cell(cell: str, kind: str) -> str:
    special = {"failed": "bad", "-": "none"}.get(cell, "")
    return f'<td class="{f"{kind} {special}".strip()}">{cell}</td>'


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
    blocks: dict[str, dict[str, list[str]]] = {}
    for outcome in outcomes:
        if outcome.summary:
            name = outcome.spec.method.name
            blocks.setdefault(outcome.model, {}).setdefault(name, _ran(name, outcome.summary))
    if not blocks:
        return "<p>No run finished.</p>"
    lines = [(model, list(methods.values())) for model, methods in blocks.items()]
    return grid("How each method ran", RAN, lines, ("method", "codecs")) + (
        '<p class="small">Of the first seed. partition: the first layer of each stage but the first. '
        "codecs: of activations | of gradients. By stage, first to last: in flight, the most microbatches "
        "held; versions, the most weight versions; staleness, the updates that gradients were late by, in "
        "the mean and at most; computing, the share of training in which it "
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

    codecs = summary.get("codec_forward"), summary.get("codec_backward")
    window = "an epoch" if summary.get("window", 0) is None else one("window")
    return [
        method,
        *map(one, ("partition", "microbatches")),
        window,
        one("updates"),
        " | ".join(str(codec) for codec in codecs) if any(codecs) else "-",
        each("peak_in_flight", "{}"),
        each("peak_versions", "{}"),
        each("mean_staleness", "{:.2f}"),
        each("max_staleness", "{}"),
        each("busy_fraction", "{:.0%}"),
        " | ".join(f"{stage['params'] / 1e6:.2f}M" for stage in stages if "params" in stage) or "-",
    ]


def every_run(asked: Request, outcomes: Sequence[Outcome], runs: Runs) -> str:
    """Return a line for each run that was asked for, with links to what it left beside the report."""
    made = {outcome.spec: outcome for outcome in outcomes}
    words = ("run", "state", "started", "records")
    head = "".join(f'<th scope="col" class="{"text" * (name in words)}">{name}</th>' for name in RUN)
    body = "".join(_run_line(spec, made.get(spec)) for spec in asked.specs)
    commands = "\n\n".join(shlex.join(_command(spec, asked)) for spec in asked.specs)
    return (
        scrolled("Every run", f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        + "<details><summary>The command of each run</summary>"
        f'<pre tabindex="0">{escape(commands)}</pre></details>'
    )


def _command(spec: Spec, asked: Request) -> list[str]:
    return ["python", *torchrun(spec, asked.out / "runs" / spec.name)[1:]]


def _run_line(spec: Spec, outcome: Outcome | None) -> str:
    summary = outcome.summary if outcome else None
    state = "not made yet" if outcome is None else "failed" if summary is None else "done"
    links = "-"
    if outcome:
        links = f'<a href="runs/{quote(spec.name)}.log">output</a>'
        links += f' <a href="runs/{quote(spec.name)}/">folder</a>' if summary else ""
    last, best, seconds = ((summary or {}).get(key) for key in ("val_acc", "best_val_acc", "epoch_s"))
    cells = [
        _cell(state, "text"),
        *(_cell(dash(None if v is None else 100 * v, "{:.2f}"), "") for v in (last, best)),
        _cell(dash(seconds, "{:.2f}"), ""),
        _cell(dash(outcome.wall_s if outcome else None, duration), ""),
        _cell(escape(outcome.made.get("date", "-")) if outcome else "-", "text"),
        _cell(links, "text"),
    ]
    return f'<tr><th scope="row">{escape(spec.title)}</th>{"".join(cells)}</tr>'


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
    return f'<div class="pair words">{left}{right}</div>'


def _list(items: Sequence[tuple[str, str]], tag: str) -> str:
    lines = (f"<dt>{escape(key)}</dt><dd><{tag}>{escape(value)}</{tag}></dd>" for key, value in items)
    return f"<dl>{''.join(lines)}</dl>"


def reproduce(asked: Request, outcomes: Sequence[Outcome], typed: str) -> str:
    """Return the command that made this, and that makes it again."""
    revisions = dict.fromkeys(filter(None, (outcome.made.get("pipetrain", "") for outcome in outcomes)))
    at = f" at revision {', '.join(map(escape, revisions))}" if revisions else ""
    logs = shlex.quote(str(asked.out / "runs"))
    return (
        f"<p>In a checkout of pipetrain{at}:</p>"
        f'<pre class="wrap">{escape(f"python scripts/compare.py {typed}")}</pre>'
        "<p>It keeps the runs that are done; with <code>--fresh</code> as its first word it makes them all "
        "again. The curves of all runs, epoch by epoch:</p>"
        f'<pre class="wrap">{escape(f"tensorboard --logdir {logs}")}</pre>'
    )
