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

from pipetrain.cli import conf_dir
from pipetrain.errors import ConfigError, one_line

FOLDER = Path(__file__).with_name("experiments")
OWN = {"schedule": "--schedules", "seed": "--seeds", "run_dir": "--out", "model": "--models"}
OVERRIDE = re.compile(r"[+~]{0,2}[\w.@/]+=")


@dataclass(frozen=True, slots=True)
class Method:
    """A name, such as `fbp + topk`, and its overrides, such as `schedule=fbp codec.backward=topk`."""

    name: str
    overrides: tuple[str, ...]

    @property
    def slug(self) -> str:
        """The name as a part of a folder's name: `fbp_topk`."""
        return re.sub(r"[^\w.]+", "_", self.name, flags=re.ASCII).strip("._")


@dataclass(frozen=True, slots=True)
class Spec:
    """One run to be made."""

    method: Method
    seed: int
    model: str | None  # None: whatever the overrides say
    overrides: tuple[str, ...]
    nproc: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return "-".join(filter(None, [self.model, self.method.slug, f"seed{self.seed}"]))

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

    `typed`: the arguments that make it again; without --fresh, which would remove what is there.
    """

    specs: list[Spec]
    out: Path
    fresh: bool
    title: str
    typed: str

    @property
    def methods(self) -> list[str]:
        """The names of its methods, in the order of the rows."""
        return list(dict.fromkeys(spec.method.name for spec in self.specs))


def parser() -> argparse.ArgumentParser:
    """Make the parser of everything but the overrides."""
    made = argparse.ArgumentParser(
        prog="compare.py",
        description="Train by several methods in turn; put them into one table, plots and a report.",
        epilog="Words such as model=vgg16 epochs=5, and all after --, are overrides for every run.",
        allow_abbrev=False,
    )
    own = (
        "a row of your own, such as 'slow: schedule=gpipe optim.lr=0.001', or one of the experiment's by name"
    )
    several: dict[str, Any] = {"metavar": "NAME", "nargs": "+", "default": []}
    schedules, experiments = names(conf_dir() / "schedule"), ", ".join(names(FOLDER))
    made.add_argument("--experiment", metavar="NAME", help=f"{experiments}, or FILE.yaml")
    made.add_argument("--schedules", choices=schedules, help=", ".join(schedules), **several)
    made.add_argument("--method", action="append", default=[], metavar="'NAME: OVERRIDES'", help=own)
    made.add_argument("--seeds", type=int, help="default: 0", **several | {"metavar": "N"})
    made.add_argument(
        "--models", choices=names(conf_dir() / "model"), help="rows for several models", **several
    )
    made.add_argument("--nproc", type=int, metavar="N", help="processes (default: stages= or 2)")
    made.add_argument("--out", type=Path, metavar="DIR", help="default: comparisons/ and what is compared")
    made.add_argument("--fresh", action="store_true", help="remove these runs where they are done")
    return made


def names(folder: Path) -> list[str]:
    """Return the names of the YAML files of a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def read(arguments: Sequence[str]) -> Request:
    """Read a command line. Raises ConfigError for what cannot be meant; argparse's own errors exit."""
    before, overrides = _apart(arguments)
    options = parser().parse_args(before)
    asked = load(options.experiment) if options.experiment else Experiment()
    specs = list(_specs(options, overrides, asked))
    title = asked.title or " against ".join(dict.fromkeys(spec.method.name for spec in specs))
    typed = shlex.join(word for word in arguments if word != "--fresh")
    return Request(specs, options.out or _default_out(options, overrides), options.fresh, title, typed)


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
        made: Any = OmegaConf.to_object(data)
    except Exception as error:  # whatever YAML raises
        choices = f"choose from {', '.join(names(FOLDER))}, or FILE.yaml"
        raise ConfigError(f"--experiment {path}: {one_line(error)}; {choices}") from error
    assert isinstance(made, Experiment)
    made.title = made.title or path.stem
    if not made.methods or not made.seeds:
        raise ConfigError(f"{path}: an experiment needs methods, a list of overrides each, and seeds")
    return made


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


def _check(method: Method, for_all: Sequence[str]) -> None:
    """Raise ConfigError for a method that lacks something, or says otherwise than what is `for_all`."""
    where, said = f"method {method.name}", {key(word): word for word in method.overrides}
    if wrong := [word for word in (*method.overrides, *for_all) if word.startswith("-") or "=" not in word]:
        raise ConfigError(f"{where}: {wrong[0]} is no override, such as codec.backward=int8")
    if not method.slug:
        raise ConfigError(f"{where}: a method needs a name with letters or digits, for its folder")
    schedules = [word.partition("=")[2] for word in method.overrides if key(word) == "schedule"]
    known = names(conf_dir() / "schedule")
    if len(schedules) != 1 or schedules[0] not in known:
        raise ConfigError(f"{where}: a method needs one schedule=NAME, of {', '.join(known)}")
    for word in for_all:
        mine = said.get(key(word), word)
        if mine.partition("=")[2] != word.partition("=")[2]:
            raise ConfigError(f"{where}: it has {mine}, and {word} is for every run; leave one of them out")


def _specs(options: argparse.Namespace, overrides: Sequence[str], asked: Experiment) -> Iterator[Spec]:
    methods, seeds = list(_methods(options, asked)), options.seeds or asked.seeds
    if not methods:
        raise ConfigError("there is nothing to compare: give --schedules, --method or --experiment")
    given = {key(word): word.partition("=")[2] for word in overrides}
    for word, option in OWN.items():
        of_method = any(key(own) == word for method in methods for own in method.overrides)
        if (word in given and (word != "model" or options.models)) or (of_method and word != "schedule"):
            raise ConfigError(f"{word} is set by {option}; leave {word}= out of the overrides")
    stages = given.get("stages", "")
    nproc = options.nproc if options.nproc is not None else int(stages) if stages.isdecimal() else asked.nproc
    if nproc < 1:
        raise ConfigError(f"--nproc must be 1 or more; got {nproc}")
    models: list[str | None] = options.models or ([] if "model" in given else list(asked.models)) or [None]
    folders: set[str] = set()
    for seed in seeds:
        for model in models:
            own = asked.models.get(model or given.get("model", ""), [])
            words = merged(asked.overrides, own, overrides)
            for method in methods:
                _check(method, words)
                spec = Spec(method, seed, model, words, nproc)
                if spec.name.lower() in folders:
                    raise ConfigError(f"two runs would share the folder {spec.name}: name each one once")
                folders.add(spec.name.lower())
                yield spec


def merged(*lists: Sequence[str]) -> tuple[str, ...]:
    """Join overrides; those of a later list replace those of the same key in earlier ones."""
    words: list[str] = []
    for later in lists:
        keys = {key(word) for word in later}
        words = [word for word in words if key(word) not in keys] + list(later)
    return tuple(words)


def _default_out(options: argparse.Namespace, overrides: Sequence[str]) -> Path:
    """Name the folder after what is compared: `comparisons/vgg16-digits-epochs_5`."""
    groups = ("model=", "data=", "optim=", "experiment=")
    words = [Path(options.experiment).stem] if options.experiment else []
    words += ["+".join(options.models)] if options.models else []
    words += [word.partition("=")[2] if word.startswith(groups) else word.lstrip("+~") for word in overrides]
    words += [f"nproc_{options.nproc}"] if options.nproc else []
    name = re.sub(r"[^\w.+-]+", "_", "-".join(words)).strip("_.-")
    return Path("comparisons") / (name[:120] or "default")
