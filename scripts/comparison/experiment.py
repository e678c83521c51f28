"""What can be compared: methods, and experiments, which are files that hold a whole comparison.

A method is a name and the overrides that make it. A schedule alone is the method of its own name; a schedule
with a codec or another learning rate is a method too, so everything that the command line can say can be
compared. An experiment gives models, methods, seeds, overrides and processes, what differs from model to
model, such as its cut, and the record: what somebody else has reported for the same methods.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipetrain.errors import ConfigError

FOLDER = Path(__file__).with_name("experiments")


@dataclass(frozen=True, slots=True)
class Method:
    """A name, such as `fbp + topk`, and its overrides, such as `schedule=fbp codec.backward=topk`."""

    name: str
    overrides: tuple[str, ...]

    @property
    def slug(self) -> str:
        """The name as a part of a folder's name: `fbp_topk`."""
        return re.sub(r"[^\w.]+", "_", self.name, flags=re.ASCII).strip("._")

    @property
    def schedule(self) -> str:
        """The schedule among the overrides."""
        return next(value for key, value in map(split, self.overrides) if key == "schedule")


def split(word: str) -> tuple[str, str]:
    """Return an override's key, without a leading + or ~, and its value."""
    key, _, value = word.partition("=")
    return key.lstrip("+~"), value


def of_schedule(name: str) -> Method:
    """Return the method that is a schedule alone."""
    return Method(name, (f"schedule={name}",))


def parse_method(text: str, known: Iterable[Method] = ()) -> Method:
    """Read `NAME: OVERRIDES`, or the NAME of a known method. Raises ConfigError."""
    name, colon, words = (part.strip() for part in text.partition(":"))
    if colon:
        return make_method(name, words.split(), f"--method {name}")
    by_name = {method.name: method for method in known}
    if name in by_name:
        return by_name[name]
    choices = f"choose from {', '.join(by_name)}, or say" if by_name else "say"
    raise ConfigError(f"--method: there is no {name}; {choices} what it is: '{name}: schedule=...'")


def make_method(name: str, overrides: Sequence[str], where: str) -> Method:
    """Make a method, or raise ConfigError, which says `where` it was written."""
    _check_overrides(overrides, where)
    method = Method(name, tuple(overrides))
    if not method.slug:
        raise ConfigError(f"{where}: a method needs a name with letters or digits, for its folder")
    keys = [key for key, _ in map(split, overrides)]
    if keys.count("schedule") != 1:
        raise ConfigError(f"{where}: a method needs one schedule=NAME among its overrides")
    for key in ("seed", "model", "run_dir"):
        if key in keys:
            raise ConfigError(f"{where}: a method cannot set {key}; leave {key}= out of it")
    return method


def refuse_alike(methods: Sequence[Method]) -> None:
    """Raise ConfigError for two methods that would share a folder."""
    seen: dict[str, Method] = {}
    for method in methods:
        other = seen.setdefault(method.slug.lower(), method)
        if other is method:
            continue
        if other.name == method.name:
            raise ConfigError(f"the method {method.name} is given twice")
        raise ConfigError(
            f"the methods {other.name} and {method.name} would share the folder {method.slug}; rename one"
        )


@dataclass
class ReportedRow:
    """A row of the record as it was printed. `beside`: our model and method. `faults`: names of footnotes."""

    beside: list[str] = MISSING
    method: str = "-"
    dataset: str = ""
    model: str = "-"
    device: str = "-"
    lr: str = "-"
    batch_size: str = "-"
    data_worker: str = "-"
    buffer_size: str = "-"
    epoch: int | None = None
    acc: float | None = None  # percent
    eachtime: float | None = None  # seconds
    faults: list[str] = field(default_factory=list)


@dataclass
class Record:
    """Where the rows come from, and what is known to be wrong with them."""

    source: str = ""
    rows: list[ReportedRow] = MISSING
    faults: dict[str, str] = field(default_factory=dict)


@dataclass
class Experiment:
    """A file: OmegaConf checks it against these types. `models`, `methods`: the overrides of each."""

    title: str = ""
    nproc: int = 2
    seeds: list[int] = field(default_factory=lambda: [0])
    overrides: list[str] = field(default_factory=list)
    models: dict[str, list[str]] = field(default_factory=dict)
    methods: dict[str, list[str]] = MISSING
    record: Record | None = None

    def made_methods(self) -> list[Method]:
        """Return its methods. Raises ConfigError."""
        return [make_method(name, words, f"method {name}") for name, words in self.methods.items()]


def names() -> list[str]:
    """Return the experiments that come with the checkout."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Experiment:
    """Read an experiment by its name, or from a file that ends in .yaml. Raises ConfigError."""
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if path.parent == FOLDER and name not in names():
        raise ConfigError(f"--experiment: there is no {name}; choose from {', '.join(names())}, or FILE.yaml")
    try:
        data = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"--experiment: {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever YAML raises
        raise ConfigError(f"--experiment: {path} is no YAML: {' '.join(str(error).split())}") from error
    try:
        return _read(data, path.stem)
    except OmegaConfBaseException as error:
        said = str(error).partition("\n")[0]
        known = ", ".join(one.name for one in fields(Experiment))
        raise ConfigError(f"{path}: {error.full_key}: {said}; an experiment has {known}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read(data: Any, name: str) -> Experiment:
    record = data.get("record") if isinstance(data, DictConfig) else None
    if isinstance(record, DictConfig) and "common" in record:  # what all of its rows have
        common = record.pop("common")
        record["rows"] = [OmegaConf.merge(common, row) for row in record.rows]
    made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Experiment), data))
    assert isinstance(made, Experiment)
    made.title = made.title or name
    if not made.methods or not made.seeds:
        raise ConfigError("an experiment needs methods, a list of overrides each, and seeds")
    _check_overrides(made.overrides, "overrides")
    for model, words in made.models.items():
        _check_overrides(words, f"model {model}")
    made.made_methods()
    for number, row in enumerate(made.record.rows if made.record else [], 1):
        if len(row.beside) != 2:
            raise ConfigError(f"record, row {number} must say beside: [our model, our method]")
        for fault in row.faults:
            if made.record and fault not in made.record.faults:
                raise ConfigError(f"record, row {number} has {fault}, which is none of the record's faults")
    return made


def _check_overrides(words: Sequence[str], where: str) -> None:
    for word in words:
        if word.startswith("-") or "=" not in word:
            raise ConfigError(f"{where}: {word} is no override, such as codec.backward=int8")


def merged(*lists: Sequence[str]) -> tuple[str, ...]:
    """Join overrides; those of a later list replace those of the same key in earlier ones."""
    words: list[str] = []
    for later in lists:
        keys = {split(word)[0] for word in later}
        words = [word for word in words if split(word)[0] not in keys] + list(later)
    return tuple(words)
