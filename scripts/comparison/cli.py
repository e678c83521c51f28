"""The command line of the comparison: it makes the runs that are asked for, and says what it does meanwhile.

What there is to show is written at the end, and also when it is interrupted: of what is done until then.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress

from comparison import plots, record, report, request, table
from comparison.processes import interruptible
from comparison.request import Request
from comparison.runs import Command, Outcome, Runs, torchrun
from comparison.text import duration
from pipetrain.errors import ConfigError

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
FILES = (*table.FILES, *plots.FILES, report.FILE)


def main(arguments: Sequence[str] | None = None, command: Command = torchrun) -> int:
    """Compare, and return the exit status. `command` starts a run; the tests give another."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options, asked = request.read(arguments)
        with interruptible():
            typed = shlex.join(word for word in arguments if word != "--fresh")
            return compare(asked, options.fresh, command, typed)
    except ConfigError as error:
        print(f"compare: {error}", file=sys.stderr)
        return REFUSED


def compare(asked: Request, fresh: bool, command: Command, typed: str) -> int:
    """Make the runs that are not done, and write the tables, plots and report of all. Return the exit status.

    `typed`: the arguments, to be shown to who wants to make it again; without `--fresh`, which would remove
    what is there.
    """
    runs, specs, out = Runs(asked.out, command), asked.specs, asked.out
    with runs.claimed() as lock:
        runs.check(specs, fresh)
        if fresh:
            for spec in specs:
                runs.forget(spec)
            for name in FILES:
                (out / name).unlink(missing_ok=True)
        outcomes: list[Outcome] = []
        try:
            for number, spec in enumerate(specs, 1):
                print(f"[{number}/{len(specs)}] {spec.title} ... ", end="", flush=True)
                outcomes.append(runs.kept(spec) or runs.start(spec, lock))
                say(outcomes[-1], runs)
            text = write(asked, outcomes, runs, typed)
        except KeyboardInterrupt:
            done = sum(outcome.summary is not None for outcome in outcomes)
            print(
                f"interrupted\n{done} of {len(specs)} runs are kept in {out}; the same command goes on there",
                flush=True,
            )
            if done:
                with suppress(KeyboardInterrupt):
                    write(asked, outcomes, runs, typed)
            return INTERRUPTED
    print(f"\n{text}\nwritten to {out}: {', '.join(FILES)}")
    failed = [outcome.spec.title for outcome in outcomes if outcome.summary is None]
    if failed:
        print(
            f"{len(failed)} of {len(specs)} runs failed: {', '.join(failed)}; start again to try them again"
        )
    return FAILED if failed else 0


def write(asked: Request, outcomes: Sequence[Outcome], runs: Runs, typed: str) -> str:
    """Write everything that there is to show, and return the tables as Markdown."""
    rows = table.make_rows(outcomes)
    reported = asked.experiment.record if asked.experiment else None
    beside = record.markdown(rows, reported) if reported else ""
    text = table.write(asked.out, outcomes, beside)
    plots.write(asked.out, outcomes)
    report.write(asked, outcomes, runs, typed)
    return text


def say(outcome: Outcome, runs: Runs) -> None:
    """End the run's line; where it failed, with its own last words and where there are more."""
    if outcome.summary is not None:
        kept = ", kept from before" if outcome.kept else ""
        print(f"{100 * outcome.summary['best_val_acc']:.1f} % in {duration(outcome.wall_s)}{kept}")
        return
    print(f"FAILED ({outcome.failure}) after {duration(outcome.wall_s)}")
    for line in runs.last_words(outcome.spec):
        print(f"    {line}")
    print(f"    its output: {runs.log(outcome.spec)}", flush=True)
