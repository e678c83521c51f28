"""A batch: inputs and targets from what a user's loader gives, and the form that all batches have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipetrain.data.loader_facts import has_length
from pipetrain.errors import TrainingStopped
from pipetrain.model.network import Limits
from pipetrain.model.specs import Size, TensorSpec, Value, ValueSpec, as_tuple, on_each

Pair = tuple[Value, Value]
"""A batch's inputs and targets."""
HALVES = ("inputs", "targets")


class BadBatch(TrainingStopped):
    """A batch that cannot be trained on; the message says which, and why."""


@dataclass(frozen=True, slots=True)
class NamedTargets:
    """The targets among the tensors of a batch that is a dict; several are a tuple.

    The rest is the input: a dict, or a single tensor. `as_inputs`: a model that computes its
    loss takes them all.
    """

    names: str | tuple[str, ...]
    as_inputs: bool = False

    @property
    def listed(self) -> tuple[str, ...]:
        return (self.names,) if isinstance(self.names, str) else self.names

    def inputs(self, batch: Mapping[str, Any]) -> Any:
        inputs = {name: batch[name] for name in batch if self.as_inputs or name not in self.listed}
        return next(iter(inputs.values())) if len(inputs) == 1 and not self.as_inputs else inputs

    def pair(self, batch: Any, what: str) -> tuple[Any, Any]:
        """Return a batch's inputs and targets. Raises BadBatch."""
        if not isinstance(batch, Mapping):
            raise BadBatch(
                f"{what} must be a dict with the targets {_listed(self.listed)}; it is a {kind(batch)}"
            )
        if missing := [name for name in self.listed if name not in batch]:
            raise BadBatch(f"{what} has no {missing[0]}: targets= can name {_listed(batch)}")
        inputs, targets = self.inputs(batch), tuple(batch[name] for name in self.listed)
        return inputs, targets[0] if isinstance(self.names, str) else targets

    def completed(self, batch: Mapping[str, Any], form: Form) -> dict[str, Any]:
        """Return a batch in the order of the model's inputs, with zeros for targets that it lacks."""
        whole, n = dict(batch), len(next(iter(batch.values())))
        specs = dict(zip(form.inputs.names or (), form.inputs.specs, strict=True))
        given = [name for name in specs if name in batch]
        lengths = form.lengths_of((specs[name] for name in given), (batch[name] for name in given))
        for name in self.listed:
            if name not in whole:
                spec = specs[name].at(lengths)
                whole[name] = torch.zeros((n, *spec.shape), dtype=spec.dtype)
        return {name: whole[name] for name in specs if name in whole}


@dataclass(frozen=True, slots=True)
class Form:
    """What a sample's inputs and targets look like."""

    inputs: ValueSpec
    targets: ValueSpec

    @classmethod
    def of(cls, first: Pair, second: Pair | None = None, lengths: int = 0) -> Form:
        """Return the form of batches: a dimension that differs between the two is a length.

        Equal dimensions share one. `lengths`: how many there are, if more may differ: then one is the first
        dimension of the inputs, and several are the last ones. Raises BadBatch if there are not so many.
        """
        halves = [ValueSpec.in_batch(half) for half in first]
        beside = [ValueSpec.in_batch(half) for half in second] if second else halves
        if not all(map(_alike, halves, beside)):
            beside = halves  # the second batch is refused when it comes
        both = [[*zip(a.specs, b.specs, strict=True)] for a, b in zip(halves, beside, strict=True)]
        pairs = [pair for of in both for a, b in of for pair in zip(a.shape, b.shape, strict=True)]
        differ = dict.fromkeys(pair for pair in pairs if pair[0] != pair[1])
        inputs, last = pairs[: len(halves[0].specs[0].shape)], list[tuple[int, int]]()
        if lengths > len(differ) and (inputs or lengths > 1):
            if len(inputs) < lengths:
                raise BadBatch(
                    f"max_length has {lengths} numbers, which are of the last dimensions of the first input, "
                    f"{halves[0].specs[0]}: give fewer, or let the first two batches differ in each"
                )
            differ, last = ({inputs[0]: None}, []) if lengths == 1 else ({}, inputs[-lengths:])
        number = {pair: -1 - n for n, pair in enumerate(differ)}

        def marked(a: TensorSpec, b: TensorSpec) -> TensorSpec:
            both = [*zip(a.shape, b.shape, strict=True)]
            shape = [number.get(pair, pair[0]) for pair in both]
            if last and both[-lengths:] == last:
                shape[-lengths:] = range(-1, -1 - lengths, -1)
            return replace(a, shape=tuple(shape))

        return cls(
            *(
                replace(half, specs=tuple(marked(a, b) for a, b in of))
                for half, of in zip(halves, both, strict=True)
            )
        )

    @property
    def lengths(self) -> int:
        """How many lengths a batch has."""
        every = (n for half in (self.inputs, self.targets) for spec in half.specs for n in spec.shape)
        return -min(0, *every, 0)

    def to_json(self) -> list[Any]:
        return [self.inputs.to_json(), self.targets.to_json()]

    @classmethod
    def from_json(cls, data: list[Any]) -> Form:
        return cls(*map(ValueSpec.from_json, data))

    def size(self, inputs: Value, targets: Value) -> Size:
        """Return the size of a batch, whose form this is."""
        specs, tensors = (*self.inputs.specs, *self.targets.specs), (*as_tuple(inputs), *as_tuple(targets))
        return replace(Size.of(inputs), lengths=self.lengths_of(specs, tensors))

    def lengths_of(self, specs: Iterable[TensorSpec], tensors: Iterable[Tensor]) -> tuple[int, ...]:
        """Return the lengths of a batch, whose tensors [n, ...] with these specs of a sample are given."""
        lengths = [0] * self.lengths
        for spec, tensor in zip(specs, tensors, strict=False):
            for n, actual in zip(spec.shape, tensor.shape[1:], strict=False):
                if n < 0:
                    lengths[-n - 1] = lengths[-n - 1] or actual
        return tuple(lengths)

    def refuse_other(self, inputs: Value, targets: Value, what: str) -> None:
        lengths = self.size(inputs, targets).lengths
        for name, spec, value in (("inputs", self.inputs, inputs), ("targets", self.targets, targets)):
            if (other_spec := ValueSpec.in_batch(value)) != spec.at(lengths):
                advice = "let all batches have the same tensors, dtypes and numbers of dimensions"
                if _alike(other_spec, spec):
                    advice = (
                        "let all batches have one shape, or give max_length=, the largest of each dimension "
                        "that differs"
                    )
                raise BadBatch(
                    f"{what} has {name} {other_spec} a sample, and those of the first batch were {spec}: "
                    f"{advice}"
                )


def refuse_outside(size: Size, limits: Sequence[Limits], what: str) -> None:
    """Refuse a batch that the model cannot take: `limits` of each length. Raises BadBatch."""
    for actual, (low, high) in zip(size.lengths, limits, strict=False):
        if not low <= actual <= high:
            raise BadBatch(f"{what} has {size}, and the model takes {low:g} to {high:g}: cut or pad it")


def _alike(one: ValueSpec, other: ValueSpec) -> bool:
    """Return whether values differ in the sizes of dimensions at most."""
    if len(one.specs) != len(other.specs):
        return False
    kinds = ([(spec.dtype, len(spec.shape)) for spec in of.specs] for of in (one, other))
    return next(kinds) == next(kinds) and (one.single, one.names) == (other.single, other.names)


def pair(batch: Any, what: str, named: NamedTargets | None = None) -> tuple[Value, Value]:
    """Return a batch's inputs, and its targets in host memory: tensors of one length. Raises BadBatch."""
    if named is not None:
        batch = named.pair(batch, what)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise BadBatch(
            f"{what} must be a pair (inputs, targets); it is a {kind(batch)}: let the loader give ((FIRST, "
            f"SECOND), TARGETS), or a dict, and say which are the targets: Pipeline(..., targets='label')"
        )
    inputs, targets = (_value(part, f"{half} of {what}") for part, half in zip(batch, HALVES, strict=True))
    samples = Size.of(inputs).samples
    for half, part in zip(HALVES, (inputs, targets), strict=True):
        for tensor in as_tuple(part):
            if len(tensor) != samples:
                raise BadBatch(f"{what} has {samples} inputs and {len(tensor)} {half}: each sample needs one")
    if not samples:
        raise BadBatch(f"{what} has no sample")
    return inputs, on_each(targets, Tensor.cpu)


def unlabelled(batch: Any, what: str, form: Form, named: NamedTargets | None) -> tuple[Value, Value]:
    """Return a batch's inputs, with a 0 for each sample in the place of targets. Raises BadBatch.

    Targets beside the inputs are left out. A model that computes its loss gets zeros where they are missing.
    """
    inputs = batch
    if named is not None and isinstance(batch, Mapping) and batch:
        inputs = named.inputs(named.completed(batch, form) if named.as_inputs else batch)
    elif isinstance(batch, tuple | list) and batch:
        is_inputs_alone = not form.inputs.single and len(batch) == len(form.inputs.specs)
        inputs = batch if is_inputs_alone and all(isinstance(t, Tensor) for t in batch) else batch[0]
    value = form.inputs.ordered(_value(inputs, f"inputs of {what}"))
    targets = torch.zeros(Size.of(value).samples, dtype=torch.float32)
    form.refuse_other(value, targets, what)
    return value, targets


def kind(batch: Any) -> str:
    """Return what something is that should be a batch, or several of them."""
    if isinstance(batch, Mapping):
        return f"{type(batch).__name__} of {_listed(batch)}"
    return f"{type(batch).__name__} of {len(batch)}" if has_length(batch) else type(batch).__name__


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names))


def _value(part: Any, what: str) -> Value:
    """Return tensors [n, ...]. Raises BadBatch."""
    if isinstance(part, Mapping) and part:
        hint = ": leave it out, or make it one (data of Hugging Face's by set_format('torch'))"
        return {str(name): _tensor(t, f"{name} of the {what}", "", hint) for name, t in part.items()}
    if isinstance(part, list | tuple) and part and all(isinstance(t, Tensor) for t in part):
        return tuple(_tensor(t, f"the {what}") for t in part)
    return _tensor(part, f"the {what}", ", or a tuple or a dict of them")


def _tensor(part: Any, what: str, also: str = "", hint: str = "") -> Tensor:
    got = type(part).__name__
    if isinstance(part, Tensor):
        kinds = {
            "a number": not part.dim(),
            "one on the device meta, without numbers": part.is_meta,
            "a nested one: pad it": part.is_nested,
            "a quantized one: dequantize it": part.is_quantized,
            "a sparse one: make it dense": part.layout is not torch.strided,
        }
        if not (got := next((kind for kind, holds in kinds.items() if holds), "")):
            return part
    raise BadBatch(f"{what} must be a tensor [n, ...]{also}; got {got}{hint}")
