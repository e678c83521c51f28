"""The command line of the comparison: it makes the runs that are asked for, and says what it does meanwhile.

What there is to show is written at the end, and also when it is interrupted: of what is done until then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress

from comparison import plots, record, report, request, table
from comparison.metric import ACCURACY, Metric, metric_of
from comparison.processes import Workers, interruptible
from comparison.request import Request
from comparison.runs import Outcome, Runs
from comparison.table import duration
from pipetrain.errors import ConfigError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None, workers: Workers | None = None) -> int:
    """Compare, and return the exit status. `workers` make the runs; the tests give others."""
    workers = workers or Workers()
    try:
        asked = request.read(sys.argv[1:] if arguments is None else arguments)
        with interruptible():
            try:
                return compare(asked, workers)
            finally:
                workers.end()
    except ConfigError as error:
        print(f"compare: {error}", file=sys.stderr)
        return REFUSED


def compare(asked: Request, workers: Workers) -> int:
    """Make the runs that are not done, and write tables, plots and report of all. Return the exit status."""
    runs, specs, out = Runs(asked.out, workers), asked.specs, asked.out
    with runs.claimed() as lock:
        runs.check(specs, asked.fresh)
        if asked.fresh:
            for name in files(runs.metric(specs)):
                (out / name).unlink(missing_ok=True)
            for spec in specs:
                runs.forget(spec)
        outcomes: list[Outcome] = []
        try:
            for number, spec in enumerate(specs, 1):
                print(f"[{number}/{len(specs)}] {spec.title} ... ", end="", flush=True)
                outcomes.append(runs.kept(spec) or runs.start(spec, lock))
                say(outcomes[-1], runs)
            text = write(asked, outcomes, runs)
        except KeyboardInterrupt:
            done = sum(outcome.summary is not None for outcome in outcomes)
            workers.end()
            kept = f"{done} of {len(specs)} runs are kept in {out}; the same command goes on there"
            print(f"interrupted\n{kept}", flush=True)
            if done:
                with suppress(KeyboardInterrupt):
                    write(asked, outcomes, runs)
            return INTERRUPTED
    metric = metric_of([outcome.summary for outcome in outcomes if outcome.summary])
    written = [name for name in files(metric) if (out / name).exists()]
    print(f"\n{text}\nwritten to {out}: {', '.join(written)}")
    failed = [outcome.spec.title for outcome in outcomes if outcome.summary is None]
    if failed:
        count = f"{len(failed)} of {len(specs)} runs failed"
        print(f"{count}: {', '.join(failed)}; start again to try them again")
    return FAILED if failed else 0


def files(metric: Metric) -> list[str]:
    """Return the names of what is written."""
    return [*table.FILES, *plots.files(metric), report.FILE]


def write(asked: Request, outcomes: Sequence[Outcome], runs: Runs) -> str:
    """Write everything that there is to show, and return the tables as Markdown."""
    rows = table.make_rows(outcomes)
    text = table.write(asked.out, rows, record.markdown(rows, asked.record) if asked.record else None)
    pictures = plots.write(asked.out, asked.methods, rows)
    report.write(asked, outcomes, runs, rows, pictures)
    return text


def say(outcome: Outcome, runs: Runs) -> None:
    """End the run's line; where it failed, with its own last words and where there are more."""
    if outcome.summary is not None:
        kept = ", kept from before" if outcome.kept else ""
        metric = metric_of([outcome.summary])
        value = metric.value(outcome.summary, "val")
        name = "" if metric == ACCURACY else f"{metric.name} "
        text = f"{value:.1f} %" if metric.percent else metric.text(value)
        print(f"{name}{text} in {duration(outcome.wall_s)}{kept}")
        return
    print(f"FAILED ({outcome.failure}) after {duration(outcome.wall_s)}")
    for line in runs.last_words(outcome.spec):
        print(f"    {line}")
    print(f"    its output: {runs.log(outcome.spec)}", flush=True)
