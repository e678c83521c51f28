"""The command line of the check: which checks; and a table that is always up to date."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch

from benchmark.report import progress
from benchmark.worlds import titled
from comparison.processes import interruptible
from tests.gpu import front, memory, speed, strict, traces, training, transport
from tests.gpu.rows import FAIL, SKIPPED, START_S, Check, Line, Row, Setting, earlier, head, markdown
from tests.support.cases import SCHEDULES

CHECKS = [
    Check("messages", "large", transport.large, 70),
    Check("messages", "error", transport.error, 55),
    Check("messages", "start", partial(transport.cold, worlds=1), 45),
    Check("messages", "cold", transport.cold, 300),
    Check("training", "nccl-2", partial(training.over_nccl, ranks=2, names=SCHEDULES), 60),
    Check("training", "nccl-4", partial(training.over_nccl, ranks=4, names=training.FOUR), 200),
    Check("training", "replicas", training.replicas, 100),
    Check("training", "gloo-2", training.staged, 90),
    Check("training", "corrections", training.corrections, 45),
    Check("options", "exact", training.exact, 150),
    Check("options", "codecs", training.codecs, 60),
    Check("options", "bf16", training.bf16, 50),
    Check("options", "graphs", training.graphs, 45),
    Check("options", "more-graphs", partial(training.graphs, names=training.MORE_GRAPHED), 60),
    Check("options", "compile", training.compiled, 100),
    Check("options", "trace", traces.trace, 50),
    Check("options", "nan", training.nan, 40),
    Check("memory", "held", memory.memory, 300),
    Check("front", "torchrun", front.command_line, 280),
    Check("front", "pipeline", front.pipeline, 120),
    Check("front", "lengths", front.lengths, 45),
    Check("front", "stopped-early", front.stopped_early, 120),
    Check("front", "kept", front.kept, 35),
    Check("front", "bf16-weights", front.bf16_weights, 40),
    Check("strict", "no-waits", strict.no_waits, 65),
    Check("strict", "tight", strict.tight, 80),
    Check("strict", "float64", strict.float64, 25),
    Check("speed", "race", speed.race_beside_torch, 80),
    Check("speed", "one-process", speed.speed, 150),
    Check("speed", "gains", speed.gains, 200),
]
LEASE = ("start", "nccl-2", "replicas", "corrections", "graphs", "bf16-weights", "error")
LEASE += ("no-waits", "race")
"""What a GPU that is at hand for minutes is asked, in this order."""
IF_TIME_IS_LEFT = ("lengths", "kept", "more-graphs", "float64", "torchrun", "nccl-4")
GROUPS = list(dict.fromkeys(check.group for check in CHECKS))
REPORT = "gpu_check.md"
REFUSED, FAILED, INTERRUPTED = 2, 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks that are asked for, print the table, and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    if options.list:
        print("\n".join(f"{check.group}: {check.name}" for check in CHECKS))
        return 0
    refusal = ""
    if options.device == "cpu" and not options.quick:
        refusal = "--device cpu is a rehearsal: give it --quick too"
    elif options.device == "cuda" and not torch.cuda.is_available():
        refusal = "there is no GPU that torch can use; --device cpu --quick rehearses"
    if refusal:
        print(f"gpu_check: {refusal}", file=sys.stderr)
        return REFUSED
    with ExitStack() as stack:
        # A rehearsal leaves nothing where the results are, unless it is told to.
        default = "docs/results" if options.device == "cuda" else stack.enter_context(TemporaryDirectory())
        patience = 1.0 if options.device == "cuda" else 10.0
        setting = Setting(options.device, options.quick, options.out or Path(default), progress, patience)
        setting.out.mkdir(parents=True, exist_ok=True)
        about = head(arguments, options.device)
        chosen = choose(options)
        end = inf if options.minutes is None else monotonic() + 60 * options.minutes
        names = {check.name for check in chosen}
        kept = [line for line in earlier(setting.out / REPORT, about) if line[0] not in names]
        if kept:
            about["rows of other checks"] = "of earlier runs of the same software on the same GPU"
        lines: list[Line] = []
        status = 0
        try:
            with interruptible():
                for line in run(chosen, setting, end):
                    lines.append(line)
                    (setting.out / REPORT).write_text(markdown(about, in_order(kept + lines)))
        except KeyboardInterrupt:
            about["INTERRUPTED"] = "what follows the last row is missing"
            status = INTERRUPTED
        text = markdown(about, in_order(kept + lines))
        (setting.out / REPORT).write_text(text)
        print(file=sys.stderr)
        print(text, end="")
    return status or (FAILED if any(row.outcome == FAIL for _, row, _ in lines) else 0)


def choose(options: argparse.Namespace) -> list[Check]:
    """Return the checks that are asked for; in a lease what decides most comes first."""
    if options.only is None and options.minutes is not None:
        names = [*LEASE, *IF_TIME_IS_LEFT]
        return sorted((check for check in CHECKS if check.name in names), key=lambda c: names.index(c.name))
    only = set(options.only or [check.name for check in CHECKS])
    return [check for check in CHECKS if {check.name, check.group} & only]


def in_order(lines: Sequence[Line]) -> list[Line]:
    """Sort the lines by their checks."""
    order = [check.name for check in CHECKS]
    return sorted(lines, key=lambda line: order.index(line[0]) if line[0] in order else len(order))


def run(checks: Sequence[Check], setting: Setting, end: float = inf) -> Iterator[Line]:
    """Run one check after the other, none beyond its own limit or `end`; give each row as it comes."""
    say = setting.say
    for check in checks:
        began = monotonic()
        if end - began < START_S:
            yield check.name, Row("runs", "no time was left", "", SKIPPED), 0.0
            continue
        setting.say = titled(say, check.name)
        setting.end = min(end, began + check.most * setting.patience)
        setting.say("starts")
        try:
            for row in check.run(setting):
                yield check.name, row, monotonic() - began
                began = monotonic()
        except Exception as error:
            traceback.print_exc()
            last = (str(error).strip() or type(error).__name__).splitlines()[-1]
            yield check.name, Row("runs to its end", last, "no error", FAIL), monotonic() - began


def parser() -> argparse.ArgumentParser:
    """Make the parser."""
    made = argparse.ArgumentParser(
        prog="gpu_check.py",
        description="Prove on one GPU what only a GPU can prove.",
        allow_abbrev=False,
    )
    names = [*GROUPS, *(check.name for check in CHECKS)]
    out = f"for {REPORT} and trace.json (default: docs/results); rows of other checks are kept"
    made.add_argument("--list", action="store_true", help="name the checks, by group, and stop")
    made.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=f"{', '.join(names)}")
    lease = "end within so many; without --only: what decides most, first"
    made.add_argument("--minutes", type=float, metavar="N", help=lease)
    made.add_argument("--out", type=Path, metavar="DIR", help=out)
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    made.add_argument("--quick", action="store_true", help="small sizes: to see that it works, no more")
    return made
