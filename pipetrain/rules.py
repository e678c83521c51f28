"""Rules for values from users: what each must be, in words, and the function that reads it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pipetrain.errors import ConfigError
from pipetrain.instantiate import Unresolved

_T = TypeVar("_T")
MOST = 2**53  # the largest whole number, which a float still represents
LONGEST = 256  # characters of a text in a message, as of a path
WIDEST = 80  # characters of a value in a message: a tensor or a dict may have many, in several lines


class Misfit(ConfigError):
    """A value that its rule refuses; the message begins with its key."""


class Rule(NamedTuple):
    """What a value must be, in words; `convert` reads it under its key, or raises ValueError or TypeError."""

    words: str
    convert: Callable[[str, Any], Any]

    def read(self, key: str, value: Any, null: bool = False) -> Any:
        """Return the converted value, or None if `null` allows it. Raises ConfigError."""
        if value is None and null:
            return None
        if isinstance(value, Unresolved):
            raise ConfigError(f"{key} cannot be read: {value.why}")
        try:
            return self.convert(key, value)
        except ConfigError:
            raise
        except (ValueError, TypeError, OverflowError):
            words = f"{self.words}{' or null (in Python None)' if null else ''}"
            raise Misfit(f"{key}={_shown(value)} must be {words}") from None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, str):
        value = value if len(value) < LONGEST else f"{value[:WIDEST]}..."
        return repr(value) if re.fullmatch(r"[-+.\d]+", value) else value
    words = " ".join(str(value).split())
    return words if len(words) <= WIDEST else f"{words[:WIDEST]}..."


def kept(value: Any, holds: bool) -> Any:
    """Return a value if the condition holds. Raises ValueError otherwise."""
    if not holds:
        raise ValueError
    return value


def index_of(value: Any) -> Any:
    """Return a whole number, from Python's or NumPy's types."""
    return index(kept(value, not isinstance(value, bool)))


def whole(low: int, most: int = MOST) -> Rule:
    """Return the rule for a whole number."""
    words = f"a whole number of at least {low}" + (f" and at most {most}" if most < MOST else "")
    return Rule(words, lambda key, value: kept(index_of(value), low <= value <= most))


def number(words: str, holds: Callable[[float], bool]) -> Rule:
    """Return the rule for a number."""
    return Rule(
        words,
        lambda key, value: kept(float(value), not isinstance(value, bool | str) and holds(float(value))),
    )


def instance_of(kind: type[_T], key: str, value: Any) -> _T:
    """Return a value of this class. Raises ConfigError for another."""
    if not isinstance(value, kind):
        package = ".".join(kind.__module__.split(".")[:2])
        raise ConfigError(f"{key} must be a {package}.{kind.__name__}; got {type(value).__name__}")
    return value


def decoded(value: Any) -> Any:
    """Return a text of a number as a number, as from ${oc.env:NAME}; other values unchanged."""
    for kind in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return kind(value)
    return value


def one_of(*names: str) -> Rule:
    """Return the rule for a name."""
    return Rule(f"one of {', '.join(names)}", lambda key, value: kept(str(value), str(value) in names))


def _path(value: str | PathLike[str]) -> Path:
    """Return a path. Raises ValueError for bytes that are no text."""
    str(value).encode()
    return Path(value)


def text(words: str) -> Rule:
    """Return the rule for a non-empty text."""
    return Rule(words, lambda key, value: kept(value, isinstance(value, str) and value != ""))


def _buffer_size(key: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        activations, gradients = (COUNT.convert(key, size) for size in value)
        return [activations, gradients]
    return COUNT.convert(key, value)


def _lengths(key: str, value: Any) -> list[int]:
    return [COUNT.convert(key, n) for n in (value if isinstance(value, list | tuple) and value else [value])]


COUNT = whole(1)
LENGTHS = Rule("a whole number of at least 1, or one for each length, such as [512,128]", _lengths)
BUFFERS = Rule(
    "a whole number of at least 1, or one for activations and one for gradients, such as [4,1]", _buffer_size
)
POSITIVE = number("a finite number above 0", lambda value: 0 < value < math.inf)
SHARE = number("a number from 0 to below 1", lambda value: 0 <= value < 1)
BOOL = Rule("true or false", lambda key, value: kept(value, isinstance(value, bool)))
PATH = Rule(
    "the path of a file or a folder",
    lambda key, value: _path(kept(value, isinstance(value, str | PathLike) and str(value) != "")),
)
