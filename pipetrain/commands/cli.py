"""The command line: how overrides are written, and error messages.

Hydra composes the configuration. Its own error report has several lines and, inside a job, a traceback. With
HYDRA_FULL_ERROR it raises its exceptions, and each becomes one sentence here. This module does not import
torch, so that scripts/compare.py can read overrides without it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from functools import cache
from logging import getLevelNamesMapping
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipetrain.commands.help_text import usage
from pipetrain.config.choices import conf_dir, names_of, nearest
from pipetrain.errors import ConfigError, one_line
from pipetrain.exit import unread
from pipetrain.instantiate import Unresolved
from pipetrain.rules import PATH

CODECS = ("codec.forward", "codec.backward")
_BUILT = ("model", "optim", "task", "schedule")  # groups of what a _target_ builds
ALL = "--cfg job shows all there is"
MAY_BE_NULL = {
    "data.sample",
    "data.train",
    "data.test",
    "data.collate",
}  # mappings that some data sets do without

# Keys that need `++` in Hydra: arguments of a `_target_`, and parts of what may also be a plain value.
_ADDED = re.compile(
    r"(model|schedule|optim|correction|task|loss|metrics|codec\.(forward|backward)"
    r"|data\.(source|augment|train|test|columns|sample|collate))\.[^=]+="
    r"|(partition\.profile|trace\.windows|lr_schedule\.\w+)="
)
_NO_OUTPUTS = [
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "++hydra.job_logging.root=null",
    "++hydra.hydra_logging.root=null",
]
# A choice from one group for each of two packages, which Hydra writes as GROUP@PACKAGE=NAME.
_CODEC = re.compile(r"^([+~]*)(codec\.(?:forward|backward)=)")

OmegaConf.register_new_resolver("name_of", lambda target: str(target).rpartition(".")[2], replace=True)

OmegaConf.register_new_resolver(  # another one is refused once there is a log to say so
    "level_of",
    lambda level: str(level).upper() if str(level).upper() in getLevelNamesMapping() else "INFO",
    replace=True,
)


def in_order(words: Sequence[str], name: str) -> list[str]:
    """Return a command line with Hydra's flags first, between which it takes no overrides.

    Raises ConfigError for a word that is neither, nor the value of a flag.
    """
    actions = get_args_parser()._option_string_actions
    flags, overrides = list[str](), list[str]()
    for before, word, after in zip(["", *words], words, [*words[1:], "="], strict=False):
        flag, equals, value = word.partition("=")
        if word.startswith("~") or (equals and not word.startswith("-")):
            overrides.append(word)
        elif flag in actions or (before in actions and not word.startswith("-")):
            flags.append(word)
        else:
            value = value or ("VALUE" if re.match("[-~]|.*=", after) else after)
            meant = nearest(flag.lstrip("-"), _options(name))
            example = " or ".join(f"{key}={value}" for key in meant) or "OPTION=VALUE"
            raise ConfigError(
                f"{word} cannot be read: options are written as {example}, flags as --FLAG=VALUE; see --help"
            )
    return [*flags, *overrides]


def as_hydra(words: Sequence[str]) -> list[str]:
    """Return a command line's arguments in Hydra's syntax. Raises ConfigError for what is no choice."""
    for word in words:
        _refuse_word(word)
    if {"-m", "--multirun"} & {*words}:  # a sweep has a folder for each job in that of the sweep
        words = [re.sub(r"^\+*run_dir=", "hydra.sweep.dir=", word) for word in words]
    words = [_CODEC.sub(r"\1codec@\2", word) for word in words]
    return [_readable(f"++{word}" if _ADDED.match(word) else word) for word in words]


def _readable(word: str) -> str:
    """Return an override with quotes where Hydra cannot read its value, or would not as a folder's name."""
    key, equals, value = word.partition("=")
    if not equals or key.startswith(("-", "~")):
        return word
    if value.startswith("~/"):  # which shells leave as it is behind a "="
        value = os.path.expanduser(value)
    read = _read(value)
    folder = key.lstrip("+") in ("run_dir", "hydra.sweep.dir") and not isinstance(read, str | None)
    return f"{key}={quoted(value) if folder or isinstance(read, HydraException) else value}"


def _read(value: str) -> Any:
    """Return what Hydra makes of a value; an error where it has no words for it."""
    try:
        return OverridesParser.create().parse_override(f"x={value}").value()
    except HydraException as error:
        return error


def quoted(value: str) -> str:
    """Quote a value for Hydra's override grammar, if it would not be read as this text."""
    if _read(value) == value:
        return value
    return "'" + re.sub(r"(\\*)('|$)", lambda end: end[1] * 2 + ("\\'" if end[2] else ""), value) + "'"


class _JobFailed(BaseException):
    """Carries a job's error past Hydra, which prints a line for each Exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def compose(
    name: str,
    task: Callable[[DictConfig], None],
    failed: Callable[[Exception], bool] = lambda error: False,
    outputs: bool = True,
) -> int:
    """Run `task` with the command line's configuration, once per job of a sweep; return the exit status.

    `failed` is called within a job that ends with an error, and says whether the sweep goes on. Without
    `outputs` no folder and no log is made. Raises the errors of `task`, and ConfigError if the configuration
    is invalid.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    words = sys.argv[1:]

    def job(cfg: DictConfig) -> None:
        try:
            _refuse_unread_keys(cfg, name)
            task(cfg)
        except Exception as error:
            if isinstance(error, OmegaConfBaseException):
                error = ConfigError(_sentence(error, name))
            if not failed(error):
                raise _JobFailed(error) from error

    try:
        if {"-h", "--help"} & {*words}:
            print(usage(name, words), end="", flush=True)
            return 0
        sys.argv[1:] = as_hydra(in_order(words, name))
        with nullcontext() if outputs else _without_outputs():
            hydra.main(config_path=str(conf_dir()), config_name=name, version_base="1.3")(job)()
    except _JobFailed as end:
        raise end.error from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_sentence(error, name)) from error
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
    folder = Path(gettempdir(), f"pipetrain-{os.getpid()}")
    sys.argv += [*_NO_OUTPUTS, f"hydra.sweep.dir={quoted(str(folder))}"]
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def composed(name: str, words: Sequence[str]) -> DictConfig:
    """Return the configuration of a command line of which nothing runs. Raises ConfigError."""
    try:
        with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
            cfg = hydra.compose(name, overrides=as_hydra(words))
        _refuse_unread_keys(cfg, name)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_sentence(error, name)) from error
    return cfg


def _refuse_unread_keys(cfg: DictConfig, name: str) -> None:
    content: Any = OmegaConf.to_container(cfg, resolve=False)
    _refuse_unread(content, name, str(content))


def overrides(kind: str = "task") -> list[str]:
    """Return the job's overrides as written: a `${...}` in one refers to the configuration, not to them."""
    words: Any = OmegaConf.to_container(getattr(HydraConfig.get().overrides, kind), resolve=False)
    return words  # type: ignore[no-any-return]


def as_mapping(cfg: DictConfig) -> dict[str, Any]:
    """Return a configuration's values as dicts and lists."""
    content: Any = OmegaConf.to_container(cfg, resolve=True)
    return content  # type: ignore[no-any-return]


def values_of(cfg: Any) -> Any:
    """Return a configuration's values as dicts and lists, with an Unresolved where one refers to nothing.

    An argument that is missing is left out where it may be given later.
    """
    if not isinstance(cfg, DictConfig | ListConfig):
        return cfg
    with suppress(OmegaConfBaseException):
        return OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    if isinstance(cfg, ListConfig):
        return [_value(cfg, n) for n in range(len(cfg))]
    later = cfg.get("_partial_") is True
    return {key: _value(cfg, key) for key in cfg if not (later and OmegaConf.is_missing(cfg, key))}


def _value(cfg: DictConfig | ListConfig, key: Any) -> Any:
    try:
        return values_of(cfg[key])
    except OmegaConfBaseException as error:
        return Unresolved(one_line(str(error).split("\n    full_key: ")[0]))


def contained(cfg: DictConfig, run_dir: Path) -> DictConfig:
    """Return the configuration with Hydra's interpolations resolved and absolute folders."""
    cfg = cfg.copy()
    if not OmegaConf.is_interpolation(cfg, "run_dir"):
        PATH.read("run_dir", cfg.run_dir)
    cfg.run_dir = str(run_dir)
    root = cfg.data.get("root")
    if root is not None:
        cfg.data.root = str(Path(str(root)).expanduser().absolute())
    return cfg


def _refuse_word(word: str) -> None:
    """Refuse a group's choice that is not a name, for which Hydra's error lacks the key."""
    key, _, value = word.lstrip("+").partition("=")
    choices = names_of("codec" if key in CODECS else key)
    is_list = key in ("logger", "correction") and value.startswith("[")
    if key and choices and not is_list and not re.match(r"(?!(null|true|false)$)\w*[A-Za-z_]", value):
        raise ConfigError(f"{word} must be a name; choose one of: {', '.join(choices)}")


def _sentence(error: BaseException, command: str) -> str:
    """Return Hydra's error on one line, with a suggestion for an unknown key, which its text alone names."""
    error = error.__cause__ if isinstance(error.__cause__, HydraException) else error
    text = one_line(error)
    if isinstance(error, MissingConfigException):
        group, _, choice = str(error.missing_cfg_file).partition("/")
        return _no_choice(group, choice, error.options or [])
    if isinstance(error, OverrideParseException):
        return f"{error.override} cannot be read: write OPTION=VALUE, with an option of --help"
    if key := re.search(r"Could not override '([^']+)'", text):
        return f"there is no {key[1]} in the configuration{_suggestion(key[1], command)}; {ALL}"
    return text


def _no_choice(group: str, name: str, options: Sequence[str]) -> str:
    """Return the sentence for a choice that a group does not have: a class or function may be meant."""
    close = " or ".join(get_close_matches(name.lower(), options, n=2))
    meant = close and f"did you mean {close}? "
    target = f", or your own by {group}._target_={name if '.' in name else 'MODULE.NAME'}"
    return (
        f"there is no {group}/{name}: {meant}choose one of {', '.join(options)}{target * (group in _BUILT)}"
    )


def _suggestion(key: str, name: str) -> str:
    keys = _known(name)
    parts = sorted(other for other in keys if other.startswith(f"{key}."))
    if key in keys and not parts:
        return f"; it belongs to another choice of {key.partition('.')[0]}="
    meant = " or ".join(parts or nearest(key, _options(name)))
    return meant and f"; did you mean {meant}"


def _refuse_unread(content: Mapping[str, Any], name: str, text: str, prefix: str = "") -> None:
    """Refuse a key that nothing reads, not even an interpolation in `text`, or that must have parts."""
    keys = _known(name)
    for part, value in content.items():
        key = f"{prefix}{part}"
        parts = sorted(other for other in keys if other.startswith(f"{key}."))
        if key not in keys and not re.search(rf"\$\{{{re.escape(key)}\b", text):
            raise ConfigError(f"nothing reads {key}{_suggestion(key, name)}; {ALL}")
        if parts and not isinstance(value, dict) and not (value is None and key in MAY_BE_NULL):
            raise ConfigError(f"{key} must be given by its parts: {'=, '.join(parts)}=")
        if parts and value is not None:
            _refuse_unread(value, name, text, f"{key}.")


@cache
def _known(name: str) -> set[str]:
    """Return the keys of the files in conf/, as written in an override."""
    files = [("", conf_dir() / f"{stem}.yaml") for stem in ("config", name)]
    files += [
        (f"{group}.", path) for group in ("data", "logger") for path in (conf_dir() / group).glob("*.yaml")
    ]
    keys = {*CODECS, *(path.parent.name for path in conf_dir().glob("*/*.yaml"))}
    for prefix, path in files:
        keys.update(_keys(OmegaConf.to_container(OmegaConf.load(path)), prefix))
    return keys - {"defaults"}


@cache
def _options(name: str) -> set[str]:
    """Return the options that a wrong one may mean: those of conf/, with arguments of what is built."""
    options = {key for key in _known(name) if key.count(".") < 2}
    for group in ("model", "optim"):
        for path in (conf_dir() / group).glob("*.yaml"):
            options.update(_keys(OmegaConf.to_container(OmegaConf.load(path)), f"{group}."))
    return {key for key in options if "._" not in key}


def _keys(content: Any, prefix: str) -> Iterator[str]:
    for name, value in content.items():
        yield f"{prefix}{name}"
        if isinstance(value, dict) and "_target_" not in value:
            yield from _keys(value, f"{prefix}{name}.")
