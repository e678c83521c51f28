"""The pages: every record beside what was found here, as Markdown to read in a checkout and as one HTML file.

First a table of all records, then for each its verdict, its charts and its figures, with the command, the
machine and the date. What was run and what the plan predicts are told apart in each line.
"""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from comparison.table import Table, markdown_table
from published.charts import draw
from published.record import Check, Figure, Findings, How, Record
from published.running import Kept

PAGE, REPORT = "records.md", "report.html"
WORDS = ("record", "what", "from", "what must come back", "published", "here", "came back")
CAME = {True: "yes", False: "**no**", None: "not tried"}


@dataclass(frozen=True, slots=True)
class Section:
    """A record as it is shown."""

    name: str
    record: Record
    findings: Findings
    made: Sequence[str]  # sentences: command, machines, dates
    picture: str  # its file

    @property
    def came_back(self) -> str:
        """How many of its checks came back."""
        tried = [check for check in self.findings.checks if check.came_back is not None]
        left = len(self.findings.checks) - len(tried)
        count = f"{sum(bool(check.came_back) for check in tried)} of {len(tried)}"
        return count + f", {left} not tried" * bool(left)

    @property
    def verdict(self) -> Table:
        """What must come back, and whether it did."""
        head = ["what must come back", self.record.beside, "here", "came back"]
        return Table(
            "Verdict",
            head,
            [_check(check) for check in self.findings.checks],
            (),
            (*WORDS, self.record.beside),
        )

    @property
    def tables(self) -> list[Table]:
        """Its own tables, or every figure; the last one has the notes."""
        *others, last = self.findings.tables or [self._figures]
        return [*others, replace(last, notes=self.findings.notes)]

    @property
    def _figures(self) -> Table:
        head = ["what", "published", "here", "from", "least - most", "bound"]
        lines = [_figure(figure) for figure in self.findings.figures]
        full = [n for n in range(len(head)) if n < 4 or any(line[n] != "-" for line in lines)]
        kept = [[line[n] for n in full] for line in lines]
        return Table("Figures", [head[n] for n in full], kept, (), ("what", "from"))


def section(name: str, record: Record, kept: Kept, folder: Path, command: str) -> Section:
    """Say what the results of a record's steps are, and draw them."""
    findings = record.show({key: step["result"] for key, step in kept.items()})
    picture = f"{name}.png"
    draw(findings.charts, folder / picture)
    for file, text in findings.files.items():
        (folder / file).write_text(text)
    return Section(name, record, findings, _made(kept, command), picture)


def _made(kept: Kept, command: str) -> list[str]:
    """Say by what command, on what and when."""
    machines = [step["machine"] for step in kept.values()]
    dates = sorted(machine["date"] for machine in machines)
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    kinds = {f"{m['machine']}, torch {m['torch']}, Python {m['python']}": None for m in machines}
    revisions = {machine["pipetrain"]: None for machine in machines}
    loads = [float(machine["load"]) for machine in machines]
    total = sum(step["wall_s"] for step in kept.values())
    return [
        f"`{command}`",
        f"{'; '.join(kinds)}; load {min(loads):.1f} to {max(loads):.1f} before a step",
        f"{when}; {total:.0f} s; pipetrain {', '.join(revisions)}",
    ]


def _check(check: Check) -> list[str]:
    return [check.what, check.published, check.here, CAME[check.came_back]]


def _figure(figure: Figure) -> list[str]:
    numbers = (figure.published, figure.here, figure.bound)
    published, here, bound = ("-" if n is None else f"{number(n)} {figure.unit}".strip() for n in numbers)
    spread = " - ".join(map(number, figure.spread)) if figure.spread else "-"
    return [figure.what, published, here, "-" if figure.here is None else figure.how.value, spread, bound]


def number(value: float) -> str:
    """Write a number to four places, or as it is where it is whole."""
    if value == int(value) or abs(value) >= 10000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def overview(sections: Sequence[Section]) -> Table:
    """Return a line for each record."""
    lines = [[s.name, s.record.title, s.came_back] for s in sections]
    return Table("Records", ["record", "what", "came back"], lines, (), WORDS)


def write(sections: Sequence[Section], missing: Mapping[str, str], page: Path, folder: Path) -> None:
    """Write `page` (Markdown) and the report into `folder`. `missing`: the other records, and why."""
    page.write_text(markdown(sections, missing, os.path.relpath(folder, page.parent)))
    loader = FileSystemLoader([Path(__file__).parent, Path(__file__).parents[1] / "comparison"])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pictures = {s.name: b64encode((folder / s.picture).read_bytes()).decode() for s in sections}
    alone = len(sections) == 1 and not missing
    text = environment.get_template("page.html").render(
        title=sections[0].record.title if alone else "Published records, made again",
        sections=sections,
        overview=None if alone else overview(sections),
        missing=missing,
        pictures=pictures,
        how=How,
    )
    (folder / REPORT).write_text(text)


def markdown(sections: Sequence[Section], missing: Mapping[str, str], pictures: str) -> str:
    """Return the whole page. `pictures`: the folder of the pictures, from the page's."""
    all_of_them = overview(sections)
    parts = [
        "# Published records, made again",
        "Each record of a system that pipetrain does the work of, beside what was found here. `run here`: "
        "measured; `planned here`: predicted by the plan, and by nothing else. Absolute numbers are of other "
        "machines: what must come back is the shape, and every line of a verdict can fail.",
        markdown_table([all_of_them.head, *all_of_them.lines], WORDS).rstrip(),
        *(f"Not made: {name}: {why}" for name, why in missing.items()),
    ]
    for one in sections:
        parts += [
            f"## {one.name}",
            f"{one.record.title}. {one.record.source}",
            *([f"Wrong in the record: {one.record.wrong}"] if one.record.wrong else []),
            *one.findings.text,
            one.verdict.markdown.rstrip(),
            f"![{one.record.title}]({Path(pictures, one.picture).as_posix()})",
            *(f"### {table.name}\n\n{table.markdown.rstrip()}" for table in one.tables),
            "\n".join(f"- {sentence}" for sentence in one.made),
        ]
    return "\n\n".join(parts) + "\n"


def failed(sections: Sequence[Section]) -> list[str]:
    """Return what did not come back, as sentences."""
    return [
        f"{s.name}: {check.what}: {s.record.beside} {check.published}, here {check.here}"
        for s in sections
        for check in s.findings.checks
        if check.came_back is False
    ]
