"""A traced model as a network: its layers, what each takes, and slices of it as modules.

The modules hold the very parameters and buffers of the user's model, under their names there. Their code is
that of the traced operations, see emitting.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from pipetrain.network.network import INPUT, Made, Network, Part, See, Slice, Tensors
from pipetrain.network.tracing.dataflow import Dataflow, draws
from pipetrain.network.tracing.emitting import Code, Function
from pipetrain.network.tracing.grouping import Group
from pipetrain.network.tracing.layering import layers_of
from pipetrain.network.tracing.operations import Constant, Held, Input, Op, canonical
from pipetrain.network.values import TensorSpec, Value, ValueSpec


class Traced(Network):
    """Any nn.Module, as traced by torch.export. Layers return tuples; see trace.py for how it is made.

    `drawing`: the numbers of the layers that draw random numbers in training.
    """

    shared_buffers_are_read_only = True  # what is written and read elsewhere too keeps layers together

    def __init__(
        self,
        model: nn.Module,
        flow: Dataflow,
        groups: Sequence[Group],
        tree: TreeSpec,
        constants: dict[str, Tensor],
    ) -> None:
        self.model = model
        self.names = [group.name for group in groups]
        self.joins = [why for group in groups for why in group.joins]
        self.flow = flow
        self.constants = constants
        self.layers = layers_of(flow, groups)
        self._tree = tree
        self._number = {op: Made(INPUT, op.source.number) for op in flow.ops if isinstance(op.source, Input)}
        for index, layer in enumerate(self.layers[:-1]):
            self._number |= {op: Made(index, k) for k, op in enumerate(layer.makes)}
        self._takes = [tuple(sorted(self._number[op] for op in layer.takes)) for layer in self.layers]
        self._values = {made: op for op, made in self._number.items()}
        last = len(self.layers) - 1
        self._values |= {Made(last, k): op for k, op in enumerate(self.layers[last].makes)}
        self.drawing = frozenset(
            index
            for index, layer in enumerate(self.layers)
            if any(draws(op, True) for op in layer.items if True in op.modes)
        )
        self.placed = _placed(model, [layer.held for layer in self.layers])
        """The names of the tensors of each layer; one without use has a place too."""
        self.modules = [self.part(self.alone(index)) for index in range(len(self.layers))]

    def alone(self, index: int) -> Slice:
        """Return one layer as a slice."""
        leaves = tuple(Made(index, k) for k in range(len(self.layers[index].makes)))
        return Slice(index, index + 1, self._takes[index], leaves)

    def takes(self, index: int, made: Sequence[ValueSpec]) -> tuple[Made, ...]:
        return self._takes[index]

    def call(self, index: int, tensors: Tensors, made: Sequence[ValueSpec]) -> Value:
        result: Tensors = self.modules[index](*tensors)
        return self.pack(result) if index == len(self.layers) - 1 else result

    def part(self, slice: Slice, evaluated: Slice | None = None) -> Part:
        return TracedPart(self, slice, evaluated)

    def twin(self) -> Traced:
        made = copy(self)
        made.model, made.modules = deepcopy((self.model, self.modules))  # at once, for they share tensors
        return made

    def pack(self, outputs: Tensors) -> Any:
        """Return the tensors of the last layer as the model returns them."""
        tensors = iter(outputs)
        flat = [next(tensors) if isinstance(output, Op) else output for output in self.flow.outputs]
        return tree_unflatten(flat, self._tree)

    def value(self, made: Made) -> Op:
        """Return the operation that makes a value."""
        return self._values[made]


class TracedPart(Part):
    """Layers of a traced model, with code of their own for training and for evaluation."""

    holders: tuple[nn.Module, ...]
    constants: _Constants

    def __init__(self, network: Traced, slice: Slice, evaluated: Slice | None = None) -> None:
        super().__init__(slice, evaluated)
        names = dict.fromkeys(n for index in range(slice.start, slice.end) for n in network.placed[index])
        holders, self._places = _hold(self, network.model, names)
        # Past __setattr__, which refuses them where a layer of the model has such a name.
        self.__dict__ |= {"holders": holders, "constants": _Constants(network.constants)}
        self._shared = _Shared(network)
        self._functions: dict[tuple[Slice, bool], Function] = {}

    def forward(self, *tensors: Tensor) -> Tensors:
        return self._function(self.slice)(self, *tensors)

    def observed(self, tensors: Tensors, see: See) -> Tensors:
        network, values = self._shared.network, dict(zip(self.slice.enters, tensors, strict=True))
        for index in range(self.slice.start, self.slice.end):
            taken = [values[made] for made in network.takes(index, ())]
            outputs = self._function(network.alone(index))(self, *taken)
            outputs = see(network.names[index], network.modules[index], outputs)
            values |= {Made(index, number): tensor for number, tensor in enumerate(outputs)}
        return tuple(values[made] for made in self.slice.leaves)

    def pack(self, outputs: Tensors) -> Any:
        return self._shared.network.pack(outputs)

    def last_layer(self) -> LastLayer:
        """Return the model's last layer, which these layers end with."""
        return LastLayer(self, self._shared.network)

    def _function(self, slice: Slice) -> Function:
        """Return the code of some of the layers, in the present mode."""
        made = self._functions.get((slice, self.training))
        if made is None:
            made = self._functions[slice, self.training] = self._compiled(slice)
        return made

    def _compiled(self, slice: Slice) -> Function:
        network = self._shared.network
        code = Code(network.names[slice.start], self.training, self._places)
        writer = _Writer(network, code, self.training)
        for made in slice.enters:
            code.enter(network.value(made))
        for index in range(slice.start, slice.end):
            writer.layer(index)
        leaves = [network.value(made) for made in slice.leaves]
        writer.ensure(leaves)
        return code.compile(leaves)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TracedPart:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.constants.tensors = {name: fn(tensor) for name, tensor in self.constants.tensors.items()}
        return self


class LastLayer:
    """The last layer of a traced model alone, run in the present mode of its part.

    `takes`: the values that it takes.
    """

    def __init__(self, part: TracedPart, network: Traced) -> None:
        self._part = part
        self._network = network
        self._slice = network.alone(len(network.layers) - 1)
        self.takes = self._slice.enters

    def spec(self, made: Made, samples: int) -> TensorSpec:
        """Return what a value is for a number of samples."""
        value = self._network.value(made).value
        return TensorSpec(tuple(_size(size, samples) for size in value.shape), value.dtype)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the model returns."""
        return self._part.pack(self._part._function(self._slice)(self._part, *tensors))


def _size(size: Any, samples: int) -> int:
    if not isinstance(size, torch.SymInt):
        return int(size)
    return int(size.node.expr.subs(dict.fromkeys(size.node.expr.free_symbols, samples)))


class _Shared:
    """Refers to the network of a part, also from the part's copies."""

    def __init__(self, network: Traced) -> None:
        self.network = network

    def __deepcopy__(self, memo: object) -> _Shared:
        return self


class _Constants:
    """Tensors that are neither parameters nor buffers, and move with the part."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors


class _Writer:
    """Writes the code of layers for one mode, with what they need that does not depend on data."""

    def __init__(self, network: Traced, code: Code, training: bool) -> None:
        self._network = network
        self._flow = network.flow
        self._training = training
        self._sizes: dict[Op, tuple[Op, int, int]] = {}
        self.code = code

    def layer(self, index: int) -> None:
        layer = self._network.layers[index]
        self._sizes = layer.sizes
        begun = False
        for op in layer.items:
            if self._training in op.modes:
                self.ensure(op.given(self._training))
                if not begun and draws(op, self._training):
                    begun = True
                    self.code.begin(index)
                self.code.run(op)

    def ensure(self, ops: Iterable[Op]) -> None:
        """Make operations that do not depend on data, if they have not been made."""
        for op in ops:
            if op in self.code or isinstance(op.source, Held | Constant):
                continue
            if op in self._sizes:
                self.ensure([self._sizes[op][0]])
                self.code.size(op, *self._sizes[op])
                continue
            self.ensure(op.given(self._training))
            if op not in self.code:  # it may be the writer of what it takes, and has run
                self.code.run(op)
            writers = self._flow.writers(op) if op in self._flow.free else ()
            self.ensure(writer for writer in writers if self._training in writer.modes)


def _placed(model: nn.Module, used: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the tensors of each layer; one that none uses joins the nearest one in the module tree."""
    placed = [list(names) for names in used]
    known = {name for names in used for name in names}
    for name in canonical(model).values():
        if name not in known:
            path = name.split(".")
            depths = [max((_shared(path, other.split(".")) for other in names), default=-1) for names in used]
            placed[depths.index(max(depths))].append(name)
    return placed


def _shared(path: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(path, other, strict=False)
    return next((depth for depth, (a, b) in enumerate(pairs) if a != b), min(len(path), len(other)))


def _hold(
    root: nn.Module, model: nn.Module, names: Iterable[str]
) -> tuple[tuple[nn.Module, ...], dict[str, int]]:
    """Register a model's tensors below `root` under their names; return their modules with their places."""
    holders: dict[str, nn.Module] = {}
    for name in names:
        path, _, key = name.rpartition(".")
        if path not in holders:
            holder = root
            for part in path.split(".") if path else ():
                holder = holder._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
            holders[path] = holder
        holder, owner = holders[path], model.get_submodule(path)
        if key in owner._parameters:
            holder._parameters[key] = owner._parameters[key]
        else:
            holder._buffers[key] = owner._buffers[key]
            if key in owner._non_persistent_buffers_set:
                holder._non_persistent_buffers_set.add(key)
    return tuple(holders.values()), {path: number for number, path in enumerate(holders)}
