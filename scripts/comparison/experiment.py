"""An experiment: a comparison that is worth making again, as a file.

It says what the command line can say (models, methods, seeds, overrides, processes), what differs from
model to model, such as where each is cut, and what somebody else has reported for the same, to be printed
beside. It is no Hydra config, which would be one run: it is what makes the command lines of many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from comparison import methods
from comparison.methods import Method
from comparison.record import Record, read_record
from pipetrain.errors import ConfigError

FOLDER = Path(__file__).with_name("experiments")
KEYS = {"title", "nproc", "seeds", "overrides", "models", "methods", "record"}


@dataclass(frozen=True, slots=True)
class Experiment:
    """What a file says. `models`: the overrides of each."""

    name: str
    title: str
    nproc: int
    seeds: tuple[int, ...]
    overrides: tuple[str, ...]
    models: Mapping[str, tuple[str, ...]]
    methods: tuple[Method, ...]
    record: Record | None


def names() -> list[str]:
    """Return the experiments that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> Experiment:
    """Read an experiment by its name, or from a file that ends in .yaml. Raises ConfigError."""
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if name not in names() and not name.endswith(".yaml"):
        raise ConfigError(f"--experiment: there is no {name}; choose from {', '.join(names())}, or FILE.yaml")
    try:
        data = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except OSError as error:
        raise ConfigError(f"--experiment: {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever YAML and OmegaConf raise
        raise ConfigError(f"--experiment: {path} is no YAML: {' '.join(str(error).split())}") from error
    return read(path.stem, data, str(path))


def read(name: str, data: Any, where: str) -> Experiment:
    """Make an experiment of what its file holds. Raises ConfigError for what cannot be meant."""
    if not isinstance(data, dict) or not isinstance(data.get("methods"), dict) or not data["methods"]:
        raise ConfigError(f"{where} must have methods: a name and a list of overrides each")
    if unknown := sorted(set(map(str, data)) - KEYS):
        raise ConfigError(
            f"{where} has {unknown[0]}, which means nothing; it may have {', '.join(sorted(KEYS))}"
        )
    models = data.get("models") or {}
    if not isinstance(models, dict):
        raise ConfigError(f"{where}: models must be names with a list of overrides each")
    seeds, nproc = data.get("seeds", [0]), data.get("nproc", 2)
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int for seed in seeds):
        raise ConfigError(f"{where}: seeds must be a list of whole numbers; got {seeds}")
    if type(nproc) is not int:
        raise ConfigError(f"{where}: nproc must be a whole number; got {nproc}")
    found = tuple(
        methods.make(str(key), _words(words, f"{where}: method {key}"), f"{where}: method {key}")
        for key, words in data["methods"].items()
    )
    record = data.get("record")
    return Experiment(
        name=name,
        title=str(data.get("title", name)),
        nproc=nproc,
        seeds=tuple(seeds),
        overrides=_words(data.get("overrides"), f"{where}: overrides"),
        models={str(key): _words(words, f"{where}: model {key}") for key, words in models.items()},
        methods=found,
        record=None if record is None else read_record(record, f"{where}: record"),
    )


def _words(value: Any, where: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(word, str) and "=" in word for word in value):
        raise ConfigError(f"{where} must be a list of overrides such as epochs=5; got {value}")
    return tuple(value)


def merged(*lists: Sequence[str]) -> tuple[str, ...]:
    """Join overrides; those of a later list replace those of the same key in earlier ones."""
    words: list[str] = []
    for later in lists:
        keys = {methods.split(word)[0] for word in later}
        words = [word for word in words if methods.split(word)[0] not in keys] + list(later)
    return tuple(words)
