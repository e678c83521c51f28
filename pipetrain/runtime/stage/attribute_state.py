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
_ENTRIES, _OTHERS = "state_dict()", "state of no parameter"  # an optimizer's
_ANY = torch.empty(0)  # no tensor has its layout


class AttributeState:
    """The attributes of `owners`, by name, at the start. `tensors`: parameters and buffers by name."""

    def __init__(self, owners: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._owners = {name: owner for name, owner in owners.items() if owner is not None}
        self._known: dict[str, Any] = {**tensors, **self._owners}
        self._device = next((t.device for t in tensors.values()), _ANY.device)
        for name, owner in self._owners.items():
            if isinstance(owner, Optimizer):
                self._known |= {f"{name}/state": owner.state, f"{name}/param_groups": owner.param_groups}
                self._known |= {f"{name}/{n}": group for n, group in enumerate(owner.param_groups)}
        self._names = {id(of): name for name, of in self._known.items()}
        self._told = set[str]()
        self._began = {path: self._mark(value) for path, _, value in self._values()}
        self._first = dict[str, tuple[Any, list[Tensor]]]()
        for path, owner, value in self._values():
            if isinstance(self._began[path], str):
                tree, numbers = self._packed(value)
                if not (numbers and isinstance(owner, nn.Module)):  # a layer's tensors may be large
                    self._first[path] = tree, [tensor.clone() for tensor in numbers]

    def changed(self) -> dict[str, list[Tensor]]:
        """Return what has changed, by path: the JSON of a tree, and its tensors."""
        trees: dict[str, list[Tensor]] = {}
        for path, _, value in self._values():
            mark, before = self._mark(value), self._began.get(path)
            if isinstance(mark, str) and mark != before:
                tree, tensors = self._packed(value)
                trees[path] = [to_bytes([tree, [t.device.type == "cpu" for t in tensors]]), *tensors]
            elif mark is not before and not isinstance(mark, str):
                self._tell(path, f"is a {type(value).__name__}, which no checkpoint keeps")
        return trees

    def restore(self, found: Mapping[str, Sequence[Sequence[Tensor]]]) -> None:
        """Set attributes to what stages have saved, and others to their values at the start."""
        for path, owner, value in [*self._values()]:
            mark, before = self._mark(value), self._began.get(path)
            if path in found or not isinstance(mark, str) or mark == before:
                continue
            if path not in self._began:
                vars(owner).pop(path.rpartition("/")[2], None)
            elif path in self._first:
                self._set(path, [self._first[path]])
        for path, trees in found.items():
            first, *others = trees
            alike = all(len(of) == len(first) and all(map(torch.equal, of, first)) for of in others)
            self._set(path, [self._read(of) for of in ([first] if alike else trees)])

    def _values(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield the path, the owner and the value of each attribute."""
        for name, owner in self._owners.items():
            for key, value in vars(owner).items():
                graph = isinstance(value, Tensor) and value.requires_grad  # of the last forward
                if not (isinstance(owner, nn.Module) and (key in _OF_MODULE or graph)):
                    yield f"{name}/{key}", owner, value
            if not isinstance(owner, Optimizer):
                continue
            others = {key: value for key, value in owner.state.items() if not isinstance(key, Tensor)}
            yield f"{name}/{_OTHERS}", owner, others
            if type(owner).state_dict is not Optimizer.state_dict:
                with _own_state(owner):
                    entries = owner.state_dict().items()
                own = {key: value for key, value in entries if key not in ("state", "param_groups")}
                yield f"{name}/{_ENTRIES}", owner, own

    def _set(self, path: str, saved: Sequence[tuple[Any, list[Tensor]]]) -> None:
        """Set the value of a path from the trees of the stages, which are several if they differ."""
        (name, _, key), ((tree, tensors), *others) = path.rpartition("/"), saved
        if others and not all(map(_by_name, saved)):
            self._tell(path, "is of each stage, and the stages are others: it begins anew")
            return
        owner = self._owners.get(name)
        own = {} if owner is None or key in (_ENTRIES, _OTHERS) else vars(owner)
        value = unpacked(tree, tensors, Tensor.clone, self._known, own.get(key))
        for tree, tensors in others:
            value.update(unpacked(tree, tensors, Tensor.clone, self._known))
        if owner is None or value is ABSENT:
            self._tell(path, "belongs to what is not there: it begins anew")
        elif key == _OTHERS:
            owner.state.update(value)
        elif key == _ENTRIES:
            with _own_state(owner):
                owner.load_state_dict({**owner.state_dict(), **value})
        else:
            own[key] = value

    def _packed(self, value: Any) -> tuple[Any, list[Tensor]]:
        tensors: list[Tensor] = []
        return packed(value, tensors, _ANY, self._names), tensors

    def _read(self, saved: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        (tree, on_host), (_, *tensors) = from_bytes(saved[0]), saved
        return tree, [t if host else t.to(self._device) for t, host in zip(tensors, on_host, strict=True)]

    def _mark(self, value: Any) -> Any:
        """Return a text that differs for different values, or the value itself if there is none."""
        try:
            tree, tensors = self._packed(value)
            sums = [zlib.crc32(bytes_of(tensor.cpu()).numpy().data) for tensor in tensors]
        except (TypeError, RuntimeError):
            return value
        return json.dumps([tree, sums])

    def _tell(self, path: str, why: str) -> None:
        if path not in self._told:
            log.warning("pipetrain: %s %s", path.replace("/", "."), why)
        self._told.add(path)


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
def _own_state(optimizer: Optimizer) -> Iterator[None]:
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
