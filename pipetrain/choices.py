"""The configuration files that are shipped: what there is to choose in each group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def conf_dir() -> Path:
    """Return the folder of the YAML files: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    return next(path for path in (package / "conf", package.parent / "conf") if path.is_dir())


def shipped(group: str, name: object) -> dict[str, Any] | None:
    """Return what conf/ has by a name of a group; None if it has none of that name."""
    path = conf_dir() / group / f"{name}.yaml"
    known: dict[str, Any] | None = None
    if isinstance(name, str) and path.is_file():
        known = yaml.safe_load(path.read_text())
    return known


def names_of(group: str) -> str:
    """Return the names that conf/ has in a group, in words."""
    return ", ".join(sorted(path.stem for path in (conf_dir() / group).glob("*.yaml")))
