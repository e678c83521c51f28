"""Hydra at the edge: the commands compose their configuration here, and a mistake in it is one sentence.

Hydra's own report of a mistake is several lines and, inside a job, a traceback. With HYDRA_FULL_ERROR it lets
its exceptions through instead, and they are said here.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipetrain.config import conf_dir
from pipetrain.errors import ConfigError
from pipetrain.overrides import as_hydra

READ_WHOLE = ("partition", "trace")  # a value or a mapping: whoever reads it knows which


def compose(name: str, task: Callable[[DictConfig], None]) -> int:
    """Run `task` with the configuration that the command line composes, once, or once a job of a sweep.

    Returns the exit status. Raises ConfigError for a command line that composes nothing.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    for word in sys.argv[1:]:
        _refuse_choice(word)
    sys.argv[1:] = as_hydra(sys.argv[1:])
    failed: list[Exception] = []

    def job(cfg: DictConfig) -> None:
        try:
            _refuse_unread(cfg, name)
            task(cfg)
        except Exception as error:  # out of Hydra's sight: it would print a line of its own
            failed.append(error)
            sys.exit(1)

    try:
        hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")(job)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_sentence(error)) from error
    except OSError as error:
        made = f"{error.filename}: {error.strerror}"
        raise ConfigError(f"the folder of the run cannot be made: {made}; choose another run_dir") from error
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


def _refuse_choice(word: str) -> None:
    """Refuse a word of the wrong kind for its key, which Hydra answers in riddles."""
    group, given, value = word.lstrip("+").partition("=")
    folder = conf_dir() / group
    if group == "run_dir" and re.fullmatch(r"null|[\[{].*", value):
        raise ConfigError(f"{word} must be a folder")
    parts = sorted(key for key in _known(("config",)) if key.startswith(f"{group}."))
    chosen = folder.is_dir() or group.startswith("codec.") or group in READ_WHOLE
    if given and parts and not chosen and not value.startswith("{"):
        raise ConfigError(f"{word} must be given by its parts: {'=, '.join(parts)}=")
    if not group.isidentifier() or not folder.is_dir() or (group, value) == ("experiment", "null"):
        return
    if value == "null" or not re.match(r"\w*[A-Za-z_]", value):
        choices = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
        raise ConfigError(f"{group}={value} must be a name; choose one of: {choices}")


def _sentence(error: Exception) -> str:
    """Say Hydra's complaint on one line, and what was meant if a key is nearly right."""
    text = str(error.__cause__ if isinstance(error.__cause__, HydraException) else error)
    text = re.split(r"\s*(?:Set the environment variable HYDRA_FULL_ERROR=1|full_key: )", text)[0]
    key = re.search(r"Could not override '([^']+)'", text)
    if key:
        meant = _suggestion(key[1], _known(("config", "plan")))
        return f"there is no {key[1]} in the configuration{meant}; --cfg job shows all there is"
    text = re.sub(r"\s*Available options in '[^']*':\s*", "; choose one of: ", text)
    choices = text.partition("choose one of: ")
    if choices[1]:
        names = ", ".join(line.strip() for line in choices[2].splitlines() if line.strip())
        text = "".join((choices[0], choices[1], names.split(", Config search path")[0]))
    return " ".join(text.split())


def _refuse_unread(cfg: DictConfig, name: str) -> None:
    """Refuse a key that nothing reads, as one with a plus may be; what a `_target_` takes is read."""
    known, content = _known((name, "config")), OmegaConf.to_container(cfg, resolve=False)
    for key in _keys(content, arguments=False):
        if key not in known and not re.search(rf"\$\{{{re.escape(key)}\b", str(content)):
            raise ConfigError(f"nothing reads {key}{_suggestion(key, known)}; --cfg job shows all there is")


def _suggestion(key: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(key, set(known) - {key}, n=1)
    return f"; did you mean {close[0]}" if close else ""


@cache
def _known(names: tuple[str, ...]) -> set[str]:
    """Name all keys that the files of conf/ have, as they are overridden."""
    paths = [*(conf_dir() / f"{name}.yaml" for name in names), *conf_dir().glob("*/*.yaml")]
    known = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    for path in paths:
        content, group = _content(path), path.parent.name
        if path.parent == conf_dir() or "@package _global_" in path.read_text():  # it sets keys of the top
            known.update(_keys(content))
        else:
            places = ["codec.forward", "codec.backward"] if group == "codec" else [group]
            known.update(_keys(dict.fromkeys(places, content)))
    return known - {"defaults"}


@cache
def _content(path: Path) -> Any:
    return OmegaConf.to_container(OmegaConf.load(path))


def _keys(content: Any, arguments: bool = True) -> Iterator[str]:
    """Give the dotted keys of a configuration, with or without the `arguments` of its `_target_`s."""
    for key, value in content.items():
        yield key
        if isinstance(value, dict) and key not in READ_WHOLE and (arguments or "_target_" not in value):
            yield from (f"{key}.{name}" for name in _keys(value, arguments))
