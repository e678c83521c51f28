"""JSON as typed documents: `read_as` makes a dataclass, field by field, from what `asdict` has written."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import is_dataclass
from errno import EINVAL
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from pipetrain.errors import ConfigError

MOST_BYTES = 2**28  # per document


class DamagedCheckpoint(ConfigError):
    """A checkpoint that cannot be used; the message names the file and the fault."""


class OtherFormat(ConfigError):
    """A checkpoint that only another version of pipetrain can read."""


def refuse_device(path: Path) -> None:
    """Refuse anything but a file: reading a pipe or a device may never end. Raises OSError."""
    if path.exists() and not path.is_file():
        raise OSError(EINVAL, "it is no regular file")


def read_json(path: Path) -> Any:
    """Read JSON of at most MOST_BYTES. Raises DamagedCheckpoint."""
    try:
        refuse_device(path)
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"over {MOST_BYTES} bytes")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is no JSON of ours: {error}") from error


def read_as(kind: Any, data: Any, where: str) -> Any:
    """Build a value of type `kind` (dataclass, list, mapping, int, float, bool, str, Any) from JSON data.

    `kind | None` is null or one of these. A dataclass needs exactly its fields. Raises DamagedCheckpoint with
    a message that starts with `where`.
    """
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        return None if data is None else read_as(inner[0], data, where)
    if is_dataclass(origin) and isinstance(data, dict):
        hints = get_type_hints(origin)
        if data.keys() == hints.keys():
            return kind(**{key: read_as(hints[key], data[key], f"{where}: {key}") for key in hints})
    if origin is list and isinstance(data, list):
        return [read_as(inner[0], item, f"{where}: {number}") for number, item in enumerate(data)]
    if origin in (dict, Mapping) and isinstance(data, dict):
        try:
            keys = [inner[0](key) for key in data]  # text in JSON
        except ValueError as error:
            raise DamagedCheckpoint(f"{where} must have whole numbers as keys: {error}") from error
        return {
            key: read_as(inner[1], item, f"{where}: {key}")
            for key, item in zip(keys, data.values(), strict=True)
        }
    if kind is Any or type(data) is kind or (kind is float and type(data) is int):
        return data
    fields = f"an object of {', '.join(get_type_hints(origin))}" if is_dataclass(origin) else ""
    expected = fields or f"of type {origin.__name__}"
    raise DamagedCheckpoint(f"{where} must be {expected}, and is {reprlib.repr(data)}")
