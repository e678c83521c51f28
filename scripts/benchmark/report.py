"""From what was measured to Markdown: rows of one table, and a head that says what it was measured on."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from benchmark.worlds import WorldFailed
from comparison.runs import describe_machine
from comparison.table import markdown_table

Series = Mapping[str, Sequence[float]]
"""By contestant: what each round gave, in the order of the rounds."""

DIGITS = 3
"""Ratios are printed, and held against their targets, to so many decimals."""

MEANING = """\
`median`: of the rounds; a batch's time where it is ms. A column `x ...` or `of ...` says how many times as
fast as something else: the median of the ratios within each round. The suites: docs/results/README.md."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table. `values`: one a round, in `unit`; `ratios`: by column; `targets`: whether met.

    `failure`: why there are no values.
    """

    benchmark: str
    contestant: str
    values: Sequence[float]
    unit: str
    ratios: Mapping[str, float] = field(default_factory=dict)
    targets: Mapping[str, bool] = field(default_factory=dict)
    failure: str = ""


def failed_row(benchmark: str, name: str, error: WorldFailed) -> Row:
    """Make the row of a contestant that failed, and print all that is known of it."""
    print(f"\nbench: {benchmark}, {name}: {error}", file=sys.stderr)
    return Row(benchmark, name, [], "", failure=error.reason)


def ratio(reference: Sequence[float], own: Sequence[float]) -> float:
    """Say how many times as fast as its reference a contestant is: the median over the rounds' ratios."""
    return median(r / o for r, o in zip(reference, own, strict=True))


def timed_row(
    benchmark: str, name: str, own: Sequence[float], against: Series, least: Mapping[str, float]
) -> Row:
    """Make the row of a contestant from its seconds, and those that each column of ratios compares with.

    `least`: what the ratios should be, where there is something to compare with.
    """
    ratios = {column: ratio(reference, own) for column, reference in against.items()}
    aims = {column: aim for column, aim in least.items() if column in ratios}
    targets = {f"{column} >= {aim:.2f}": round(ratios[column], DIGITS) >= aim for column, aim in aims.items()}
    return Row(benchmark, name, [1000 * s for s in own], "ms", ratios, targets)


def machine(arguments: Sequence[str], script: str = "scripts/bench.py") -> dict[str, str]:
    """Say what runs this, and what was asked. To be called at the start, for the load's sake."""
    about = describe_machine()
    return {
        "date": about["date"],
        "command": " ".join([f"python {script}", *arguments]),
        "machine": f"{about['machine']}, load {os.getloadavg()[0]:.2f} at the start",
        "software": f"Python {about['python']}, torch {about['torch']}, {about['system']}, "
        f"pipetrain {about['pipetrain']}",
    }


def gpu() -> dict[str, str]:
    """Say which GPU is used, and by which libraries."""
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    gib = torch.cuda.get_device_properties(0).total_memory / 2**30
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "GPU": f"{name}, {gib:.0f} GiB, compute capability {capability[0]}.{capability[1]}",
        "libraries": f"CUDA {torch.version.cuda}, cuDNN {cudnn}, NCCL {nccl}",
    }


def markdown(head: Mapping[str, str], rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Put the whole report together."""
    met = [met for row in rows for met in row.targets.values()]
    tables: dict[str, list[Row]] = {}  # by suite, as each has columns of its own
    for row in rows:
        tables.setdefault(row.benchmark.partition(",")[0], []).append(row)
    parts = [
        "# Benchmark",
        "\n".join(f"- {key}: {value}" for key, value in head.items()),
        *(table(of_suite).rstrip() for of_suite in tables.values()),
        f"{sum(met)} of {len(met)} targets met.",
        MEANING,
        *notes,
    ]
    return "\n\n".join(parts) + "\n"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, its columns aligned for a terminal too."""
    columns = list(dict.fromkeys(column for row in rows for column in row.ratios))
    head = ["benchmark", "contestant", "median", "least - most", *columns, "target", "met"]
    cells = [
        [
            row.benchmark,
            row.contestant,
            "FAILED" if row.failure else f"{figure(median(row.values))} {row.unit}".strip(),
            f"{figure(min(row.values))} - {figure(max(row.values))}" if len(row.values) > 1 else "",
            *(f"{row.ratios[c]:.{DIGITS}f}" if c in row.ratios else "" for c in columns),
            row.failure.replace("|", "\\|") or ", ".join(row.targets),
            ", ".join("yes" if met else "**no**" for met in row.targets.values()),
        ]
        for row in rows
    ]
    return markdown_table([head, *cells], ("benchmark", "contestant", "target", "met"))


def figure(value: float) -> str:
    """Write a number to four places, or as it is where it is whole."""
    if value == int(value):
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def progress(text: str) -> None:
    """Tell whoever waits how far it is: one line that changes in a terminal, a line each elsewhere."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}"[: os.get_terminal_size(sys.stderr.fileno()).columns], end="", file=sys.stderr)
    else:
        print(text, file=sys.stderr)
    sys.stderr.flush()
