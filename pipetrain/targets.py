"""What a `_target_` names: found by its dotted name, and called with what stands beside it.

`_args_` are its positional arguments. With `_partial_` its call is left to others. Each `_target_` in its
arguments is called first; with `_recursive_: false` they are as they are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from pipetrain.errors import one_line

_OWN = ("_target_", "_partial_", "_recursive_", "_convert_")


@dataclass(frozen=True, slots=True)
class Unresolved:
    """What stands where a value refers to another that there is not; the text says to which."""

    why: str


class NotMade(Exception):
    """Why something cannot be made; the cause is an error of what was called, if it was."""


class RefersToNothing(NotMade):
    """An argument refers to a value that there is not."""


def located(name: Any) -> Any:
    """Return what a dotted name names, importing modules as necessary. Raises ImportError."""
    parts = str(name).split(".")
    try:
        found: Any = import_module(parts[0])
        for end, part in enumerate(parts[1:], 2):
            try:
                found = getattr(found, part)
            except AttributeError:
                if not isinstance(found, ModuleType):
                    raise
                found = import_module(".".join(parts[:end]))
    except Exception as error:  # a user's module may raise anything
        why = f"{type(error).__name__}: {one_line(error)}"
        raise ImportError(f"Error loading {str(name)!r}: {why}") from error
    return found


def make(node: Any, later: bool = False) -> Any:
    """Return a value with each `_target_` in it called, but its own if `later`. Raises NotMade."""
    if isinstance(node, Unresolved):
        raise RefersToNothing(node.why)
    if isinstance(node, list | tuple):
        return [make(each) for each in node]
    if not isinstance(node, Mapping):
        return node
    if "_target_" not in node:
        return {key: make(value) for key, value in node.items()}
    arguments = {key: value for key, value in node.items() if key not in _OWN}
    try:
        function = located(node["_target_"])
        if not callable(function):
            kind = type(function).__name__
            raise NotMade(f"Expected a callable target, got {str(function)!r} of type {kind!r}")
        given = make(arguments) if node.get("_recursive_", True) else arguments
        call = partial(function, *given.pop("_args_", ()), **given)
        return call if later or node.get("_partial_", False) else call()
    except NotMade:
        raise
    except Exception as error:  # so may what is called
        raise NotMade(f"{type(error).__name__}: {one_line(error)}") from error
