"""A batch of a user's loader: inputs and targets, each in the form that the first batch had."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipetrain.errors import TrainingStopped
from pipetrain.network.values import Value, ValueSpec, as_tuple

HALVES = ("inputs", "targets")


class BadBatch(TrainingStopped):
    """A batch that cannot be trained on; the message says which, and why."""


@dataclass(frozen=True, slots=True)
class NamedTargets:
    """The targets among the tensors of a batch that is a dict; several are a tuple.

    The rest are the inputs: a dict, or if there is one alone, that tensor. `kept`: the model takes them all,
    targets too, as it computes its loss.
    """

    names: str | tuple[str, ...]
    kept: bool = False

    @property
    def listed(self) -> tuple[str, ...]:
        return (self.names,) if isinstance(self.names, str) else self.names

    def inputs(self, batch: Mapping[str, Any]) -> Any:
        """Return a batch's inputs."""
        inputs = {name: batch[name] for name in batch if self.kept or name not in self.listed}
        return next(iter(inputs.values())) if len(inputs) == 1 and not self.kept else inputs

    def pair(self, batch: Any, what: str) -> tuple[Any, Any]:
        """Return a batch's inputs and targets. Raises BadBatch."""
        if not isinstance(batch, Mapping):
            says = "that goes to the model, as it computes its loss" if self.kept else "as targets= says"
            raise BadBatch(
                f"{what} must be a dict with {_listed(self.listed)}, {says}; it is a {kind(batch)}"
            )
        if missing := [name for name in self.listed if name not in batch]:
            raise BadBatch(f"{what} has no {missing[0]}: targets= can name {_listed(batch)}")
        inputs, targets = self.inputs(batch), tuple(batch[name] for name in self.listed)
        if isinstance(inputs, dict) and not inputs:
            raise BadBatch(
                f"{what} has nothing but the targets {_listed(self.listed)}: add the model's inputs"
            )
        return inputs, targets[0] if isinstance(self.names, str) else targets

    def completed(self, batch: Mapping[str, Any], form: Form) -> dict[str, Any]:
        """Return a batch in the order of the model's inputs, with zeros for targets that it lacks."""
        whole, n = dict(batch), len(next(iter(batch.values())))
        specs = dict(zip(form.inputs.names or (), form.inputs.specs, strict=True))
        for name in self.listed:
            whole.setdefault(name, torch.zeros((n, *specs[name].shape), dtype=specs[name].dtype))
        return {name: whole[name] for name in specs if name in whole}


@dataclass(frozen=True, slots=True)
class Form:
    """What a sample's inputs and targets look like."""

    inputs: ValueSpec
    targets: ValueSpec

    def to_json(self) -> list[Any]:
        return [self.inputs.to_json(), self.targets.to_json()]

    @classmethod
    def from_json(cls, data: list[Any]) -> Form:
        return cls(*map(ValueSpec.from_json, data))

    def refuse_other(self, inputs: Value, targets: Value, what: str) -> None:
        """Refuse samples of another form. Raises BadBatch."""
        for name, mine, value in (("inputs", self.inputs, inputs), ("targets", self.targets, targets)):
            if (theirs := ValueSpec.in_batch(value)) != mine:
                raise BadBatch(
                    f"{what} has {name} {theirs} a sample, and those of the first batch were {mine}: "
                    f"let all batches have one shape and dtype, such as texts padded to one length"
                )


def pair(batch: Any, what: str, named: NamedTargets | None = None) -> tuple[Value, Value]:
    """Return a batch's inputs and targets, tensors of one length. Raises BadBatch."""
    if named is not None:
        batch = named.pair(batch, what)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        way_out = ""
        if isinstance(batch, Mapping):
            way_out = ": say which are the targets, as in Pipeline(..., targets='label')"
        elif isinstance(batch, tuple | list):
            way_out = ": let the loader give ((FIRST, SECOND), TARGETS), or a dict, and targets=NAME"
        raise BadBatch(f"{what} must be a pair (inputs, targets); it is a {kind(batch)}{way_out}")
    inputs, targets = (_value(part, f"{half} of {what}") for part, half in zip(batch, HALVES, strict=True))
    for half, part in zip(HALVES, (inputs, targets), strict=True):
        for tensor in as_tuple(part):
            if len(tensor) != samples(inputs):
                raise BadBatch(
                    f"{what} has {samples(inputs)} inputs and {len(tensor)} {half}: each sample needs one"
                )
    if not samples(inputs):
        raise BadBatch(f"{what} has no sample")
    return inputs, targets


def unlabelled(batch: Any, what: str, form: Form, named: NamedTargets | None) -> tuple[Value, Value]:
    """Return a batch's inputs, with a 0 for each sample in the place of targets. Raises BadBatch.

    Targets beside the inputs are left out. A model that computes its loss gets zeros where they are missing.
    """
    tried = [batch]
    if named is not None and isinstance(batch, Mapping) and batch:
        tried = [named.inputs(named.completed(batch, form) if named.kept else batch)]
    elif isinstance(batch, tuple | list) and batch:
        tried = [batch, batch[0]]
    for one in tried:
        try:
            value = _value(one, f"inputs of {what}")
            targets = torch.zeros(samples(value))
            form.refuse_other(value, targets, what)
        except BadBatch:
            if one is tried[-1]:
                raise
        else:
            break
    return value, targets


def samples(value: Value) -> int:
    """Return the number of samples."""
    return len(as_tuple(value)[0])


def kind(batch: Any) -> str:
    """Return what something is that should be a batch, or several of them."""
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} of {_listed(batch)}"
    return f"{type(batch).__name__} of {len(batch)}" if hasattr(batch, "__len__") else type(batch).__name__


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names))


def _value(part: Any, what: str) -> Value:
    """Return tensors [n, ...] in host memory. Raises BadBatch."""
    if isinstance(part, Mapping) and part:
        hint = ": leave it out, or make it one (data of Hugging Face's by set_format('torch'))"
        return {str(name): _tensor(t, f"{name} of the {what}", "", hint) for name, t in part.items()}
    if isinstance(part, list | tuple) and part and all(isinstance(t, Tensor) for t in part):
        return tuple(_tensor(t, f"the {what}") for t in part)
    return _tensor(part, f"the {what}", ", or a tuple or a dict of them")


def _tensor(part: Any, what: str, also: str = "", hint: str = "") -> Tensor:
    if isinstance(part, Tensor) and part.dim():
        return part.cpu()
    got = "a number" if isinstance(part, Tensor) else type(part).__name__
    raise BadBatch(f"{what} must be a tensor [n, ...]{also}; got {got}{hint}")
