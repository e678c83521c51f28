"""A model as layers in their order, and the values that travel between them.

A value is a tensor that a layer makes. Most are used by the next layer only; one that is used later (a skip
connection, a mask) is sent directly from the stage that makes it to those that need it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from pipetrain.model.specs import Gradients, TensorSpec, Value, ValueSpec

INPUT = -1  # as a layer: the data
Tensors = tuple[Tensor, ...]
Shape = tuple[int, ...]
Limits = tuple[float, float]
"""The least and the most of a length."""


class ValueId(NamedTuple):
    """A value: tensor `number` of those that a layer returns, or of the model's inputs (layer INPUT)."""

    layer: int
    number: int


See = Callable[[str, Tensors], None]
"""Called with a layer's name and its outputs."""


class Values(Protocol):
    """The source of the values of a model's tensors."""

    def tensors(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return tensors by name, in host memory; the model's own may be missing. Raises ConfigError."""


_ONE_TENSOR = ValueSpec(())


@dataclass(frozen=True, slots=True)
class Slice:
    """Layers `start` to `end` (exclusive) of a model, with the values that enter and leave them, ascending.

    `enters_grad` and `leaves_grad` are their gradients; None, if unknown, stands for every tensor that can
    have one. `copies_input`: a layer modifies what enters; `copies_output`: a layer holds what leaves.
    `drawing`: the layers that draw random numbers; `form`: of the first layer's input, in a Chain.
    """

    start: int
    end: int
    enters: tuple[ValueId, ...]
    leaves: tuple[ValueId, ...]
    enters_grad: Gradients | None = None
    leaves_grad: Gradients | None = None
    copies_input: bool = False
    copies_output: bool = False
    drawing: frozenset[int] = frozenset()
    form: ValueSpec = _ONE_TENSOR


class Part(nn.Module, ABC):
    """A slice as one module: `forward(*enters)` returns the tuple of tensors `leaves`.

    Before a layer that draws random numbers it calls draws.begin. Parameters and buffers have their names in
    the model. `training`: whether it runs for training, where modules have the user's modes.
    """

    def __init__(self, slice: Slice, evaluated: Slice | None = None) -> None:
        super().__init__()
        self._slice = slice
        self._evaluated = evaluated or slice

    @property
    def slice(self) -> Slice:
        """What enters and leaves; an evaluation may have other numbers of tensors."""
        return self._slice if self.training else self._evaluated

    @abstractmethod
    def observed(self, tensors: Tensors, see: See) -> Tensors:
        """Run forward, with `see` after each layer."""

    @abstractmethod
    def pack(self, outputs: Tensors) -> Any:
        """Return the last part's outputs in the form in which the model returns them."""


def run_parts(
    parts: Iterable[Part],
    inputs: Sequence[Tensor],
    enters: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Tensors:
    """Return the outputs of the last part; `enters` converts the tensors of other parts for a part."""
    values = {ValueId(INPUT, number): tensor for number, tensor in enumerate(inputs)}
    outputs: Tensors = ()
    for part in parts:
        outputs = part(*(enters(values[value]) for value in part.slice.enters))
        values |= zip(part.slice.leaves, outputs, strict=True)
    return outputs


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Put modules and all submodules into evaluation mode, and afterwards each into its earlier mode.

    Modes are the user's: a BatchNorm in eval() keeps its statistics in training, as in one process.
    """
    before = {module: module.training for root in modules for module in root.modules()}
    for root in modules:
        root.eval()
    try:
        yield
    finally:
        for module, mode in before.items():
            if module.training != mode:
                module.train(mode)  # by its own method, which may do more
        for module, mode in before.items():  # a module in two places may have changed again
            module.training = mode


class Network(ABC):
    """A model to be cut into stages. `modules`: for each layer, a module with the tensors that it uses."""

    model: nn.Module
    names: Sequence[str]
    modules: Sequence[nn.Module]
    shared_buffers_are_read_only: bool = False
    way_out: str
    """What to do if its layers compute something else than the model."""
    set_attributes: Sequence[str] = ()
    """The attributes that a forward of the model changes, but one of its layers does not."""
    limits: Sequence[Limits] = ()
    """Of each length, where not all that its layers take is computed as the model does."""
    values: Values | None = None
    """The values that its tensors are to have; None: their current ones."""

    def with_values(self, values: Values | None) -> Network:
        """Return this network, whose tensors are to have these values; None: their current ones."""
        self.values = values
        return self

    @abstractmethod
    def takes(self, index: int, specs: Sequence[ValueSpec]) -> tuple[ValueId, ...]:
        """Return a layer's inputs; `specs`: of the model's input and of each earlier layer's output."""

    @abstractmethod
    def call(self, index: int, tensors: Tensors, specs: Sequence[ValueSpec]) -> Value:
        """Run one layer with its inputs. The last one returns what the model returns."""

    @abstractmethod
    def run(self, inputs: ValueSpec, tensors: Tensors) -> Any:
        """Run the model as given; `inputs`: their form."""

    @abstractmethod
    def part(self, slice: Slice, evaluated: Slice | None = None) -> Part:
        """Return layers as one module; `evaluated`: the slice in an evaluation, if it differs."""

    @abstractmethod
    def twin(self) -> Network:
        """Return a copy that may be changed. Raises what deepcopy of the model raises."""

    def labels(self, number: int, ignored: int) -> tuple[int, bool]:
        """Return the label in input `number` that the model's loss ignores, by default `ignored`.

        And whether the loss leaves out the first label of each sequence, as a causal language model does.
        """
        return ignored, False

    def output_shapes(self, inputs: Sequence[TensorSpec], training: bool) -> list[list[Shape]] | None:
        """Return the shapes of each layer's outputs for inputs of other sizes; None: only a run says them."""
        return None

    def spare(self) -> Network:
        """Return what planning may run: a copy if a run can change the layers and they can be copied."""
        return self

    def computes_as_cut(self, training: bool) -> bool:
        """Return whether a changed model computes the same as its layers.

        `training`: in both modes; else in evaluation. Raises ConfigError.
        """
        return False
