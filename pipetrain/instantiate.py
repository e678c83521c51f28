"""Finds the object of a `_target_` by its dotted name, and calls it with the other keys as arguments.

`_args_` are positional arguments. With `_partial_` the result is a partial function. Each `_target_` in the
arguments is called first; with `_recursive_: false` they are passed unchanged.
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
    """Stands for a reference to a missing value; the text names it."""

    why: str


class NotMade(Exception):
    """Why something cannot be made; the cause is the error of the called function, if any."""


class RefersToNothing(NotMade):
    """An argument refers to a missing value."""


def located(name: Any) -> Any:
    """Return the object with a dotted name, importing modules as necessary. Raises ImportError."""
    parts = str(name).split(".")
    try:
        located_object: Any = import_module(parts[0])
        for end, part in enumerate(parts[1:], 2):
            try:
                located_object = getattr(located_object, part)
            except AttributeError:
                if not isinstance(located_object, ModuleType):
                    raise
                located_object = import_module(".".join(parts[:end]))
    except Exception as error:  # a user's module may raise anything
        why = f"{type(error).__name__}: {one_line(error)}"
        raise ImportError(f"Error loading {str(name)!r}: {why}") from error
    return located_object


def make(node: Any, later: bool = False) -> Any:
    """Return a value with each `_target_` in it called, except the outermost if `later`. Raises NotMade."""
    if isinstance(node, Unresolved):
        raise RefersToNothing(node.why)
    if isinstance(node, list | tuple):
        return [make(item) for item in node]
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
        keywords = make(arguments) if node.get("_recursive_", True) else arguments
        call = partial(function, *keywords.pop("_args_", ()), **keywords)
        return call if later or node.get("_partial_", False) else call()
    except NotMade:
        raise
    except Exception as error:  # the called function may raise anything
        raise NotMade(f"{type(error).__name__}: {one_line(error)}") from error
