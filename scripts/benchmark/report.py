"""What was found, as Markdown: what it was measured on, one table, and what its words mean."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median

import torch

from benchmark.figures import DIGITS, Row

MEANING = """\
`median`: of the rounds; a batch's time where it is ms. A column of ratios says how many times as fast as
something else: the median of the ratios within each round. `of bound`: sleep, the schedule's time on paper;
jitter, the stage that sleeps longest; vgg16 and resnet18, the no-communication ideal (each stage alone on
local tensors, at the same time, with the same microbatches and layout); one process, a plain PyTorch loop.
Once full: between the last stage's updates, without the filling and the draining of the window. Wire: an
epoch of CIFAR-10 (782 batches) at the time of the batches that were measured; MiB on the wire and
milliseconds of codecs are of a batch, on all ranks."""


def machine(arguments: Sequence[str], script: str = "scripts/bench.py") -> dict[str, str]:
    """Say what runs this, and what was asked. To be called at the start, for the load's sake."""
    load = os.getloadavg()[0]
    return {
        "date": f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        "command": " ".join([f"python {script}", *arguments]),
        "machine": f"{_cpu()}, {os.cpu_count()} cores, {_memory_gib():.0f} GiB, load {load:.2f} at the start",
        "software": f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()} "
        f"{platform.release()}, pipetrain {_revision()}",
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def _revision() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return "of an unknown revision"
    return found.stdout.strip()


def markdown(head: Mapping[str, str], rows: Sequence[Row], notes: Sequence[str]) -> str:
    """Put the whole report together."""
    verdicts = [verdict for row in rows for verdict in row.verdicts]
    met = sum(verdict.met for verdict in verdicts)
    parts = [
        "# Benchmark",
        "\n".join(f"- {key}: {value}" for key, value in head.items()),
        table(rows),
        f"{met} of {len(verdicts)} targets met.",
        MEANING,
        *notes,
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, its columns aligned for a terminal too."""
    columns = list(dict.fromkeys(column for row in rows for column in row.ratios))
    head = ["benchmark", "contestant", "median", "least - most", *columns, "target", "met"]
    numbers = [2 <= index < 4 + len(columns) for index in range(len(head))]
    return aligned([head, *(_cells(row, columns) for row in rows)], numbers)


def aligned(cells: Sequence[Sequence[str]], numbers: Sequence[bool]) -> str:
    """Return lines of cells, the head first, as a Markdown table. `numbers`: which columns are those."""
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        " | ".join(
            c.rjust(w) if number else c.ljust(w) for c, w, number in zip(line, widths, numbers, strict=True)
        )
        for line in cells
    ]
    rule = " | ".join(
        "-" * (w - 1) + ":" if number else "-" * w for w, number in zip(widths, numbers, strict=True)
    )
    return "\n".join(f"| {line} |" for line in [lines[0], rule, *lines[1:]])


def _cells(row: Row, columns: Sequence[str]) -> list[str]:
    spread = f"{figure(min(row.values))} - {figure(max(row.values))}" if len(row.values) > 1 else ""
    return [
        row.benchmark,
        row.contestant,
        f"{figure(median(row.values))} {row.unit}".strip(),
        spread,
        *(f"{row.ratios[c]:.{DIGITS}f}" if c in row.ratios else "" for c in columns),
        ", ".join(verdict.target for verdict in row.verdicts),
        ", ".join("yes" if verdict.met else "**no**" for verdict in row.verdicts),
    ]


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
