"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmark import advice, factory, held, lengths, models, replicas, report, schedules
from benchmark.report import Row
from benchmark.tasks import Scale
from benchmark.worlds import Say, WorldFailed
from comparison.processes import interruptible

SUITES: dict[str, list[Callable[[Scale, Say], Iterator[Row]]]] = {
    "schedules": [schedules.suite],
    "jitter": [schedules.jitter_suite],
    "replicas": [replicas.suite],
    "advice": [advice.suite],
    **{model: [partial(models.suite, model)] for model in models.TASKS},
    "lengths": [lengths.suite],
    "held": [held.suite],
    "factory": [factory.suite],
    "gpu": list(models.gpu_parts()),
}
"""Parts that each goes on where another fails."""
FAILED, INTERRUPTED = 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the suites that are asked for, print the report, and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # every rank's threads, whatever library starts them
    scale = Scale(1 if options.quick else options.rounds, options.quick)
    head = report.machine(arguments)
    if "gpu" in options.suites and torch.cuda.is_available():
        head |= report.gpu()
    rows: list[Row] = []
    notes: list[str] = []
    status = 0
    try:
        with interruptible():
            for name in options.suites or [name for name in SUITES if name != "gpu"]:
                for part in SUITES[name]:
                    try:
                        for row in part(scale, report.progress):
                            rows.append(row)  # one by one: what was measured stays where it then ends
                            status = FAILED if row.failure else status
                    except WorldFailed as error:
                        print(f"\nbench: suite {name}: {error}", file=sys.stderr)
                        notes.append(f"Suite {name} FAILED: {error.reason}")
                        status = FAILED
    except KeyboardInterrupt:
        notes.append(f"INTERRUPTED in suite {name}: what follows it is missing.")
        status = INTERRUPTED
    text = report.markdown(head, rows, notes)
    print(file=sys.stderr)
    print(text, end="")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
    return status


def parser() -> argparse.ArgumentParser:
    """Make the parser."""
    command = argparse.ArgumentParser(
        prog="bench.py",
        description="Measure pipetrain beside torch.distributed.pipelining, DDP and plain loops, in turns.",
        allow_abbrev=False,
    )
    known = f"{', '.join(SUITES)} (default: all but gpu)"
    command.add_argument("suites", nargs="*", metavar="SUITE", type=_suite, help=known)
    command.add_argument("--rounds", type=int, default=5, metavar="N", help="that are counted (default: 5)")
    command.add_argument(
        "--quick", action="store_true", help="one small round: to see that it works, no more"
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="write the report there too")
    return command


def _suite(name: str) -> str:
    if name not in SUITES:
        raise argparse.ArgumentTypeError(f"there is no {name}; choose from {', '.join(SUITES)}")
    return name
