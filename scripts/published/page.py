"""The pages: what was published, and what was found here.

`records.md` is to be read: for each record what it was, what ran, a verdict with a line for each thing that
must come back, and the numbers as tables by place. `report.html` has every line, with spreads and bounds.
"""

from __future__ import annotations

import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from comparison.table import Table, markdown_table
from published.charts import draw
from published.made import how_made
from published.record import NOT, Check, Findings, How, Place, Record, Series

PAGE, REPORT = "records.md", "report.html"
WORDS = ("record", "what", "from", "what must come back", "published", "here", "came back")
FEW, WIDE = 2, 5  # cases that stand in a line; columns, beyond which named places are rows
BY_CASE = "in brackets"
KINDS = How.RUN, How.PLANNED, How.ARITHMETIC  # of checks, which are counted apart


@dataclass(frozen=True, slots=True)
class Section:
    """A record as it is shown. `made`: by what command and when; `picture`: its file; `notes`: sentences."""

    name: str
    record: Record
    findings: Findings
    made: str
    picture: str
    notes: Sequence[str]

    def came_back(self, how: How) -> str:
        """Return how many of its checks of a kind came back."""
        return counted([check for check in self.findings.checks if check.how is how])

    @property
    def verdict(self) -> Table:
        """What must come back, and whether it did."""
        return verdict(self.findings.checks)

    @property
    def short_verdict(self) -> Table:
        """A line for each thing that must come back, unless the record has tables of its own."""
        return verdict(self.findings.checks, short=not self.findings.tables)

    @property
    def tables(self) -> Sequence[Table]:
        """Its own tables, or every number; and the published rows."""
        own = self.findings.tables or [figures(self.findings.series)]
        return [*own, *self.findings.rows]

    @property
    def short_tables(self) -> Sequence[Table]:
        """Its own tables, or its series by place; and the published rows."""
        own = self.findings.tables or by_place(self.findings.series)
        return [*own, *self.findings.rows]

    @property
    def failed(self) -> list[str]:
        """What did not come back, as sentences."""
        return [
            f"{self.name}: {check.what}: must be {check.must}, here {check.here}"
            for check in self.findings.checks
            if check.came_back is False
        ]


def verdict(checks: Sequence[Check], short: bool = False) -> Table:
    """Return a line for each check; `short`: for all cases of what must come back."""
    by_what: dict[tuple[str, How], dict[str, Check]] = {}
    for check in checks:
        case, _, what = check.what.rpartition(": ") if short else ("", "", check.what)
        by_what.setdefault((what, check.how), {})[case] = check
    head = ["what must come back", "published", "must be", "here", "from", "came back"]
    lines = [verdict_line(what, cases) for (what, _), cases in by_what.items()]
    missed = {line[-1] for line, cases in zip(lines, by_what.values(), strict=True) if not all_came(cases)}
    return Table("Verdict", head, lines, (), (*WORDS, "must be"), missed)


def verdict_line(what: str, cases: Mapping[str, Check]) -> list[str]:
    """Return a line of the verdict: what, as published, as it must be, here, from where, and whether it came.

    Of many cases it shows those that failed, or are not told.
    """
    checks = [*cases.values()]
    how = checks[0].how.value
    if len(checks) == 1:
        (check,) = checks
        return [check.what, check.published, check.must, check.here, how, check.came]
    published, must = {check.published for check in checks}, {check.must for check in checks}
    here, says = {check.here for check in checks}, list[str]()
    cells = [published.pop() if len(published) == 1 else BY_CASE, must.pop() if len(must) == 1 else BY_CASE]
    if len(here) == 1 and BY_CASE not in cells:
        return [what, *cells, *here, how, came_back(checks)]
    for case, check in cases.items():
        short = check.came_back is False or check.untold
        own = [one for cell, one in zip(cells, (check.published, check.must), strict=True) if cell == BY_CASE]
        if len(cases) <= FEW or short:
            brackets = f" ({', '.join(own)})" * bool(own)
            says.append(f"{case}: {check.here}{brackets}" + f", {check.came}" * short)
    if len(says) < len(cases):
        says.append("all others" if says else "all")
    return [what, *cells, "; ".join(says), how, came_back(checks)]


def all_came(cases: Mapping[str, Check]) -> bool:
    """Return whether none is known not to have come back."""
    return all(check.came_back is not False for check in cases.values())


def came_back(checks: Sequence[Check]) -> str:
    """Return how many of the checks came back, of those of which that is known."""
    known = Counter(check.came for check in checks)
    others = (f", {known[word]} {word}" for word in ("not told", "not tried") if known[word])
    return f"{known['yes']} of {known['yes'] + known['no']}" + "".join(others)


def counted(checks: Sequence[Check]) -> str:
    """Return how many of the checks came back, and in brackets of those that hold something published."""
    of_record = [check for check in checks if not check.published.startswith(NOT)]
    return f"{came_back(checks)} ({came_back(of_record) if of_record else NOT})" if checks else NOT


def section(
    name: str, record: Record, results: Mapping[str, Mapping[str, Any]], folder: Path, command: str
) -> Section:
    """Say what the results of a record's steps are, and draw them."""
    findings = Findings.of(record.show({key: step["result"] for key, step in results.items()}))
    picture = f"{name}.png"
    draw(findings.charts, folder / picture)
    for file in findings.files:
        (folder / file.name).write_text(file.text)
    made, machine = how_made(results, command)
    return Section(name, record, findings, made, picture, [*record.notes, machine])


def number(value: float) -> str:
    """Write a number to four places, or as it is where it is whole."""
    if value % 1 == 0 or abs(value) >= 10000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def figures(every: Sequence[Series]) -> Table:
    """Return a line for each number."""
    lines = []
    for series in every:
        for place, here in series.here.items():
            spread = " - ".join(map(number, series.spread[place])) if place in series.spread else "-"
            known = series.how is How.PUBLISHED
            numbers = (
                here if known else series.published.get(place),
                None if known else here,
                series.bound.get(place),
            )
            theirs, ours, bound = (
                "-" if n is None else f"{number(n)} {series.unit}".strip() for n in numbers
            )
            at = place if isinstance(place, str) else f"{series.at} = {place:g}"
            what = f"{', '.join(filter(None, [series.of, at]))}: {series.name}"
            lines.append([what, theirs, ours, series.how.value, spread, bound])
    head = ["what", "published", "here", "from", "least - most", "bound"]
    full = [n for n in range(len(head)) if n < 4 or any(line[n] != "-" for line in lines)]
    return Table("Figures", [head[n] for n in full], [[of[n] for n in full] for of in lines], (), WORDS[1:3])


def by_place(every: Sequence[Series]) -> list[Table]:
    """Return tables of series whose places are among another's, but for single numbers.

    In brackets: as published.
    """
    groups: list[list[Series]] = []
    for series in every:
        for group in groups:
            if series.at == group[0].at and (_within(series, group[0]) or _within(group[0], series)):
                group.append(series)
                break
        else:
            groups.append([series])
    return [_table(group) for group in groups if sum(len(series.here) for series in group) > 1]


def _within(one: Series, other: Series) -> bool:
    return {*one.here} <= {*other.here}


def _table(group: Sequence[Series]) -> Table:
    at, hows = group[0].at, {series.how.value for series in group}
    alike = hows.pop() if len(hows) == 1 else ""
    head = ", ".join(filter(None, [alike, f"by {at}" * bool(at)]))
    places = list(dict.fromkeys(place for series in group for place in series.here))
    names = [place if isinstance(place, str) else f"{place:g}" for place in places]
    labels = [_label(series) + f", {series.how.value}" * (not alike) for series in group]
    cells = [[_cell(series, place) for place in places] for series in group]
    lines = [[label, *row] for label, row in zip(labels, cells, strict=True)]
    table = [[head, *names], *lines]
    if not at and len(places) > WIDE:
        table = [[*column] for column in zip(*table, strict=True)]
    return Table("", table[0], table[1:], (), (head,))


def _label(series: Series) -> str:
    words = ": ".join(filter(None, [series.of, series.name]))
    return f"{words}, {series.unit}" if series.unit else words


def _cell(series: Series, place: Place) -> str:
    if place not in series.here:
        return "-"
    here = number(series.here[place])
    return f"{here} ({number(series.published[place])})" if place in series.published else here


def unpadded(table: Table) -> str:
    """Return a table of long cells as Markdown; what is bad is bold."""
    lines = [[f"**{cell}**" if cell in table.bad else cell for cell in line] for line in table.lines]
    return "\n".join(f"| {' | '.join(of)} |" for of in (table.head, ["---"] * len(table.head), *lines))


def overview(sections: Sequence[Section]) -> Table:
    """Return a line for each record."""
    lines = [[s.name, s.record.title, *map(s.came_back, KINDS)] for s in sections]
    checks = [check for s in sections for check in s.findings.checks]
    of_all = (counted([check for check in checks if check.how is how]) for how in KINDS)
    lines += [["all", "", *of_all]] if len(sections) > 1 else []
    return Table("Came back", ["record", "what", *(how.value for how in KINDS)], lines, (), WORDS)


def rows_of(sections: Sequence[Section]) -> Table:
    """Return which rows each record has, and which of them were run or planned."""
    lines = [[s.name, *row] for s in sections for row in s.record.rows]
    head = ["record", "published", "here", "why not more"]
    return Table("Each published row, and where ours stands", head, lines, (), head)


def write(
    sections: Sequence[Section], missing: Mapping[str, str], page: Path, folder: Path, quick: bool = False
) -> None:
    """Write `page` (Markdown) and the report into `folder`.

    `missing`: the other records, and why; `quick`: whether these are tiny versions.
    """
    page.write_text(markdown(sections, missing, os.path.relpath(folder, page.parent)))
    loader = FileSystemLoader([Path(__file__).parent, Path(__file__).parents[1] / "comparison"])
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["plain"] = plain
    pictures = {s.name: b64encode((folder / s.picture).read_bytes()).decode() for s in sections}
    alone = len(sections) == 1 and not missing
    text = environment.get_template("page.html").render(
        title=sections[0].record.title if alone else "Published records, made again",
        sections=sections,
        overview=None if alone else overview(sections),
        rows=rows_of(sections),
        names=[s.name for s in sections],
        missing=missing,
        pictures=pictures,
        quick=quick,
    )
    (folder / REPORT).write_text(text)


def plain(markdown: str) -> str:
    """Return a sentence of Markdown without its marks of links and code."""
    return re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", markdown).replace("`", "")


def markdown(sections: Sequence[Section], missing: Mapping[str, str], folder: str) -> str:
    """Return the whole page. `folder`: of pictures and report, from the page's; shared notes come first."""
    all_of_them, notes = overview(sections), [note for one in sections for note in one.notes]
    shared = [note for note in dict.fromkeys(notes) if notes.count(note) > 1]
    parts = [
        "# Published records, made again",
        "Records of systems that pipetrain does the work of, beside what was found here. `run here`: "
        "measured; `planned here`: predicted by the plan alone; in brackets: as published; `not told`: "
        "the interval of what was measured holds the limit. Absolute "
        "numbers are of other machines: what must come back is the shape. A line of a verdict may have "
        "several cases, of many those that failed. What was run, what is only planned, and what is "
        "arithmetic, such as a count of parameters, is counted apart; in the brackets are those lines that "
        "hold something published, the others are checks of our own. Every line, with spreads and bounds: "
        f"[{REPORT}]({Path(folder, REPORT).as_posix()}).",
        *shared,
        markdown_table([all_of_them.head, *all_of_them.lines], WORDS).rstrip(),
        *(f"Not made: {name}: {why}" for name, why in missing.items()),
    ]
    if (rows := rows_of(sections)).lines:
        parts += [f"## {rows.name}", unpadded(rows)]
    for one in sections:
        parts += [
            f"## {one.name}",
            f"**{one.record.title}.** {one.record.source}",
            *([f"Wrong in the record: {one.record.wrong}"] if one.record.wrong else []),
            *one.findings.text,
            *(note for note in one.notes if note not in shared),
            unpadded(one.short_verdict),
            f"![{one.name}]({Path(folder, one.picture).as_posix()})",
            *(
                f"### {table.name}\n\n{table.markdown}".removeprefix("### \n\n").rstrip()
                for table in one.short_tables
            ),
            one.made,
        ]
    return "\n\n".join(parts) + "\n"
