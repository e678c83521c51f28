"""What is asked for: command line and experiment put together into the runs to make.

A method is a name and the overrides that make it; a schedule alone is the method of its own name. An
experiment is a file with models, methods, seeds and overrides.

What can be known to be wrong is refused here, before the first run starts, because the last one may be hours
away. Runs go seed by seed, all methods of a seed one after another, so that no method pays for a machine that
slows down in the meantime.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipetrain.commands.cli import composed
from pipetrain.config.choices import conf_dir
from pipetrain.errors import ConfigError, one_line
from pipetrain.rules import COUNT, whole

FOLDER = Path(__file__).with_name("experiments")
_MODULES = Path(__file__).parents[1].glob("published/experiments/[!_]*.py")
RECORDS = sorted(path.stem.replace("_", "-") for path in _MODULES)
"""Published records, which are experiments too: see `published`."""
OWN = {"schedule": "--schedules", "seed": "--seeds", "run_dir": "--out", "model": "--models"}
OVERRIDE = re.compile(r"[+~]{0,2}[\w.@/]+=")


@dataclass(frozen=True, slots=True)
class Method:
    """A name, such as `fbp + topk`, and its overrides, such as `schedule=fbp codec.backward=topk`."""

    name: str
    overrides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spec:
    """One run to be made. `model`: None where the overrides say it, or nothing does."""

    method: Method
    seed: int
    model: str | None
    overrides: tuple[str, ...]
    nproc: int

    @property
    def name(self) -> str:
        """The name of the run's folder: `vgg16-fbp_topk-seed0`."""
        method = re.sub(r"[^\w.]+", "_", self.method.name, flags=re.ASCII).strip("._")
        return "-".join(filter(None, [self.model, method, f"seed{self.seed}"]))

    @property
    def title(self) -> str:
        """The run's name to a reader."""
        return " ".join(filter(None, [self.model, self.method.name, f"seed {self.seed}"]))

    @property
    def arguments(self) -> list[str]:
        """All overrides but the folder."""
        model = [f"model={self.model}"] if self.model else []
        return [*self.overrides, *model, *self.method.overrides, f"seed={self.seed}"]


@dataclass
class Experiment:
    """A file: OmegaConf checks it against these types. `models`, `methods`: the overrides of each."""

    title: str = ""
    nproc: int = 2
    seeds: list[int] = field(default_factory=lambda: [0])
    overrides: list[str] = field(default_factory=list)
    models: dict[str, list[str]] = field(default_factory=dict)
    methods: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """The runs in the order in which they are made, and where they go.

    `typed`: the arguments that make it again; without --fresh, which would remove what is there. `target`: a
    value of the metric, as it is shown, to which times are measured.
    """

    specs: list[Spec]
    out: Path
    fresh: bool
    title: str
    typed: str
    target: float | None = None
    latex: bool = False

    @property
    def methods(self) -> list[str]:
        """The names of its methods, in the order of the rows."""
        return list(dict.fromkeys(spec.method.name for spec in self.specs))


def parser() -> argparse.ArgumentParser:
    """Make the parser of everything but the overrides."""
    command = argparse.ArgumentParser(
        prog="compare.py",
        description="Train by several methods in turn; put them into one table, plots and a report.",
        epilog="Words such as model=vgg16 epochs=5, and all after --, are overrides for every run.",
        allow_abbrev=False,
    )
    own = (
        "a row of your own, such as 'slow: schedule=gpipe optim.lr=0.001', or one of the experiment's by name"
    )
    several: dict[str, Any] = {"metavar": "NAME", "nargs": "+", "default": []}
    records = f"a published record to make again: {', '.join(RECORDS)}, or all (with --quick: tiny)"
    schedules, experiments = names(conf_dir() / "schedule"), ", ".join(names(FOLDER))
    command.add_argument("--experiment", metavar="NAME", help=f"{experiments}, or FILE.yaml; {records}")
    command.add_argument("--schedules", choices=schedules, help=", ".join(schedules), **several)
    command.add_argument("--method", action="append", default=[], metavar="'NAME: OVERRIDES'", help=own)
    command.add_argument("--seeds", type=int, help="default: 0", **several | {"metavar": "N"})
    command.add_argument(
        "--models", choices=names(conf_dir() / "model"), help="rows for several models", **several
    )
    command.add_argument("--nproc", type=int, metavar="N", help="processes (default: stages= or 2)")
    command.add_argument("--out", type=Path, metavar="DIR", help="default: comparisons/ and what is compared")
    command.add_argument("--fresh", action="store_true", help="remove these runs where they are done")
    reach = (
        "of the metric, such as 90 (%%): times until it is reached (default: the best that all runs reach)"
    )
    command.add_argument("--target", type=float, metavar="VALUE", help=reach)
    command.add_argument(
        "--latex", action="store_true", help="write the tables as table.tex too, for booktabs"
    )
    return command


def names(folder: Path) -> list[str]:
    """Return the names of the YAML files of a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read(arguments: Sequence[str]) -> Request:
    """Read a command line. Raises ConfigError for what cannot be meant; argparse's own errors exit."""
    before, overrides = _apart(arguments)
    options = parser().parse_args(before)
    asked = load(options.experiment) if options.experiment else Experiment()
    specs = list(_specs(options, overrides, asked))
    _check(specs)
    title = asked.title or " against ".join(dict.fromkeys(spec.method.name for spec in specs))
    typed = shlex.join(word for word in arguments if word != "--fresh")
    out = options.out or _default_out(options, overrides)
    return Request(specs, out, options.fresh, title, typed, options.target, options.latex)


def _apart(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell the overrides, which may stand anywhere, from the options."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    before, behind = arguments[:cut], arguments[cut + 1 :]
    words = [word for word in before if OVERRIDE.match(word)]
    return [word for word in before if not OVERRIDE.match(word)], [*words, *behind]


def load(name: str) -> Experiment:
    """Read an experiment by its name, or from a file that ends in .yaml. Raises ConfigError."""
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    try:
        data: Any = OmegaConf.merge(OmegaConf.structured(Experiment), OmegaConf.load(path))
        experiment: Any = OmegaConf.to_object(data)
    except Exception as error:  # whatever YAML raises
        choices = f"choose from {', '.join([*names(FOLDER), *RECORDS, 'all'])}, or FILE.yaml"
        raise ConfigError(f"--experiment {path}: {one_line(error)}; {choices}") from error
    assert isinstance(experiment, Experiment)
    experiment.title = experiment.title or path.stem
    if not experiment.methods or not experiment.seeds:
        raise ConfigError(f"{path}: an experiment needs methods, a list of overrides each, and seeds")
    return experiment


def key(word: str) -> str:
    """Return an override's key, without a leading + or ~."""
    return word.partition("=")[0].lstrip("+~")


def _methods(options: argparse.Namespace, asked: Experiment) -> Iterator[Method]:
    """Give the rows: those named on the command line, else the experiment's."""
    known = {name: Method(name, tuple(words)) for name, words in asked.methods.items()}
    for name in options.schedules:
        yield known.get(name) or Method(name, (f"schedule={name}",))
    for text in options.method:
        name, colon, words = (part.strip() for part in text.partition(":"))
        if not colon and name not in known:
            raise ConfigError(f"--method: there is no {name}; say what it is: '{name}: schedule=...'")
        yield Method(name, tuple(words.split())) if colon else known[name]
    if not options.schedules and not options.method:
        yield from known.values()


def _specs(options: argparse.Namespace, overrides: Sequence[str], asked: Experiment) -> Iterator[Spec]:
    methods = list(_methods(options, asked))
    if not methods:
        raise ConfigError("there is nothing to compare: give --schedules, --method or --experiment")
    values = {key(word): word.partition("=")[2] for word in overrides}
    for word, option in OWN.items():
        of_method = any(key(own) == word for method in methods for own in method.overrides)
        if (word in values and (word != "model" or options.models)) or (of_method and word != "schedule"):
            raise ConfigError(f"{word} is set by {option}; leave {word}= out of the overrides")
    stages = values.get("stages", "")
    nproc = options.nproc if options.nproc is not None else int(stages) if stages.isdecimal() else asked.nproc
    COUNT.read("--nproc", nproc)
    models: list[str | None] = options.models or ([] if "model" in values else list(asked.models)) or [None]
    for seed in options.seeds or asked.seeds:
        whole(0).read("--seeds", seed)
        for model in models:
            own = asked.models.get(model or values.get("model", ""), [])
            words = merged(asked.overrides, own, overrides)
            yield from (Spec(method, seed, model, words, nproc) for method in methods)


def _check(specs: Sequence[Spec]) -> None:
    """Raise ConfigError for runs of one folder, and for a method that cannot be configured.

    Or that says otherwise than what is for every run, as it is not plain which of the two is meant.
    """
    folders = [spec.name.lower() for spec in specs]
    if shared := {name for name in folders if folders.count(name) > 1}:
        raise ConfigError(f"two runs would share the folder {min(shared)}: name each one once")
    different = [spec for spec in specs if spec.seed == specs[0].seed]
    for spec in different:
        said = {key(word): word for word in spec.method.overrides}
        for word in spec.overrides:
            mine = said.get(key(word), word)
            if mine.partition("=")[2] != word.partition("=")[2]:
                raise ConfigError(
                    f"method {spec.method.name}: it has {mine}, and {word} is for every run; leave one of "
                    "them out"
                )
    for spec in different:
        try:
            composed("config", spec.arguments)
        except ConfigError as error:
            raise ConfigError(f"method {spec.method.name}: {error}") from error


def merged(*lists: Sequence[str]) -> tuple[str, ...]:
    """Join overrides; those of a later list replace those of the same key in earlier ones."""
    words: list[str] = []
    for later in lists:
        keys = {key(word) for word in later}
        words = [word for word in words if key(word) not in keys] + list(later)
    return tuple(words)


def _default_out(options: argparse.Namespace, overrides: Sequence[str]) -> Path:
    """Name the folder after what is compared: `comparisons/model_vgg16-epochs_5`."""
    words = [Path(options.experiment).stem] if options.experiment else []
    words += ["+".join(options.models)] if options.models else []
    words += [word.lstrip("+~") for word in overrides]
    words += [f"nproc_{options.nproc}"] if options.nproc else []
    name = re.sub(r"[^\w.+-]+", "_", "-".join(words)).strip("_.-")
    return Path("comparisons") / (name[:120] or "default")
