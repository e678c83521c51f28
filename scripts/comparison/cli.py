"""The command line of the comparison: it makes the runs that are asked for, and says what it does meanwhile.

What there is to show is written at the end, and also when it is interrupted: of what is done until then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from comparison import plots, report, request, table
from comparison.figures import ACCURACY, duration, metric_of
from comparison.processes import PIPETRAIN, interruptible
from comparison.request import Request
from comparison.runs import Outcome, Runs, claim
from pipetrain.errors import ConfigError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None, command: Sequence[str] = PIPETRAIN) -> int:
    """Compare, and return the exit status. `command`: what starts a run; the tests give another."""
    try:
        asked = request.read(sys.argv[1:] if arguments is None else arguments)
        with interruptible():
            return compare(asked, Runs(asked.out, command))
    except ConfigError as error:
        print(f"compare: {error}", file=sys.stderr)
        return REFUSED


def compare(asked: Request, runs: Runs) -> int:
    """Make the runs that are not done, and write tables, plots and report of all. Return the exit status."""
    specs, out, status = asked.specs, asked.out, 0
    outcomes: list[Outcome] = []
    with claim(runs.folder) as lock:
        runs.check(specs, asked.fresh)
        for spec in specs if asked.fresh else ():
            runs.forget(spec)
        try:
            for number, spec in enumerate(specs, 1):
                print(f"[{number}/{len(specs)}] {spec.title} ... ", end="", flush=True)
                outcomes.append(runs.kept(spec) or runs.start(spec, lock))
                say(outcomes[-1], runs)
                _refuse_other_metric(outcomes)
        except KeyboardInterrupt:
            done = sum(outcome.summary is not None for outcome in outcomes)
            kept = f"{done} of {len(specs)} runs are kept in {out}; the same command goes on there"
            print(f"interrupted\n{kept}", flush=True)
            status = INTERRUPTED
        rows = table.make_rows(outcomes)
        results = table.tables(rows, asked.target) if rows else []
        text = table.write(out, results, rows, asked.latex) if rows else ""
        pictures = plots.write(out, asked.methods, rows)
        report.write(asked, outcomes, runs, rows, results, pictures)
    if status == INTERRUPTED:
        return status
    files = [*table.FILES, *[table.LATEX] * asked.latex, *pictures, report.FILE]
    print(f"\n{text}\nwritten to {out}: {', '.join(files)}")
    failed = [outcome.spec.title for outcome in outcomes if outcome.summary is None]
    if failed:
        count = f"{len(failed)} of {len(specs)} runs failed"
        print(f"{count}: {', '.join(failed)}; start again to try them again")
    return FAILED if failed else 0


def _refuse_other_metric(outcomes: Sequence[Outcome]) -> None:
    """Raise ConfigError where the last run is measured by another metric than the first."""
    metrics = {metric_of([outcome.summary]).name for outcome in outcomes if outcome.summary}
    if len(metrics) > 1:
        raise ConfigError(
            f"runs by {' and '.join(sorted(metrics))} cannot be compared; give all the same metrics="
        )


def say(outcome: Outcome, runs: Runs) -> None:
    """End the run's line; where it failed, with its own last words and where there are more."""
    if outcome.summary is not None:
        metric = metric_of([outcome.summary])
        name = "" if metric == ACCURACY else f"{metric.name} "
        value = metric.text(metric.value(outcome.summary, "val"))
        print(f"{name}{value} in {duration(outcome.wall_s)}{', kept from before' * outcome.kept}")
        return
    print(f"FAILED ({outcome.failure}) after {duration(outcome.wall_s)}")
    for line in runs.last_words(outcome.spec):
        print(f"    {line}")
    print(f"    its output: {runs.log(outcome.spec)}", flush=True)
