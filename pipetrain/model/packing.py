"""Trees of values as JSON data and a list of tensors, as a checkpoint holds them.

A tree consists of tensors, arrays, numbers, strings, bytes, lists, tuples, sets, dicts, random generators,
and objects with attributes. Each tensor is replaced by its index in the list, and by its memory layout if
that is unusual: products and sums round differently in another layout. Some values are stored by name.
"""

from __future__ import annotations

import json
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pipetrain.model.specs import name_of

_LISTS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "deque": deque, "Size": tuple}
ALIGNED = 64  # bytes, to which an allocator of torch aligns
ABSENT: Any = object()
"""A value stored under the name of another stage's tensor, or an object that does not exist here."""


def to_bytes(tree: Any) -> Tensor:
    """Return JSON data as bytes, uint8 [n]."""
    return torch.frombuffer(bytearray(json.dumps(tree), "utf-8"), dtype=torch.uint8)


def from_bytes(tensor: Tensor) -> Any:
    """Return the JSON data of `to_bytes`."""
    return json.loads(bytes(tensor.tolist()))


def to_json(value: Any) -> Any:
    """Return a tree as JSON data, including the numbers of its (few) tensors. Raises TypeError."""
    tensors: list[Tensor] = []
    tree = packed(value, tensors, torch.empty(0))
    return [tree, [[name_of(tensor.dtype), tensor.tolist()] for tensor in tensors]]


def from_json(data: Any) -> Any:
    """Return the tree of `to_json`."""
    tree, tensors = data
    restored = [torch.tensor(numbers, dtype=getattr(torch, dtype)) for dtype, numbers in tensors]
    return unpacked(tree, restored, Tensor.clone)


def packed(value: Any, tensors: list[Tensor], like: Tensor, names: Mapping[int, str] | None = None) -> Any:
    """Return a tree as JSON data, and append its tensors, complex ones as pairs, to `tensors`.

    A tensor usually has the layout of `like` if it has its shape, else a contiguous one. `names`: of values
    stored by name, by id; without it generators and objects are refused, since they are only filled in place.
    Raises TypeError for other values; such attributes of an object are left out.
    """
    named = names or {}

    def inner(items: Iterable[Any]) -> list[Any]:
        return [packed(item, tensors, like, names) for item in items]

    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if id(value) in named:
        return {"named": named[id(value)]}
    if isinstance(value, Tensor):
        kind, value = "complex" if value.is_complex() else "tensor", value.detach().resolve_conj()
        tensors.append(torch.view_as_real(value) if value.is_complex() else value)
        number, layout = len(tensors) - 1, layout_of(value, like)
        return {kind: [number, *layout] if layout else number}
    if isinstance(value, np.ndarray):
        tensors.append(torch.from_numpy(value.copy()))
        return {"array": len(tensors) - 1}
    if names is not None and (state := state_of(value)):
        return {"generator": packed(state.get(), tensors, like)}
    if (kind := type(value).__name__) in _LISTS and isinstance(value, _LISTS[kind]):
        return {kind: inner(value)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": dict(zip(value, inner(value.values()), strict=True))}
    if isinstance(value, dict):
        return {"items": [inner(pair) for pair in value.items()]}
    if names is not None and _has_attributes(value):
        content: dict[str, Any] = {}
        for key, item in vars(value).items():
            with suppress(TypeError):
                content[key] = packed(item, tensors, like, {**named, id(value): ""})
        return {"object": content}
    raise TypeError(f"values of type {type(value).__name__}")


def unpacked(
    tree: Any,
    tensors: Sequence[Tensor],
    placed: Callable[[Tensor], Tensor],
    named: Mapping[str, Any] | None = None,
    now: Any = None,
) -> Any:
    """Return the tree of `packed`; `placed` copies a tensor with the usual layout.

    `named`: values by name; entries of a dict with unknown names are left out. `now`: the current value,
    whose containers and objects stay, with new content. ABSENT: a list or a dict with an unknown value.
    """
    if not isinstance(tree, dict):
        return tree

    def inner(items: Iterable[Any], there: Iterable[Any] = ()) -> list[Any]:
        nows = iter(there)
        return [unpacked(item, tensors, placed, named, next(nows, None)) for item in items]

    ((kind, content),) = tree.items()
    if kind == "named":
        return (named or {}).get(content, ABSENT)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "array":
        return tensors[content].clone().numpy()
    if kind == "generator":
        if (state := state_of(now)) is None:
            return ABSENT
        state.set(unpacked(content, tensors, Tensor.clone))
        return now
    if kind == "object":
        if not _has_attributes(now):
            return ABSENT
        attributes = vars(now)
        values = inner(content.values(), map(attributes.get, content))
        attributes.update(
            {key: value for key, value in zip(content, values, strict=True) if value is not ABSENT}
        )
        return now
    if kind in _LISTS:
        values = inner(content, now if isinstance(now, list | tuple | deque) else ())
        if any(value is ABSENT for value in values):
            return ABSENT
        result = _LISTS[kind](values)
    elif kind in ("dict", "items"):
        was = now if isinstance(now, dict) else {}
        keys = list(content) if kind == "dict" else inner(key for key, _ in content)
        trees = content.values() if kind == "dict" else [item for _, item in content]
        values = inner(trees, map(was.get, keys))
        result = {key: value for key, value in zip(keys, values, strict=True) if key is not ABSENT}
        if any(value is ABSENT for value in result.values()):
            return ABSENT
    else:
        number, *layout = content if isinstance(content, list) else [content]
        value = placed(torch.view_as_complex(tensors[number]) if kind == "complex" else tensors[number])
        return laid_out(value, layout) if layout else value
    if isinstance(now, dict | list | set | deque) and isinstance(result, dict) == isinstance(now, dict):
        now.clear()
        (now.extend if isinstance(now, list | deque) else now.update)(result)
        return now
    return result


def layout_of(tensor: Tensor, like: Tensor) -> list[int]:
    """Return a tensor's strides, and its offset, in numbers, from an aligned address.

    [] if both are those of a new tensor: like `like` if it has the same shape, else contiguous.
    """
    if any(stride == 0 < size - 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return []  # an expanded tensor, which nothing writes to
    same_shape = like.shape == tensor.shape
    usual = torch.empty_like(like, device="meta") if same_shape else torch.empty(tensor.shape, device="meta")
    start = tensor.data_ptr() % ALIGNED // tensor.element_size()
    return [*tensor.stride(), start] if start or tensor.stride() != usual.stride() else []


def laid_out(values: Tensor, layout: Sequence[int]) -> Tensor:
    """Return a copy of values with the layout of `layout_of`."""
    *strides, start = layout
    size = start + 1 + sum(max(n - 1, 0) * stride for n, stride in zip(values.shape, strides, strict=True))
    return values.new_empty(size).as_strided(values.shape, strides, start).copy_(values)


class State(NamedTuple):
    """How to get and set the state of an object."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]


def state_of(generator: Any) -> State | None:
    """Return the access to the state of a random generator; None if the object is none."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return State(lambda: bits.state, partial(setattr, bits, "state"))
    if isinstance(generator, torch.Generator | np.random.RandomState) or generator is np.random:
        return State(generator.get_state, generator.set_state)
    if isinstance(generator, random.Random) or generator is random:
        return State(generator.getstate, generator.setstate)
    return None


def _has_attributes(value: Any) -> bool:
    """Return whether an object consists of its attributes, like those of a program's own classes."""
    package = type(value).__module__.partition(".")[0]
    custom = (
        package != "torch" and package not in sys.stdlib_module_names and not isinstance(value, nn.Module)
    )
    return hasattr(value, "__dict__") and (custom or isinstance(value, Optimizer | LRScheduler))
