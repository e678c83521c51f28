"""The command line: how overrides are written, and error messages.

Hydra composes the configuration. Its own error report has several lines and, inside a job, a traceback. With
HYDRA_FULL_ERROR it raises its exceptions, and each becomes one sentence here. This module does not import
torch, so that scripts/compare.py can read overrides without it.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from logging import getLevelNamesMapping
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import hydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipetrain.choices import conf_dir
from pipetrain.commands.usage import usage
from pipetrain.ending import unread
from pipetrain.errors import ConfigError, one_line
from pipetrain.schedule.actions import ScheduleError

CODECS = ("codec.forward", "codec.backward")
ALL = "--cfg job shows all there is"
MAY_BE_NULL = {"data.sample", "data.train", "data.test"}  # mappings that some data sets do without

# Keys that need `++` in Hydra: arguments of a `_target_`, and parts of what may also be a plain value.
_ADDED = re.compile(
    r"(model|schedule|optim|correction|task|loss|metrics|codec\.(forward|backward)"
    r"|data\.(source|augment|train|test|columns|sample))\.[^=]+="
    r"|(partition\.profile|trace\.windows|lr_schedule\.\w+)="
)
_NO_OUTPUTS = [
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "++hydra.job_logging.root=null",
    "++hydra.hydra_logging.root=null",
]
_OVERRIDE = re.compile(r"~|[^-][^=]*=")
# Flags by which something is printed, and nothing runs.
_ASKING = {"--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i"}
# A choice from one group for each of two packages, which Hydra writes as GROUP@PACKAGE=NAME.
_CODEC = re.compile(r"^([+~]*)(codec\.(?:forward|backward)=)")

OmegaConf.register_new_resolver("name_of", lambda target: str(target).rpartition(".")[2], replace=True)

OmegaConf.register_new_resolver(  # another one is refused once there is a log to say so
    "level_of",
    lambda level: str(level).upper() if str(level).upper() in getLevelNamesMapping() else "INFO",
    replace=True,
)


def as_hydra(words: Sequence[str]) -> list[str]:
    """Return a command line's arguments in Hydra's syntax."""
    if {"-m", "--multirun"} & {*words}:  # a sweep has a folder for each job in that of the sweep
        words = [re.sub(r"^\+*run_dir=", "hydra.sweep.dir=", word) for word in words]
    return [f"++{word}" if _ADDED.match(word) else _CODEC.sub(r"\1codec@\2", word) for word in words]


def quoted(value: str) -> str:
    """Quote a value for Hydra's override grammar, if needed."""
    if re.fullmatch(r"[\w./-]+", value, re.ASCII):
        return value
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + "'"


class _JobFailed(BaseException):
    """Carries a job's error past Hydra, which prints a line for each Exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def compose(
    name: str,
    task: Callable[[DictConfig], None],
    refused: Callable[[], None] = lambda: None,
    leads: bool = True,
    outputs: bool = True,
) -> int:
    """Run `task` with the command line's configuration, once per job of a sweep; return the exit status.

    `refused` is called within a job that ends with one of the errors of an invalid configuration. A process
    that does not lead prints nothing; it makes no folder and no log, nor does one without `outputs`. Raises
    the errors of `task`, and ConfigError if the configuration is invalid.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    words = sys.argv[1:]
    if not leads and any(word.partition("=")[0] in _ASKING for word in words):
        return 0

    def job(cfg: DictConfig) -> None:
        try:
            _refuse_unread_keys(cfg, name)
            task(cfg)
        except Exception as error:
            if isinstance(error, ConfigError | ScheduleError | OmegaConfBaseException):
                refused()
            raise _JobFailed(error) from error

    try:
        if {"-h", "--help"} & {*words}:
            print(usage(conf_dir(), name, words), end="", flush=True)
            return 0
        for word in words:
            _refuse_word(word)
        sys.argv[1:] = as_hydra(words)
        with nullcontext() if leads and outputs else _without_outputs():
            hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")(job)()
    except _JobFailed as failed:
        if isinstance(failed.error, OmegaConfBaseException):
            raise ConfigError(_sentence(failed.error, _known(name))) from failed.error
        raise failed.error from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_sentence(error, _known(name))) from error
    except BrokenPipeError:  # of --help and --cfg
        return unread()
    except OSError as error:
        why = f"{error.filename}: {error.strerror}"
        raise ConfigError(f"the folder of the run cannot be made: {why}; choose another run_dir") from error
    except SystemExit as end:  # raised by Hydra's argument parser
        return end.code if isinstance(end.code, int) else int(bool(end.code))
    return 0


@contextmanager
def _without_outputs() -> Iterator[None]:
    """Let Hydra log nothing, and make no folder but that of a sweep, which is removed."""
    words, folder = sys.argv[1:], Path(gettempdir(), f"pipetrain-{os.getpid()}")
    overrides = [index for index, word in enumerate(words, 1) if _OVERRIDE.match(word)]
    end = overrides[-1] if overrides else len(words)  # argparse takes overrides in one row, or refuses them
    sys.argv[1:] = [*words[:end], *_NO_OUTPUTS, f"hydra.sweep.dir={quoted(str(folder))}", *words[end:]]
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def composed(name: str, words: Sequence[str]) -> DictConfig:
    """Return the configuration of a command line of which nothing runs. Raises ConfigError."""
    for word in words:
        _refuse_word(word)
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            cfg = hydra.compose(name, overrides=as_hydra(words))
        _refuse_unread_keys(cfg, name)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_sentence(error, _known(name))) from error
    return cfg


def _refuse_unread_keys(cfg: DictConfig, name: str) -> None:
    content: Any = OmegaConf.to_container(cfg, resolve=False)
    _refuse_unread(content, _known(name), str(content))


def as_mapping(cfg: DictConfig) -> dict[str, Any]:
    """Return a configuration's values as dicts and lists."""
    content: Any = OmegaConf.to_container(cfg, resolve=True)
    return content  # type: ignore[no-any-return]


def contained(cfg: DictConfig, run_dir: Path) -> DictConfig:
    """Return the configuration with Hydra's interpolations resolved and absolute folders."""
    cfg = cfg.copy()
    if not OmegaConf.is_interpolation(cfg, "run_dir") and not cfg.run_dir:
        raise ConfigError(f"run_dir={cfg.run_dir} must name a folder")
    cfg.run_dir = str(run_dir)
    root = cfg.data.get("root")
    if root is not None:
        cfg.data.root = str(Path(str(root)).expanduser().absolute())
    return cfg


def _refuse_word(word: str) -> None:
    """Refuse a group's choice that is not a name, for which Hydra's error lacks the key."""
    key, _, value = word.lstrip("+").partition("=")
    choices = sorted(path.stem for path in (conf_dir() / ("codec" if key in CODECS else key)).glob("*.yaml"))
    several = key in ("logger", "correction") and value.startswith("[")
    if key and choices and not several and not re.match(r"(?!(null|true|false)$)\w*[A-Za-z_]", value):
        raise ConfigError(f"{word} must be a name; choose one of: {', '.join(choices)}")


def _sentence(error: BaseException, known: Collection[str]) -> str:
    """Return Hydra's error on one line, with a suggestion for an unknown key, which its text alone names."""
    error = error.__cause__ if isinstance(error.__cause__, HydraException) else error
    text = one_line(error)
    if isinstance(error, MissingConfigException):
        choices = f": choose one of {', '.join(error.options)}" if error.options else ""
        return f"there is no {error.missing_cfg_file}{choices}"
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read: {text}"
    if key := re.search(r"Could not override '([^']+)'", text):
        return f"there is no {key[1]} in the configuration{_suggestion(key[1], known)}; {ALL}"
    return text


def _suggestion(key: str, known: Collection[str]) -> str:
    parts = sorted(other for other in known if other.startswith(f"{key}."))
    if key in known and not parts:
        return f"; it belongs to another choice of {key.partition('.')[0]}="
    meant = " or ".join(parts or difflib.get_close_matches(key, known, n=1))
    return meant and f"; did you mean {meant}"


def _refuse_unread(content: Mapping[str, Any], known: Collection[str], text: str, prefix: str = "") -> None:
    """Refuse a key that nothing reads, not even an interpolation in `text`, or that must have parts."""
    for name, value in content.items():
        key = f"{prefix}{name}"
        parts = sorted(other for other in known if other.startswith(f"{key}."))
        if key not in known and not re.search(rf"\$\{{{re.escape(key)}\b", text):
            raise ConfigError(f"nothing reads {key}{_suggestion(key, known)}; {ALL}")
        if parts and not isinstance(value, dict) and not (value is None and key in MAY_BE_NULL):
            raise ConfigError(f"{key} must be given by its parts: {'=, '.join(parts)}=")
        if parts and value is not None:
            _refuse_unread(value, known, text, f"{key}.")


@cache
def _known(name: str) -> set[str]:
    """Return the keys of the files in conf/, as written in an override."""
    files = [("", conf_dir() / f"{stem}.yaml") for stem in ("config", name)]
    files += [
        (f"{group}.", path) for group in ("data", "logger") for path in (conf_dir() / group).glob("*.yaml")
    ]
    known = {*CODECS, *(path.parent.name for path in conf_dir().glob("*/*.yaml"))}
    for prefix, path in files:
        known.update(_keys(OmegaConf.to_container(OmegaConf.load(path)), prefix))
    return known - {"defaults"}


def _keys(content: Any, prefix: str) -> Iterator[str]:
    for name, value in content.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict) and "_target_" not in value:
            yield from _keys(value, f"{prefix}{name}.")
