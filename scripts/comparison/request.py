"""What is asked for: command line and experiment put together into the runs to make.

Everything that can be known to be wrong is refused here, before the first run starts, because the last one
may be hours away. Runs go seed by seed, all methods of a seed one after another, so that no method pays for
a machine that slows down in the meantime.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison import experiment
from comparison.experiment import (
    Experiment,
    Method,
    Record,
    merged,
    of_schedule,
    parse_method,
    refuse_alike,
    split,
)
from comparison.runs import Spec
from pipetrain.cli import conf_dir
from pipetrain.errors import ConfigError

OWN = {"schedule": "--schedules", "seed": "--seeds", "run_dir": "--out", "model": "--models"}
OF_ONE_VALUE = ("--method", "--experiment", "--nproc", "--out")
OVERRIDE = re.compile(r"[+~]{0,2}[\w.@/]+=")


@dataclass(frozen=True, slots=True)
class Request:
    """The runs in the order in which they are made, and where they go.

    `typed`: the arguments that make it again; without --fresh, which would remove what is there.
    """

    specs: list[Spec]
    out: Path
    fresh: bool
    experiment: Experiment | None
    typed: str

    @property
    def methods(self) -> list[str]:
        """The names of its methods, in the order of the rows."""
        return list(dict.fromkeys(spec.method.name for spec in self.specs))

    @property
    def record(self) -> Record | None:
        """What somebody else has reported for the same."""
        return self.experiment.record if self.experiment else None


def parser() -> argparse.ArgumentParser:
    """Make the parser of everything but the overrides."""
    made = argparse.ArgumentParser(
        prog="compare.py",
        description="Train by several methods in turn; put them into one table, plots and a report.",
        epilog="Words such as model=vgg16 epochs=5, and all after --, are overrides for every run.",
        allow_abbrev=False,
    )
    made.add_argument("--experiment", metavar="NAME", help=f"{', '.join(experiment.names())}, or FILE.yaml")
    made.add_argument("--schedules", nargs="+", metavar="NAME", default=[], help=", ".join(names("schedule")))
    made.add_argument(
        "--method",
        action="append",
        default=[],
        metavar="'NAME: OVERRIDES'",
        help="a row of your own, such as 'slow: schedule=gpipe optim.lr=0.001', or the name of one of the "
        "experiment's; may be given many times",
    )
    made.add_argument("--seeds", nargs="+", type=int, metavar="N", default=[], help="default: 0")
    made.add_argument("--models", nargs="+", metavar="NAME", default=[], help="rows for several models")
    made.add_argument("--nproc", type=int, metavar="N", help="processes (default: stages= or 2)")
    made.add_argument("--out", type=Path, metavar="DIR", help="default: comparisons/ and what is compared")
    made.add_argument("--fresh", action="store_true", help="remove these runs where they are done")
    return made


def names(group: str) -> list[str]:
    """Return the choices of a group of the configuration."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def read(arguments: Sequence[str]) -> Request:
    """Read a command line. Raises ConfigError for what cannot be meant; argparse's own errors exit."""
    before, overrides = _apart(arguments)
    options = parser().parse_args(before)
    asked = experiment.load(options.experiment) if options.experiment else None
    specs = _specs(options, overrides, asked or Experiment(methods={}))
    typed = shlex.join(word for word in arguments if word != "--fresh")
    return Request(specs, options.out or _default_out(options, overrides), options.fresh, asked, typed)


def _apart(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Tell the overrides, which may stand anywhere, from the options."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    before: list[str] = []
    words: list[str] = []
    for word in arguments[:cut]:
        is_value = bool(before) and before[-1] in OF_ONE_VALUE
        (words if OVERRIDE.match(word) and not is_value else before).append(word)
    return before, (*words, *arguments[cut + 1 :])


def _specs(options: argparse.Namespace, overrides: tuple[str, ...], asked: Experiment) -> list[Spec]:
    chosen = _methods(options, asked)
    _check_names("--models", options.models, names("model"))
    _check_names("--seeds", options.seeds)
    given = _given(overrides, chosen)
    for key, option in OWN.items():
        if key in given and (key != "model" or options.models):
            raise ConfigError(f"{key} is set by {option}; leave {key}={given[key]} out of the overrides")
    stages = given.get("stages", "")
    nproc = int(stages) if stages.isdecimal() else asked.nproc
    nproc = nproc if options.nproc is None else options.nproc
    if nproc < 1:
        raise ConfigError(f"--nproc must be 1 or more; got {nproc}")
    models: list[str | None] = options.models or ([] if "model" in given else list(asked.models)) or [None]
    words = {
        model: merged(asked.overrides, asked.models.get(model or given.get("model", ""), ()), overrides)
        for model in models
    }
    specs = [
        Spec(method, seed, model, words[model], nproc)
        for seed in options.seeds or asked.seeds
        for model in models
        for method in chosen
    ]
    _refuse_other_tasks(specs)
    return specs


def _refuse_other_tasks(specs: Sequence[Spec]) -> None:
    """Raise ConfigError for overrides that give some of the runs other metrics."""
    tasks = {spec.title: " ".join(_task(spec)) or "the default task" for spec in specs}
    (title, first), *others = tasks.items()
    for other, task in others:
        if task != first:
            raise ConfigError(
                f"{title} has {first}, and {other} has {task}: their metrics may differ; compare them in two "
                "comparisons, or give all runs the same metrics="
            )


def _task(spec: Spec) -> list[str]:
    """Return the overrides that decide a run's metrics."""
    words = [(split(word)[0].partition(".")[0], word) for word in spec.arguments]
    metrics = [word for key, word in words if key == "metrics"]
    return metrics or [word for key, word in words if key in ("experiment", "task", "loss")]


def _methods(options: argparse.Namespace, asked: Experiment) -> list[Method]:
    """Return the rows: those named on the command line, else the experiment's."""
    known = {method.name: method for method in asked.made_methods()}
    _check_names("--schedules", options.schedules, names("schedule"))
    chosen = [known.get(name) or of_schedule(name) for name in options.schedules]
    chosen += [parse_method(text, known.values()) for text in options.method]
    chosen = chosen or list(known.values())
    if not chosen:
        raise ConfigError("there is nothing to compare: give --schedules, --method or --experiment")
    for method in chosen:
        _check_names(f"method {method.name}", [method.schedule], names("schedule"))
    refuse_alike(chosen)
    return chosen


def _given(overrides: Sequence[str], chosen: Sequence[Method]) -> dict[str, str]:
    """Return the overrides of every run by key. Raises ConfigError for what is none, or set by a method."""
    for override in overrides:
        if override.startswith("-") or "=" not in override:
            raise ConfigError(f"after -- come overrides such as epochs=5; got {override}")
    given = dict(map(split, overrides))
    for method in chosen:
        for key, _ in map(split, method.overrides):
            if key in given and key not in OWN:
                raise ConfigError(
                    f"{key} is set by the method {method.name}; leave {key}={given[key]} out of the overrides"
                )
    return given


def _check_names(option: str, given: Sequence[object], known: Sequence[str] | None = None) -> None:
    for name, count in Counter(given).items():
        if known is not None and name not in known:
            raise ConfigError(f"{option}: there is no {name}; choose from {', '.join(known)}")
        if count > 1:
            raise ConfigError(f"{option}: {name} is given twice")


def _default_out(options: argparse.Namespace, overrides: Sequence[str]) -> Path:
    """Name the folder after what is compared: `comparisons/vgg16-digits-epochs_5`."""
    groups = ("model=", "data=", "optim=", "experiment=")
    words = [Path(options.experiment).stem] if options.experiment else []
    words += ["+".join(options.models)] if options.models else []
    words += [word.partition("=")[2] if word.startswith(groups) else word.lstrip("+~") for word in overrides]
    words += [f"nproc_{options.nproc}"] if options.nproc else []
    name = re.sub(r"[^\w.+-]+", "_", "-".join(words)).strip("_.-")
    return Path("comparisons") / (name[:120] or "default")
