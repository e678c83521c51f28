"""Makes one list of operations of a model's two traces, in training and in evaluation.

Both traces mostly do the same with other constants (dropout's `train`, batch_norm's `training`). What only
one of them does, such as a stochastic depth, is kept with its mode; where a later operation takes another
value in evaluation than in training, a selection between both stands behind the first.
"""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure

from pipetrain.errors import ConfigError
from pipetrain.network.tracing.operations import BOTH, Choice, Constant, Listing, Op, ops_in, selection
from pipetrain.network.values import specs_of


def align(training: Listing, evaluation: Listing) -> Listing:
    """Return the operations of both modes as one list, numbered. Raises ConfigError if outputs differ."""
    if training.tree != evaluation.tree:
        raise ConfigError(
            "the model returns something else in evaluation than in training: let it return the same kind "
            "of value in both"
        )
    others = _renamed(evaluation, training.constants)
    merged = _Merged()
    first = [_key(op) for op in training.ops]
    second = [_key(op) for op in evaluation.ops]
    for kind, a, b, c, d in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        if kind == "equal":
            for mine, other in zip(training.ops[a:b], evaluation.ops[c:d], strict=True):
                merged.both(mine, other)
        else:
            merged.only(training.ops[a:b], evaluation.ops[c:d])
    outputs = [merged.argument(a, b) for a, b in zip(training.outputs, evaluation.outputs, strict=True)]
    if any(isinstance(output, Choice) for output in outputs):
        raise ConfigError(
            "the model returns another constant in evaluation than in training: return tensors only"
        )
    ops = merged.finish()
    return Listing(ops, outputs, training.tree, {**others, **training.constants})


def _renamed(listing: Listing, known: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give constants other names where another trace has others by theirs; return them by their names."""
    found = {}
    for name, tensor in listing.constants.items():
        other = known.get(name, tensor)
        same = specs_of([other]) == specs_of([tensor]) and torch.equal(other, tensor)
        own = name if same else f"{name} in evaluation"
        found[own] = tensor
        for op in listing.ops:
            if op.source == Constant(name):
                op.source = Constant(own)
    return found


def _key(op: Op) -> Any:
    return op.target, op.source, op.calls, op.autocast


def _complete(op: Op, other: Op) -> None:
    """Add the defaults of arguments that only another call of the same operator gives."""
    schema = getattr(op.target, "_schema", None)
    for position, parameter in enumerate(schema.arguments if schema else ()):
        if len(op.args) <= position < len(other.args):
            op.args = (*op.args, op.kwargs.pop(parameter.name, parameter.default_value))
        elif parameter.name in other.kwargs and parameter.name not in op.kwargs and position >= len(op.args):
            op.kwargs[parameter.name] = parameter.default_value


class _Merged:
    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._mine: dict[Op, Op] = {}  # evaluation -> merged
        self._selections: dict[tuple[Op, Op], Op] = {}

    def only(self, training: list[Op], evaluation: list[Op]) -> None:
        """Add operations that only one mode has."""
        self._ops += training
        for op in evaluation:
            op.args, op.kwargs = self._translated((op.args, op.kwargs))
            self._mine[op] = op
            self._ops.append(op)

    def both(self, training: Op, evaluation: Op) -> None:
        """Add an operation that both modes have."""
        for op, other in ((training, evaluation), (evaluation, training)):
            _complete(op, other)
        arguments = self.argument((training.args, training.kwargs), (evaluation.args, evaluation.kwargs))
        training.args, training.kwargs = arguments
        training.modes = BOTH
        self._mine[evaluation] = training
        self._ops.append(training)

    def argument(self, training: Any, evaluation: Any) -> Any:
        """Return an argument of both modes; where they differ, a choice or a selection."""
        if isinstance(training, Op) and isinstance(evaluation, Op):
            other = self._mine[evaluation]
            return training if other is training else self._selection(training, other)
        kinds = {type(training), type(evaluation)}
        if kinds <= {tuple, list} and len(training) == len(evaluation):
            pairs = zip(training, evaluation, strict=True)
            return type(training)(self.argument(a, b) for a, b in pairs)
        if kinds == {dict} and training.keys() == evaluation.keys():
            return {key: self.argument(training[key], evaluation[key]) for key in training}
        if tree_structure(training) == tree_structure(evaluation) and not [*ops_in((training, evaluation))]:
            return training if training == evaluation else Choice(training, evaluation)
        return Choice(training, self._translated(evaluation))

    def _selection(self, training: Op, evaluation: Op) -> Op:
        made = self._selections.get((training, evaluation))
        if made is None:
            made = self._selections[training, evaluation] = selection(training, evaluation)
        return made

    def _translated(self, arguments: Any) -> Any:
        if isinstance(arguments, Op):
            return self._mine[arguments]
        if isinstance(arguments, tuple | list):
            return type(arguments)(self._translated(item) for item in arguments)
        if isinstance(arguments, dict):
            return {key: self._translated(item) for key, item in arguments.items()}
        return arguments

    def finish(self) -> list[Op]:
        """Return the operations, each numbered by its position; a selection stands behind what it takes."""
        behind: dict[Op, list[Op]] = {}
        position = {op: index for index, op in enumerate(self._ops)}
        for (training, evaluation), made in self._selections.items():
            last = max(training, evaluation, key=position.__getitem__)
            made.calls, made.where = last.calls, last.where
            behind.setdefault(last, []).append(made)
        ops = [each for op in self._ops for each in (op, *behind.get(op, ()))]
        for index, op in enumerate(ops):
            op.index = index
        return ops
