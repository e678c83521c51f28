"""The attributes of an optimizer, a scheduler or a layer, as tensors for a checkpoint.

Saved are attributes that have changed since the start, so that a resumed run may have other options, and
entries of an optimizer's own `state_dict()` that torch's does not have. If a value cannot be packed, only its
replacement by another object is noticed, with one warning that it is not saved.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetrain.model.packing import ABSENT, from_bytes, packed, to_bytes, unpacked
from pipetrain.model.specs import bytes_of

log = logging.getLogger("pipetrain")

_OF_MODULE = {"_parameters", "_buffers", "_modules", "training"}  # saved elsewhere
_ENTRIES, _STATE_OF_NO_PARAMETER = "state_dict()", "state of no parameter"  # an optimizer's
_NO_FORMAT = torch.empty(0)  # no tensor has its layout


class AttributeState:
    """The attributes of `owners`, by name, at the start. `tensors`: parameters and buffers by name."""

    def __init__(self, owners: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._owners = {name: owner for name, owner in owners.items() if owner is not None}
        self._named_objects: dict[str, Any] = {**tensors, **self._owners}
        self._device = next((t.device for t in tensors.values()), _NO_FORMAT.device)
        for name, owner in self._owners.items():
            if isinstance(owner, Optimizer):
                self._named_objects[f"{name}/state"] = owner.state
                self._named_objects[f"{name}/param_groups"] = owner.param_groups
                self._named_objects |= {f"{name}/{n}": group for n, group in enumerate(owner.param_groups)}
        self._names = {id(named): name for name, named in self._named_objects.items()}
        self._warned = set[str]()
        self._initial_marks = {path: self._fingerprint(value) for path, _, value in self._values()}
        self._initial_values = dict[str, tuple[Any, list[Tensor]]]()
        for path, owner, value in self._values():
            if isinstance(self._initial_marks[path], str):
                tree, numbers = self._packed(value)
                if not (numbers and isinstance(owner, nn.Module)):  # a layer's tensors may be large
                    self._initial_values[path] = tree, [tensor.clone() for tensor in numbers]

    def changed(self) -> dict[str, list[Tensor]]:
        """Return what has changed, by path: the JSON of a tree, and its tensors."""
        trees: dict[str, list[Tensor]] = {}
        for path, _, value in self._values():
            fingerprint, initial = self._fingerprint(value), self._initial_marks.get(path)
            if isinstance(fingerprint, str) and fingerprint != initial:
                tree, tensors = self._packed(value)
                trees[path] = [to_bytes([tree, [t.device.type == "cpu" for t in tensors]]), *tensors]
            elif fingerprint is not initial and not isinstance(fingerprint, str):
                self._warn(path, f"is a {type(value).__name__}, which no checkpoint keeps")
        return trees

    def restore(self, saved: Mapping[str, Sequence[Sequence[Tensor]]]) -> None:
        """Set attributes to what stages have saved, and others to their values at the start."""
        for path, owner, value in [*self._values()]:
            fingerprint, initial = self._fingerprint(value), self._initial_marks.get(path)
            if path in saved or not isinstance(fingerprint, str) or fingerprint == initial:
                continue
            if path not in self._initial_marks:
                vars(owner).pop(path.rpartition("/")[2], None)
            elif path in self._initial_values:
                self._set(path, [self._initial_values[path]])
        for path, trees in saved.items():
            first, *rest = trees
            equal = all(len(tree) == len(first) and all(map(torch.equal, tree, first)) for tree in rest)
            self._set(path, [self._read(tree) for tree in ([first] if equal else trees)])

    def _values(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the path, the owner and the value of each attribute."""
        for name, owner in self._owners.items():
            for key, value in vars(owner).items():
                graph = isinstance(value, Tensor) and value.requires_grad  # of the last forward
                if not (isinstance(owner, nn.Module) and (key in _OF_MODULE or graph)):
                    yield f"{name}/{key}", owner, value
            if not isinstance(owner, Optimizer):
                continue
            shared = {key: value for key, value in owner.state.items() if not isinstance(key, Tensor)}
            yield f"{name}/{_STATE_OF_NO_PARAMETER}", owner, shared
            if type(owner).state_dict is not Optimizer.state_dict:
                with _own_entries(owner):
                    entries = owner.state_dict().items()
                extra = {key: value for key, value in entries if key not in ("state", "param_groups")}
                yield f"{name}/{_ENTRIES}", owner, extra

    def _set(self, path: str, saved: Sequence[tuple[Any, list[Tensor]]]) -> None:
        """Set the value of a path from the trees of the stages, which are several if they differ."""
        (name, _, key), ((tree, tensors), *rest) = path.rpartition("/"), saved
        if rest and not all(map(_by_name, saved)):
            self._warn(path, "is of each stage, and the stages are others: it begins anew")
            return
        owner = self._owners.get(name)
        attributes = {} if owner is None or key in (_ENTRIES, _STATE_OF_NO_PARAMETER) else vars(owner)
        value = unpacked(tree, tensors, Tensor.clone, self._named_objects, attributes.get(key))
        for tree, tensors in rest:
            value.update(unpacked(tree, tensors, Tensor.clone, self._named_objects))
        if owner is None or value is ABSENT:
            self._warn(path, "belongs to what is not there: it begins anew")
        elif key == _STATE_OF_NO_PARAMETER:
            owner.state.update(value)
        elif key == _ENTRIES:
            with _own_entries(owner):
                owner.load_state_dict({**owner.state_dict(), **value})
        else:
            attributes[key] = value

    def _packed(self, value: Any) -> tuple[Any, list[Tensor]]:
        tensors: list[Tensor] = []
        return packed(value, tensors, _NO_FORMAT, self._names), tensors

    def _read(self, saved: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        (tree, on_host), (_, *tensors) = from_bytes(saved[0]), saved
        return tree, [t if host else t.to(self._device) for t, host in zip(tensors, on_host, strict=True)]

    def _fingerprint(self, value: Any) -> Any:
        """Return a text that differs for different values, or the value itself if there is none."""
        try:
            tree, tensors = self._packed(value)
            sums = [zlib.crc32(bytes_of(tensor.cpu()).numpy().data) for tensor in tensors]
        except (TypeError, RuntimeError):
            return value
        return json.dumps([tree, sums])

    def _warn(self, path: str, why: str) -> None:
        if path not in self._warned:
            log.warning("pipetrain: %s %s", path.replace("/", "."), why)
        self._warned.add(path)


def attributes_of(
    module: nn.Module, optimizer: Optimizer | None, scheduler: object, tensors: Mapping[str, Tensor]
) -> AttributeState:
    """Return the attributes of a stage's layers, its optimizer with its parts, and its scheduler."""
    layers = {f"layer {name}": layer for name, layer in module.named_modules() if name}
    parts = {f"optimizer {n}": part for n, part in enumerate(getattr(optimizer, "parts", ()))}
    return AttributeState({"optimizer": optimizer, **parts, "lr_schedule": scheduler, **layers}, tensors)


def _by_name(saved: tuple[Any, list[Tensor]]) -> bool:
    """Return whether a value is a dict with keys that are known by name, such as parameters."""
    pairs = saved[0].get("items") if isinstance(saved[0], dict) else None
    return pairs is not None and all(isinstance(key, dict) and "named" in key for key, _ in pairs)


@contextmanager
def _own_entries(optimizer: Optimizer) -> Iterator[None]:
    """Let an optimizer save or load its own entries; its parameter groups, saved elsewhere, stay.

    Its state is empty meanwhile if its state_dict() has torch's entry for it, which is saved elsewhere too.
    """
    state, groups = optimizer.state, optimizer.param_groups
    optimizer.state, members = defaultdict(dict), [*groups]
    if "state" not in optimizer.state_dict():
        optimizer.state = state
    try:
        yield
    finally:
        optimizer.state = state
        optimizer.param_groups[:] = members
        with suppress(AttributeError):  # a group of another optimizer
            optimizer.param_groups = groups
