"""A traced model as a list of operations.

torch.export gives one list for training and one for evaluation, see reading.py. Both become one, in which an
operation or an argument may be of one mode only, see aligning.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

BOTH = frozenset({True, False})
"""The modes: training and evaluation."""


class Call(NamedTuple):
    """A call of a submodule. `key`: unique in the trace; `path`: its name in the model."""

    key: str
    path: str


class Input(NamedTuple):
    """The source of an operation that stands for a tensor of the model's input."""

    number: int


class Held(NamedTuple):
    """The source of an operation that stands for a parameter or buffer, under its first name."""

    name: str
    parameter: bool


class Constant(NamedTuple):
    """The source of an operation that stands for another tensor that the trace has found."""

    name: str


class Choice(NamedTuple):
    """An argument that differs between training and evaluation."""

    training: Any
    evaluation: Any


class Device(NamedTuple):
    """An argument: the device on which the layer runs."""


class Autocast(NamedTuple):
    """The autocast region of an operation; see torch.autocast."""

    enabled: bool
    dtype: torch.dtype | None


@dataclass(eq=False, slots=True)
class Op:
    """An operation, or a tensor that is there before (`source`). Arguments hold other ones.

    `value`: its result under FakeTensorMode; `calls`: the module calls it came from, outermost first;
    `modes`: in which it runs; `where`: the user's line of code.
    """

    target: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    source: Input | Held | Constant | None = None
    value: Any = None
    calls: tuple[Call, ...] = ()
    where: str = ""
    autocast: Autocast | None = None
    modes: frozenset[bool] = BOTH
    index: int = -1  # in the list

    def given(self, training: bool | None = None) -> Iterator[Op]:
        """Return the operations among the arguments, in one mode or both, in order."""
        yield from ops_in((self.args, self.kwargs), training)


def ops_in(arguments: Any, training: bool | None = None) -> Iterator[Op]:
    """Return the operations in a tree of arguments, in one mode or both, in order."""
    if isinstance(arguments, Op):
        yield arguments
    elif isinstance(arguments, Choice):
        if training is not False:
            yield from ops_in(arguments.training, training)
        if training is not True:
            yield from ops_in(arguments.evaluation, training)
    elif isinstance(arguments, tuple | list):
        for item in arguments:
            yield from ops_in(item, training)
    elif isinstance(arguments, dict):
        for item in arguments.values():
            yield from ops_in(item, training)


def select(op: Op) -> bool:
    """Return whether an operation only chooses between two values, that of training and of evaluation."""
    return op.target is _select


def _select(value: Any) -> Any:
    return value


def selection(training: Op, evaluation: Op) -> Op:
    """Return an operation that is one value in training and another in evaluation."""
    return Op(_select, (Choice(training, evaluation),), value=training.value)


@dataclass(frozen=True, slots=True)
class Listing:
    """The operations of a model in order; `outputs`: Op or constant, `tree`: of what the model returns."""

    ops: list[Op]
    outputs: list[Any]
    tree: TreeSpec
    constants: dict[str, Tensor]


def canonical(model: nn.Module) -> dict[int, str]:
    """Return the first name of each parameter and buffer, by its id."""
    return {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
