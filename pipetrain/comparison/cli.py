"""The command line of the comparison: what it is asked, what it refuses, and what it says while it goes.

Everything that can be known to be wrong is refused before the first run starts, because the last one may be
hours away. Runs go seed by seed, all schedules of a seed one after another, so that no schedule pays for a
machine that slows down in the meantime.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pipetrain
from pipetrain.comparison import plots, table
from pipetrain.comparison.processes import interruptible
from pipetrain.comparison.runs import Command, Outcome, Runs, Spec, torchrun
from pipetrain.errors import ConfigError

OWN = {"schedule": "--schedules", "seed": "--seeds", "run_dir": "--out", "model": "--models"}
FAILED, REFUSED, INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None, command: Command = torchrun) -> int:
    """Compare, and return the exit status. `command` starts a run; the tests give another."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser().parse_args(arguments[:cut])
    overrides = tuple(arguments[cut + 1 :])
    try:
        specs = read_specs(options, overrides)
        out = options.out or default_out(options, overrides)
        with interruptible():
            return compare(specs, out, options.fresh, command)
    except ConfigError as error:
        print(f"compare: {error}", file=sys.stderr)
        return REFUSED


def parser() -> argparse.ArgumentParser:
    """Make the parser of everything before the `--`."""
    made = argparse.ArgumentParser(
        prog="compare.py",
        description="Train by several schedules in turn and put them into one table and three plots.",
        epilog="What follows -- are overrides for every run: -- model=vgg16 data=digits epochs=5",
        allow_abbrev=False,
    )
    made.add_argument(
        "--schedules", nargs="+", required=True, metavar="NAME", help=", ".join(names("schedule"))
    )
    made.add_argument(
        "--seeds", nargs="+", type=int, default=[0], metavar="N", help="a run each (default: 0)"
    )
    made.add_argument("--models", nargs="+", metavar="NAME", help="rows for several models")
    made.add_argument("--nproc", type=int, metavar="N", help="processes (default: stages= or 2)")
    made.add_argument("--out", type=Path, metavar="DIR", help="default: comparisons/ and the overrides")
    made.add_argument(
        "--fresh", action="store_true", help="start over: remove these runs where they are done"
    )
    return made


def names(group: str) -> list[str]:
    """Return the choices of a group of the configuration.

    Finds the folder as `pipetrain.config` does, which is not asked because it imports torch.
    """
    package = Path(pipetrain.__file__).resolve().parent
    conf = next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())
    return sorted(path.stem for path in (conf / group).glob("*.yaml"))


def read_specs(options: argparse.Namespace, overrides: tuple[str, ...]) -> list[Spec]:
    """Return the runs in the order in which they are made. Raises ConfigError for what cannot be meant."""
    _check_names("--schedules", options.schedules, names("schedule"))
    _check_names("--models", options.models or [], names("model"))
    _check_names("--seeds", options.seeds, None)
    given: dict[str, str] = {}
    for override in overrides:
        if override.startswith("-") or "=" not in override:
            raise ConfigError(f"after -- come overrides such as epochs=5; got {override}")
        key, _, value = override.partition("=")
        given[key.lstrip("+~")] = value
    for key, option in OWN.items():
        if key in given and (key != "model" or options.models):
            raise ConfigError(f"{key} is set by {option}; leave {key}={given[key]} out of the overrides")
    stages = given.get("stages", "")
    nproc = options.nproc if options.nproc is not None else int(stages) if stages.isdecimal() else 2
    if nproc < 1:
        raise ConfigError(f"--nproc must be 1 or more; got {nproc}")
    return [
        Spec(schedule, seed, model, overrides, nproc)
        for seed in options.seeds
        for model in options.models or [None]
        for schedule in options.schedules
    ]


def _check_names(option: str, given: Sequence[object], known: list[str] | None) -> None:
    for name in given:
        if known is not None and name not in known:
            raise ConfigError(f"{option}: there is no {name}; choose from {', '.join(known)}")
        if given.count(name) > 1:
            raise ConfigError(f"{option}: {name} stands there twice")


def default_out(options: argparse.Namespace, overrides: Sequence[str]) -> Path:
    """Name the folder after what is compared: `comparisons/vgg16-digits-epochs_5`."""
    groups = ("model=", "data=", "optim=", "experiment=")
    words = ["+".join(options.models)] if options.models else []
    words += [word.partition("=")[2] if word.startswith(groups) else word.lstrip("+~") for word in overrides]
    words += [f"nproc_{options.nproc}"] if options.nproc else []
    name = re.sub(r"[^\w.+-]+", "_", "-".join(words)).strip("_.-")
    return Path("comparisons") / (name[:120] or "default")


def compare(specs: list[Spec], out: Path, fresh: bool, command: Command) -> int:
    """Make the runs that are not done, and write the tables and plots of all. Returns the exit status."""
    runs = Runs(out, command)
    with runs.claimed() as lock:
        runs.check(specs, fresh)
        if fresh:
            for spec in specs:
                runs.forget(spec)
            for name in (*table.FILES, *plots.FILES):
                (out / name).unlink(missing_ok=True)
        outcomes: list[Outcome] = []
        try:
            for number, spec in enumerate(specs, 1):
                print(f"[{number}/{len(specs)}] {spec.title} ... ", end="", flush=True)
                outcomes.append(runs.kept(spec) or runs.start(spec, lock))
                say(outcomes[-1], runs)
        except KeyboardInterrupt:
            done = sum(outcome.summary is not None for outcome in outcomes)
            print(
                f"interrupted\n{done} of {len(specs)} runs are kept in {out}; the same command goes on there"
            )
            return INTERRUPTED
        text = table.write(out, outcomes)
        plots.write(out, outcomes)
    print(f"\n{text}\nwritten to {out}: {', '.join((*table.FILES, *plots.FILES))}")
    failed = [outcome.spec.title for outcome in outcomes if outcome.summary is None]
    if failed:
        print(
            f"{len(failed)} of {len(specs)} runs failed: {', '.join(failed)}; start again to try them again"
        )
    return FAILED if failed else 0


def say(outcome: Outcome, runs: Runs) -> None:
    """End the run's line; where it failed, with its own last words and where there are more."""
    if outcome.summary is not None:
        kept = ", kept from before" if outcome.kept else ""
        print(f"{100 * outcome.summary['best_val_acc']:.1f} % in {table.duration(outcome.wall_s)}{kept}")
        return
    print(f"FAILED ({outcome.failure}) after {table.duration(outcome.wall_s)}")
    for line in runs.last_words(outcome.spec):
        print(f"    {line}")
    print(f"    its output: {runs.log(outcome.spec)}", flush=True)
