"""The configuration files that are shipped: what there is to choose, and what other names may mean."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from pipetrain.errors import ConfigError

# Words in the names of other tools' options, and ours for them.
_OURS = {
    "accelerator": "device", "accumulation": "microbatches", "amp": "precision", "arch": "model",
    "bf16": "precision", "chunks": "microbatches", "criterion": "loss", "dataset": "data",
    "devices": "stages", "fp16": "precision", "gpus": "stages", "gradient": "grad", "logging": "log",
    "network": "model", "nproc": "stages", "num": "", "optimizer": "optim", "output": "run",
    "processes": "stages", "rate": "lr", "save": "checkpoint", "scheduler": "lr_schedule",
    "steps": "updates", "train": "", "world": "stages",
}  # fmt: skip


def nearest(typed: str, names: Collection[str]) -> list[str]:
    """Return what a name may mean that is none of these: it nearly spells one, or shares words with some."""
    leaves = {name.rpartition(".")[2]: name for name in sorted(names, reverse=True)}
    words = _words(typed)
    if words.issuperset(_split(typed)) and (close := _close(typed, [*names, *leaves], cutoff=0.85)):
        return [leaves.get(name, name) for name in close]
    words_of = {name: _words(leaf) for leaf, name in leaves.items()}
    shares = {name: len(words_of[name] & words) / len(words_of[name] | words or {""}) for name in words_of}
    most = max(0.25, *shares.values())
    return sorted(name for name in words_of if shares[name] == most)[:3] or _close(typed, names, cutoff=0.7)


_close = partial(get_close_matches, n=1)


def _split(name: str) -> list[str]:
    return re.findall("[a-z0-9]+", name.lower())


def _words(name: str) -> set[str]:
    """Return the words of a name, ours in place of those of other tools."""
    return {part for word in _split(name) for part in _OURS.get(word, word).split("_")} - {""}


def conf_dir() -> Path:
    """Return the folder of the YAML files: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def shipped(group: str, name: object) -> dict[str, Any] | None:
    """Return what conf/ has by a name of a group; None if it has none of that name."""
    path = conf_dir() / group / f"{name}.yaml"
    return yaml.safe_load(path.read_text()) if isinstance(name, str) and path.is_file() else None


def chosen(key: str, group: str, name: object, or_else: str = "") -> dict[str, Any]:
    """Return what conf/ has by a name of a group, which was given as `key`. Raises ConfigError."""
    if (values := shipped(group, name)) is None:
        raise ConfigError(f"{key}={name} is unknown; choose one of {', '.join(names_of(group))}{or_else}")
    return values


def names_of(group: str) -> list[str]:
    """Return the names that conf/ has in a group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
