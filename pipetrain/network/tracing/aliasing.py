"""Which operations of a traced model share memory, and which write in place: torch's schemas tell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipetrain.errors import ConfigError
from pipetrain.network.tracing.operations import Choice, Constant, Held, Op, ops_in, select

_ATEN = torch.ops.aten
# Operators that write statistics, which their schemas do not say: by which switch, and which arguments.
_STATISTICS = {
    _ATEN.batch_norm.default: ("training", 3, 4, 5),
    _ATEN.instance_norm.default: ("use_input_stats", 3, 4, 5),
}


def argument(op: Op, name: str, training: bool) -> Any:
    """Return an argument of an operation by its name in the schema; None if it has none."""
    schema = getattr(op.target, "_schema", None)
    for position, parameter in enumerate(schema.arguments if schema else ()):
        if parameter.name == name:
            if name in op.kwargs:
                value = op.kwargs[name]
            elif position < len(op.args) and not parameter.kwarg_only:
                value = op.args[position]
            else:
                value = parameter.default_value if parameter.has_default_value() else None
            return value[0 if training else 1] if isinstance(value, Choice) else value
    return None


def storages(ops: Sequence[Op]) -> dict[Op, int]:
    """Return a number for each operation: the same one for those whose results may share memory."""
    root: dict[Op, Op] = {op: op for op in ops}

    def find(op: Op) -> Op:
        while root[op] is not op:
            root[op] = op = root[root[op]]
        return op

    memory: dict[int, Op] = {}
    sources: dict[Any, Op] = {}
    for op in ops:
        alike = list(_aliased(op))
        if op.source is not None:
            alike.append(sources.setdefault(op.source, op))
        fresh = op.target is _ATEN.lift_fresh_copy.default  # a copy, whatever its fake tensor says
        for leaf in () if fresh else tree_leaves(op.value):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                alike.append(memory.setdefault(leaf.untyped_storage()._cdata, op))
        for other in alike:
            root[find(op)] = find(other)
    return {op: find(op).index for op in ops}


def _aliased(op: Op) -> Iterator[Op]:
    """Return the operations among the arguments with which the result may share memory."""
    if select(op) or getattr(op.target, "__name__", "") == "getitem":
        yield from op.given()
        return
    schema = getattr(op.target, "_schema", None)
    if schema is None or op.target in _STATISTICS:
        return
    returned = {
        name for result in schema.returns if result.alias_info for name in result.alias_info.after_set
    }
    maybe = torch.Tag.maybe_aliasing_or_mutating in getattr(op.target, "tags", ())
    for parameter, value in _bound(op):
        shared = parameter.alias_info and (parameter.alias_info.before_set & returned or "*" in returned)
        if shared or (maybe and value is op.args[0]):
            yield from ops_in(value)


def _bound(op: Op) -> Iterator[tuple[Any, Any]]:
    """Return the parameters of an operation's schema with the values given for them."""
    for position, parameter in enumerate(op.target._schema.arguments):  # type: ignore[union-attr]
        if parameter.name in op.kwargs:
            yield parameter, op.kwargs[parameter.name]
        elif position < len(op.args):
            yield parameter, op.args[position]


def writers_of(ops: Sequence[Op], storage: dict[Op, int]) -> dict[int, list[Op]]:
    """Return the operations that write in place, in order, by what they write."""
    found: dict[int, list[Op]] = {}
    for op in ops:
        for written in _written(op):
            found.setdefault(storage[written], []).append(op)
    return found


def _written(op: Op) -> Iterator[Op]:
    if op.target in _STATISTICS:
        switch, *places = _STATISTICS[op.target]
        if any(argument(op, switch, mode) for mode in op.modes):
            yield from ops_in([op.args[place] for place in places[:2]])
    elif hasattr(op.target, "_schema"):
        for parameter, value in _bound(op):
            if parameter.alias_info and parameter.alias_info.is_write:
                yield from ops_in(value)


def refuse_writes(writers: dict[int, list[Op]], storage: dict[Op, int]) -> None:
    """Raise ConfigError if a parameter, or a tensor that is registered nowhere, is written."""
    for op, root in storage.items():
        source = op.source
        if root not in writers or source is None:
            continue
        if isinstance(source, Constant) or (isinstance(source, Held) and source.parameter):
            by = writers[root][0]
            raise ConfigError(
                f"the model writes {source.name} in place at {by.where or by.target}, which each stage would "
                f"do to a copy of its own: register it as a buffer, and let the optimizer change parameters"
            )
