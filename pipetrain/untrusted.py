"""Reading untrusted files: the file may be of any kind, and its JSON may have any content.

A checksum shows damage, but not who wrote the file. Only regular files are opened, and each value is checked
against its type and bounds before use; the only error that leaves this module is DamagedCheckpoint.
"""

from __future__ import annotations

import json
import os
import reprlib
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pipetrain.errors import ConfigError

MOST_NESTED = 50
_END = 2**63  # numbers must be below it


class DamagedCheckpoint(ConfigError):
    """A checkpoint that cannot be used; the message names the file and what is wrong with it."""


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file only. Raises DamagedCheckpoint, also for errors while it is read."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DamagedCheckpoint(f"{path} is no regular file")
            yield file
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path, most: int) -> Any:
    """Read JSON of at most `most` bytes and MOST_NESTED levels. Raises DamagedCheckpoint."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise DamagedCheckpoint(f"{path} has {size} bytes, and {most} at most are read")
        text = file.read(size)
    try:
        data = json.loads(text.decode())
        json.dumps(data, ensure_ascii=False).encode()  # fails for a string with a lone surrogate
        if _depth(data) > MOST_NESTED:
            raise ValueError(f"nested more than {MOST_NESTED} deep")
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is no JSON of ours: {error}") from error
    return data


def _depth(data: object) -> int:
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return 1 + max(map(_depth, inner), default=0)


def read_as(kind: Any, data: Any, where: str) -> Any:
    """Build a value of type `kind` (dataclass, list, mapping, int, float, bool, str, Any) from JSON data.

    `kind | None` is null or one of these. A dataclass needs exactly its fields. Integers are in [0, 2**63),
    floats are finite and of size below 2**63; an Annotated float may be infinite or NaN. Raises
    DamagedCheckpoint, whose message starts with `where`.
    """
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        return None if data is None else read_as(inner[0], data, where)
    if is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        if not isinstance(data, dict) or data.keys() != hints.keys():
            raise _wrong(where, f"an object of {', '.join(hints)}", data)
        values = {key: read_as(hint, data[key], f"{where}: {key}") for key, hint in hints.items()}
        return kind(**values)  # type: ignore[operator]
    if origin is list and isinstance(data, list):
        return [read_as(inner[0], item, f"{where}: {number}") for number, item in enumerate(data)]
    if origin in (dict, Mapping) and isinstance(data, dict):
        read_key = str if inner[0] is str else lambda key: _whole(key, where)
        return {
            read_key(key): read_as(inner[1], item, f"{where}: {reprlib.repr(key)}")
            for key, item in data.items()
        }
    number = isinstance(data, int | float) and not isinstance(data, bool)
    fits = {
        Any: True,
        str: isinstance(data, str),
        bool: isinstance(data, bool),
        int: number and isinstance(data, int) and 0 <= data < _END,
        float: number and abs(data) < _END,
        Annotated: number and (isinstance(data, float) or abs(data) < _END),
    }
    if not fits.get(origin, False):
        raise _wrong(where, _NAMES[origin], data)
    return data


_NAMES: dict[Any, str] = {
    int: "a whole number from 0",
    float: "a finite number",
    Annotated: "a number",
    str: "a string",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    Mapping: "an object",
}


def _whole(key: str, where: str) -> int:
    if not key.isdecimal() or key != str(number := int(key[:19])):
        raise _wrong(where, "an object whose keys are whole numbers", key)
    return number


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _wrong(where: str, wanted: str, data: object) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{where} must be {wanted}, and is {reprlib.repr(data)}")
