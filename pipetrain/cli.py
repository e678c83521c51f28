"""Hydra at the edge: the commands compose their configuration here, and a mistake in it is one sentence.

Hydra's own report of a mistake is several lines and, inside a job, a traceback. With HYDRA_FULL_ERROR it lets
its exceptions through instead, and they are said here.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipetrain.config import conf_dir
from pipetrain.errors import ConfigError
from pipetrain.overrides import as_hydra


def compose(name: str, task: Callable[[DictConfig], None]) -> int:
    """Run `task` with the configuration that the command line composes, once, or once a job of a sweep.

    Returns the exit status. Raises ConfigError for a command line that composes nothing.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    sys.argv[1:] = as_hydra(sys.argv[1:])
    failed: list[Exception] = []

    def job(cfg: DictConfig) -> None:
        try:
            task(cfg)
        except Exception as error:  # out of Hydra's sight: it would print a line of its own
            failed.append(error)
            sys.exit(1)

    try:
        hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")(job)()
    except (HydraException, OmegaConfBaseException, ValueError, OSError) as error:
        raise ConfigError(_sentence(error)) from error
    except SystemExit as end:
        if failed and isinstance(failed[0], OmegaConfBaseException):
            raise ConfigError(_sentence(failed[0])) from None
        if failed:
            raise failed[0] from None
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


def contained(cfg: DictConfig, run_dir: Path) -> DictConfig:
    """Return the configuration by itself: Hydra's interpolations resolved, its folders absolute."""
    cfg = cfg.copy()
    if not OmegaConf.is_interpolation(cfg, "run_dir") and not cfg.run_dir:
        raise ConfigError(f"run_dir={cfg.run_dir} must name a folder")
    cfg.run_dir = str(run_dir)
    root = cfg.data.get("root")
    if root is not None:
        if not isinstance(root, str):
            raise ConfigError(f"data.root={root} must name a folder")
        cfg.data.root = str(Path(root).expanduser().absolute())
    return cfg


def _sentence(error: Exception) -> str:
    """Say Hydra's complaint on one line, and what was meant if a key is nearly right."""
    text = str(error.__cause__ if isinstance(error.__cause__, HydraException) else error)
    text = re.sub(r"\s*Set the environment variable HYDRA_FULL_ERROR=1.*", "", text)
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        return f"there is no {key[1]} in the configuration{_suggestion(key[1])}; --cfg job shows all there is"
    text = re.sub(r"\s*Available options in '[^']*':\s*", "; choose one of: ", text)
    choices = text.partition("choose one of: ")
    if choices[1]:
        names = ", ".join(line.strip() for line in choices[2].splitlines() if line.strip())
        text = "".join((choices[0], choices[1], names.split(", Config search path")[0]))
    return " ".join(text.split())


def _suggestion(key: str) -> str:
    files = conf_dir().glob("*/*.yaml")
    keys = {str(k) for k in OmegaConf.load(conf_dir() / "config.yaml")}
    keys |= {name for path in files for name in _dotted(path)}
    close = difflib.get_close_matches(key, keys - {key}, n=1)
    return f"; did you mean {close[0]}" if close else ""


def _dotted(path: Path) -> list[str]:
    """Name a group's file and its keys, as they are overridden."""
    group, content = path.parent.name, OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    if "@package _global_" in path.read_text():  # it sets keys of the top, and may have a group's below them
        content = content.get(group) or {}
    places = ["codec.forward", "codec.backward"] if group == "codec" else [group]
    return [name for place in places for name in (place, *(f"{place}.{key!s}" for key in content))]
