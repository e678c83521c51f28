"""The state that decides which samples loaders give next, to JSON and back: generators, counts, state_dicts.

It is read at the beginning of an epoch: later, data workers and prefetching are further ahead. It includes
the generators of Python and NumPy; torch's is saved per rank.
"""

from __future__ import annotations

import logging
import random
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipetrain.data.loader_facts import parts_of
from pipetrain.model.packing import State, from_bytes, from_json, state_of, to_bytes, to_json

log = logging.getLogger("pipetrain")

MOST_NUMBERS = 2**16  # in a list that a sampler may shuffle in place
_READ = "__iter__", "__getitem__"
_NUMBERS = {int, float, type(None)}  # no bool: it is a flag of what a process has opened or begun


class LoaderStates:
    """The states of loaders by name. Must be made before they are read."""

    def __init__(self, **loaders: object) -> None:
        self._loaders = loaders
        self._lost: set[str] = set()  # parts with a warning
        for path, part in self._parts().items():
            _made(part)
            if _persistent(part):
                self._lose(
                    path,
                    "has persistent workers, and what they draw is not in a checkpoint, so if the data set "
                    "draws a resumed training sees other samples: with persistent_workers=False the same",
                )

    def read(self) -> Tensor:
        """Return the states as bytes of JSON, uint8 [n]."""
        states, counts = dict[str, Any](), dict[str, dict[str, Any]]()
        for path, part in self._parts().items():
            if access := _access(part):
                try:
                    states[path] = to_json(access.get())
                except TypeError as error:
                    self._lose(
                        path,
                        f"has a state_dict with {error}, which a checkpoint cannot keep, so a resumed "
                        f"training may see other samples: let it have numbers, texts, lists and tensors",
                    )
            initial = _made(part)
            counts[path] = {
                name: value
                for name, value in _numbers(part).items()
                if name not in initial or initial[name] != value
            }
        return to_bytes([states, counts])

    def restore(self, saved: Tensor) -> None:
        """Restore states that `read` has returned, for loaders made in the same way."""
        states, counts = from_bytes(saved)
        parts = self._parts()
        for path in sorted(parts, key=lambda path: not _persistent(parts[path])):  # workers begin to read
            if path in states and (access := _access(parts[path])):
                access.set(from_json(states[path]))
        for path, part in parts.items():
            current, then = _numbers(part), {**_made(part), **counts.get(path, {})}
            for name in {**current, **counts.get(path, {})}:
                if name not in then and hasattr(type(part), name):  # the initial value
                    delattr(part, name)
                elif name in then and current.get(name) != then[name]:
                    setattr(part, name, deepcopy(then[name]))

    def _parts(self) -> dict[str, Any]:
        return {"python": random, "numpy": np.random, **parts_of(self._loaders)}

    def _lose(self, path: str, why: str) -> None:
        if path not in self._lost:
            self._lost.add(path)
            log.warning("pipetrain: the loader %s %s", path, why)


_first_seen: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def _made(part: Any) -> dict[str, Any]:
    """Return the numbers that a part was made with, if it has no state_dict."""
    try:
        return {} if _has_own_state(part) else _first_seen.setdefault(part, _numbers(part))
    except TypeError:  # it has no hash, or no weak reference
        return {}


def _numbers(part: Any) -> dict[str, Any]:
    """Return the numbers by which a loader, sampler or data set may count what it has read."""

    def plain(value: Any) -> bool:
        return type(value) in _NUMBERS or (
            type(value) is list and len(value) <= MOST_NUMBERS and all(type(n) in _NUMBERS for n in value)
        )

    attributes = vars(part) if hasattr(part, "__dict__") and any(map(partial(hasattr, part), _READ)) else {}
    return {name: deepcopy(value) for name, value in attributes.items() if plain(value)}


def _persistent(part: Any) -> bool:
    return isinstance(part, DataLoader) and part.persistent_workers and part.num_workers > 0


def _has_own_state(part: Any) -> bool:
    """Return whether a loader or sampler has its own state; a DataLoader's state is that of its parts."""
    has_state = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
    return has_state and hasattr(part, "__iter__") and not isinstance(part, DataLoader | Dataset)


def _access(part: Any) -> State | None:
    """Return the access to a part's state apart from its counts; None: it has none.

    A DataLoader with persistent workers draws their seed once: its state is whether they have begun.
    """
    if _has_own_state(part):
        return State(part.state_dict, part.load_state_dict)
    if _persistent(part):
        return State(lambda: part._iterator is not None, partial(_begin, part))
    return state_of(part)


def _begin(loader: DataLoader[Any], has_begun: bool) -> None:
    if has_begun and loader._iterator is None:
        iter(loader)
    elif not has_begun:
        loader._iterator = None
