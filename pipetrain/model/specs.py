"""Values, which layers take and return, and their specs: shapes and dtypes.

Shapes are not sent: every rank plans the specs of all messages before the start, and posts its receives by
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

Value = Tensor | tuple[Tensor, ...] | dict[str, Tensor]  # what a layer takes or returns, inputs or targets


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as float32."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, order=True, slots=True)
class Size:
    """The size of a batch or a microbatch, from which shapes follow.

    `lengths`: of the dimensions that differ between batches, as padded texts have them; the microbatches of a
    batch share them. Code that counts samples reads `samples`; only this module makes shapes of a size.
    """

    samples: int
    lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        of = f" of length {' x '.join(map(str, self.lengths))}" if self.lengths else ""
        return f"{self.samples} sample{'s' * (self.samples != 1)}{of}"

    def pieces(self, microbatches: int) -> list[Size]:
        """Return the even sizes of a batch's microbatches, the first ones larger, as torch.tensor_split."""
        samples, more = divmod(self.samples, microbatches)
        return [replace(self, samples=samples + (index < more)) for index in range(microbatches)]

    def can_be_cut(self, microbatches: int) -> bool:
        return self.samples >= microbatches

    @property
    def neighbours(self) -> list[Size]:
        """A size and a larger one: the specs of both give those of others, see `spec_at`."""
        return [self, replace(self, samples=self.samples + 1)]

    @classmethod
    def of(cls, value: Value) -> Size:
        """Return the size of a batch or a microbatch, tensors [n, ...], without its lengths."""
        return cls(len(as_tuple(value)[0]))

    @classmethod
    def joined(cls, sizes: Iterable[Size]) -> Size:
        """Return the size of microbatches of one batch that are joined to one."""
        first, *rest = sizes
        return replace(first, samples=first.samples + sum(size.samples for size in rest))

    def to_json(self) -> list[int]:
        return [self.samples, *self.lengths]

    @classmethod
    def from_json(cls, data: list[int]) -> Size:
        samples, *lengths = data
        return cls(samples, tuple(lengths))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor. In the spec of one sample -1 is a size's first length, -2 the second."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        dimensions = (f"length {chr(64 - n)}" if n < 0 else str(n) for n in self.shape)
        return f"{name_of(self.dtype)}[{', '.join(dimensions)}]"

    def at(self, lengths: Sequence[int]) -> TensorSpec:
        """Return the spec with lengths in their places."""
        return replace(self, shape=tuple(lengths[-n - 1] if n < 0 else n for n in self.shape))


def spec_at(size: Size, measured: Sequence[tuple[Size, TensorSpec]]) -> TensorSpec:
    """Return the spec of a tensor for a microbatch of this size, from those for two sizes.

    Each dimension must be a linear function of the samples. The engine compares it with what a stage makes.
    """
    (few, first), (more, second) = measured

    def at(a: int, b: int) -> int:
        return a + (b - a) * (size.samples - few.samples) // (more.samples - few.samples)

    return replace(first, shape=tuple(map(at, first.shape, second.shape)))


@dataclass(frozen=True)
class Packing:
    """The form of a value that is neither a tensor nor a tuple of tensors, such as a dict or a nested tuple.

    `fixed`: its leaves other than tensors, such as None, with `TENSOR` in place of each tensor.
    """

    tree: TreeSpec
    fixed: tuple[object, ...]

    @classmethod
    def from_value(cls, value: object) -> Packing | None:
        """Return the form of a value; None for a tensor or a tuple of them."""
        if isinstance(value, Tensor) or (type(value) is tuple and all(isinstance(t, Tensor) for t in value)):
            return None
        leaves, tree = tree_flatten(value)
        return cls(tree, tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    @property
    def other(self) -> str:
        """The type of a leaf other than tensors and None, or ""."""
        return next((f"a {type(v).__name__}" for v in self.fixed if v is not TENSOR and v is not None), "")

    def pack(self, tensors: Sequence[Tensor]) -> Any:
        remaining = iter(tensors)
        return tree_unflatten([next(remaining) if leaf is TENSOR else leaf for leaf in self.fixed], self.tree)


TENSOR = Tensor  # a class, so that a copy of a Packing has the same one


def packer(value: object) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function that gives tensors the form of a value."""
    if (packing := Packing.from_value(value)) is not None:
        return packing.pack
    return itemgetter(0) if isinstance(value, Tensor) else tuple


def leaves_of(value: object) -> tuple[Tensor, ...]:
    """Return the tensors in an output of a model or layer. Raises TypeError if there is none."""
    if isinstance(value, Tensor):
        return (value,)
    tensors = tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
    if not tensors:
        raise TypeError(f"it must return tensors, not {type(value).__name__}")
    return tensors


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """The spec of a value: the shapes and dtypes of its tensors, and its form.

    `single`: a bare tensor, not a tuple of one; `names`: of a dict's tensors, which a model takes as
    keywords; `packing`: the form of an output that is neither a tensor nor a tuple of tensors. An example is
    the spec of one sample's inputs; `samples`: tensors of real ones, by number, for runs on made-up inputs;
    `longest`: the largest lengths, or where they are not `bounded` those that are planned with.
    """

    specs: tuple[TensorSpec, ...]
    single: bool = True
    names: tuple[str, ...] | None = None
    packing: Packing | None = None
    samples: Mapping[int, Tensor] = field(default_factory=dict, compare=False, repr=False)
    longest: tuple[int, ...] = field(default=(), compare=False)
    bounded: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        if self.names is not None:
            return " + ".join(f"{name} {spec}" for name, spec in zip(self.names, self.specs, strict=True))
        return " + ".join(map(str, self.specs))

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs)

    def of(self, size: Size) -> ValueSpec:
        """Return the spec of a microbatch, tensors [samples, ...], from that of one sample."""
        each = self.at(size.lengths).specs
        return replace(
            self, specs=tuple(TensorSpec((size.samples, *spec.shape), spec.dtype) for spec in each)
        )

    def at(self, lengths: Sequence[int]) -> ValueSpec:
        """Return the spec with lengths in their places."""
        return replace(self, specs=tuple(spec.at(lengths) for spec in self.specs)) if lengths else self

    @classmethod
    def like(cls, value: Value) -> ValueSpec:
        names = tuple(value) if isinstance(value, dict) else None
        return cls(specs_of(as_tuple(value)), isinstance(value, Tensor), names)

    @classmethod
    def in_batch(cls, value: Value) -> ValueSpec:
        """Return the spec of one sample of a microbatch, tensors [n, ...]."""
        whole = cls.like(value)
        return replace(whole, specs=tuple(TensorSpec(spec.shape[1:], spec.dtype) for spec in whole.specs))

    def ordered(self, value: Value) -> Value:
        """Return a dict with these names in their order; other values unchanged."""
        if self.names is None or not isinstance(value, dict) or value.keys() != set(self.names):
            return value
        return {name: value[name] for name in self.names}

    def pack(self, tensors: tuple[Tensor, ...]) -> Any:
        if self.packing is not None:
            return self.packing.pack(tensors)
        if self.names is not None:
            return dict(zip(self.names, tensors, strict=True))
        return tensors[0] if self.single else tensors

    def to_json(self) -> list[Any]:
        """Return JSON data for `from_json`."""
        specs = [[list(spec.shape), name_of(spec.dtype)] for spec in self.specs]
        return [self.names or self.single, *specs]

    @classmethod
    def from_json(cls, data: list[Any]) -> ValueSpec:
        form, *specs = data
        read = tuple(TensorSpec(tuple(shape), getattr(torch, dtype)) for shape, dtype in specs)
        return cls(read, form is True, tuple(form) if isinstance(form, list | tuple) else None)

    def cast(self, dtype: torch.dtype | None) -> ValueSpec:
        """Return the spec with floating-point tensors as `dtype`, if any. Raises ValueError if it rounds."""
        if dtype is None:
            return self
        for spec in self.specs:
            if spec.dtype.is_floating_point and torch.promote_types(spec.dtype, dtype) != dtype:
                raise ValueError(f"{name_of(spec.dtype)} numbers would be rounded")
        specs = (replace(s, dtype=dtype) if s.dtype.is_floating_point else s for s in self.specs)
        return replace(self, specs=tuple(specs))


def specs_of(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    """Return the shapes and dtypes of tensors."""
    return tuple(TensorSpec(tuple(t.shape), t.dtype) for t in tensors)


def are_like(tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> bool:
    """Return whether tensors have these shapes and dtypes."""
    return len(tensors) == len(specs) and all(
        t.shape == spec.shape and t.dtype is spec.dtype for t, spec in zip(tensors, specs, strict=True)
    )


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, uint8 [n]."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def named_layers(model: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """Return the layers in order with their names; `named_children` would omit a layer that is used twice."""
    return list(zip(model._modules, model, strict=True))


def as_tuple(value: Value | Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors of a value. Raises TypeError for anything else."""
    items = value.values() if isinstance(value, dict) else value
    tensors = (items,) if isinstance(items, Tensor) else tuple(items)
    if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise TypeError(f"a layer must return a tensor or a tuple of tensors, not {type(value).__name__}")
    return tensors


def scores_of(outputs: Value) -> Value:
    """Return the `logits` of a dict, as Hugging Face's models return them; other values unchanged."""
    if isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        return outputs["logits"]
    return outputs


def on_each(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """Return a value with each of its tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    changed: Value = tree_map_only(Tensor, change, value)
    return changed


def split(value: Value, sizes: Sequence[Size]) -> list[Value]:
    """Split tensors into microbatches of these sizes."""
    samples = [size.samples for size in sizes]
    if isinstance(value, Tensor):
        return list(torch.split(value, samples))
    form = ValueSpec.in_batch(value)
    pieces = zip(*(torch.split(t, samples) for t in as_tuple(value)), strict=True)
    return [form.pack(piece) for piece in pieces]


def join(values: Sequence[Value]) -> Value:
    """Join microbatches into one."""
    tensors = zip(*map(as_tuple, values), strict=True)
    joined: Value = ValueSpec.in_batch(values[0]).pack(tuple(map(torch.cat, tensors)))
    return joined


def repeated(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of another shape whose numbers are repeated, or cut, in each dimension."""
    for dimension, n in enumerate(shape):
        if n != tensor.shape[dimension]:
            places = torch.arange(n, device=tensor.device) % tensor.shape[dimension]
            tensor = tensor.index_select(dimension, places)
    return tensor


def repeated_to(size: Size, value: Value, form: ValueSpec | None = None) -> Value:
    """Return a microbatch of this size that repeats the numbers of another one; `form`: of one sample."""
    form = form or ValueSpec.in_batch(value)
    shapes = iter(spec.shape for spec in form.of(size).specs)
    return on_each(value, lambda tensor: repeated(tensor, next(shapes)))


def cast_floats(value: Value, dtype: torch.dtype | None) -> Value:
    """Return a value with floating-point tensors as `dtype`; None: unchanged."""
    return on_each(value, lambda t: t.to(dtype) if dtype and t.is_floating_point() else t)


def differentiable(tensor: Tensor) -> bool:
    """Return whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


class Gradients(NamedTuple):
    """Which tensors that enter or leave a stage depend on weights, and which of them need a gradient."""

    requires: tuple[bool, ...]
    needs: tuple[bool, ...]


def requires_grad(gradients: Gradients | None, tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Return which tensors depend on weights; if unknown, all that can."""
    return gradients.requires if gradients else list(map(differentiable, tensors))


def needs_grad(gradients: Gradients | None, tensors: Sequence[Tensor]) -> Sequence[bool]:
    """Return which tensors need a gradient; if unknown, all that can have one."""
    return gradients.needs if gradients else list(map(differentiable, tensors))
