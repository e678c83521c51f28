"""A traced model as a network: its layers, the inputs of each, and slices of it as modules.

The modules hold the parameters and buffers of the user's model itself, under their names there. Their code is
a torch.fx function of tensors: weights are arguments too, so that another version can replace them, and the
generators are seeded before a layer that draws. Training and evaluation have separate graphs, which are cut
at the same places; the values that cross a cut may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from functools import cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_unflatten
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from pipetrain.model import random_numbers as draws
from pipetrain.model.network import INPUT, Network, Part, See, Shape, Slice, Tensors, ValueId
from pipetrain.model.specs import TensorSpec, Value, ValueSpec
from pipetrain.model.tensor_places import named_tensors
from pipetrain.model.tracing.dataflow import Dataflow, is_random, is_size
from pipetrain.model.tracing.export import WAY_OUT, adapted, as_arguments
from pipetrain.model.tracing.operations import Constant, Input, ModelTensor, Operations, Region


class Traced(Network):
    """Any nn.Module, as traced by torch.export, see trace.py. Layers return tuples."""

    modules: list[Part]
    way_out = f"its trace holds only operations of torch's, and writes of buffers: {WAY_OUT}"
    shared_buffers_are_read_only = True  # buffers that are written are in one layer with all their users

    def __init__(
        self,
        model: nn.Module,
        modes: Mapping[bool, tuple[Dataflow, Sequence[int]]],
        names: Sequence[str],
        again: Callable[[bool], Operations],
    ) -> None:
        self.model, self._again = model, again
        self.names = names
        self.set_attributes = modes[True][0].operations.set_attributes
        both = zip(*(flow.operations.limits for flow, _ in modes.values()), strict=True)
        self.limits = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in both]
        self.modes = {training: Layers(*flow_and_cuts) for training, flow_and_cuts in modes.items()}
        tensors = zip(*(mode.tensors for mode in self.modes.values()), strict=True)
        self.placed = _placed(model, [dict.fromkeys(trained + evaluated) for trained, evaluated in tensors])
        """The names of the tensors of each layer; unused ones are placed too."""
        self.modules = [self.part(self.alone(n), self.alone(n, False)) for n in range(len(names))]

    def alone(self, index: int, training: bool = True) -> Slice:
        return self.modes[training].slices[index]

    def takes(self, index: int, specs: Sequence[ValueSpec]) -> tuple[ValueId, ...]:
        return self.modules[index].slice.enters

    def call(self, index: int, tensors: Tensors, specs: Sequence[ValueSpec]) -> Value:
        result: Tensors = self.modules[index](*tensors)
        return self.pack(result) if index == len(self.names) - 1 else result

    def run(self, inputs: ValueSpec, tensors: Tensors) -> Any:
        args, kwargs = as_arguments(inputs, tensors)
        with adapted(self.model, inputs):
            return self.model(*args, **kwargs)

    def computes_as_cut(self, training: bool) -> bool:
        modes = [
            (mode, layers.flow.operations) for mode, layers in self.modes.items() if training or not mode
        ]
        return all(self._again(mode).described() == operations.described() for mode, operations in modes)

    def part(self, slice: Slice, evaluated: Slice | None = None) -> Part:
        return TracedPart(self, slice, evaluated)

    def twin(self) -> Traced:
        twin = copy(self)
        twin.model, twin.modules = deepcopy((self.model, self.modules))  # together, as they share tensors
        return twin

    def pack(self, outputs: Tensors) -> Any:
        """Return the last layer's tensors in the form in which the model returns them."""
        tensors, operations = iter(outputs), self.modes[True].flow.operations
        flat = [next(tensors) if isinstance(out, fx.Node) else out for out in operations.outputs]
        return tree_unflatten(flat, operations.tree)

    def output_shapes(self, inputs: Sequence[TensorSpec], training: bool) -> list[list[Shape]]:
        layers = self.modes[training]
        numbers: dict[Any, int] = {}
        for value, node in layers.values.items():
            if value.layer == INPUT:
                actual = zip(node.meta["val"].shape, inputs[value.number].shape, strict=True)
                numbers |= {dim.node.expr: n for dim, n in actual if isinstance(dim, torch.SymInt)}

        def shape(node: fx.Node) -> Shape:
            dims = node.meta["val"].shape
            return tuple(
                int(d.node.expr.xreplace(numbers)) if isinstance(d, torch.SymInt) else d for d in dims
            )

        return [[shape(layers.values[value]) for value in slice.leaves] for slice in layers.slices]

    def labels(self, number: int, ignored: int) -> tuple[int, bool]:
        return self.modes[True].flow.labels(number, ignored)

    def __deepcopy__(self, memo: object) -> Traced:
        return self  # copies of a part share it


class TracedPart(Part):
    """Layers of a traced model, with separate code for training and evaluation."""

    def __init__(self, network: Traced, slice: Slice, evaluated: Slice | None = None) -> None:
        super().__init__(slice, evaluated)
        self._network = network
        names = chain(*network.placed[slice.start : slice.end])
        self._places = {name: _hold(self, network.model, name) for name in names}
        """By name, the registry, which copies do not share, and the key in it."""

    def forward(self, *tensors: Tensor) -> Tensors:
        return self._run(self.slice, tensors)

    def _run(self, slice: Slice, tensors: Sequence[Tensor]) -> Tensors:
        first = tensors[0] if tensors else next(self.parameters(), None)
        device = torch.device("cpu") if first is None else first.device
        code = self._network.modes[self.training].code(slice, device)
        registries = map(self._places.__getitem__, code.tensors)
        return code.function(*tensors, *(registry[key] for registry, key in registries))

    def observed(self, tensors: Tensors, see: See) -> Tensors:
        network, values = self._network, dict(zip(self.slice.enters, tensors, strict=True))
        for index in range(self.slice.start, self.slice.end):
            layer = network.alone(index, self.training)
            outputs = self._run(layer, [values[value] for value in layer.enters])
            see(network.names[index], outputs)
            values |= {ValueId(index, number): tensor for number, tensor in enumerate(outputs)}
        return tuple(values[value] for value in self.slice.leaves)

    def pack(self, outputs: Tensors) -> Any:
        return self._network.pack(outputs)


def _placed(model: nn.Module, used: Sequence[Collection[str]]) -> list[list[str]]:
    """Return the tensors of each layer; an unused one is placed with the tensor before it in the model."""
    placed, last = [list(names) for names in used], 0
    for name in named_tensors(model):
        last = next((index for index, names in enumerate(used) if name in names), last)
        if name not in used[last]:
            placed[last].append(name)
    return placed


def _hold(root: nn.Module, model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Register a model's tensor below `root` under its name; return the registry and the key."""
    path, _, key = name.rpartition(".")
    for part in path.split(".") if path else ():
        root = root._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
    owner = model.get_submodule(path)
    registry, attributes = ("_parameters" if key in owner._parameters else "_buffers"), vars(root)
    attributes[registry][key] = getattr(owner, registry)[key]
    if key in owner._non_persistent_buffers_set:
        root._non_persistent_buffers_set.add(key)
    return attributes[registry], key


# The layers of one mode


class Code(NamedTuple):
    """A function of the tensors that enter and of the model's `tensors`; it returns a tuple."""

    function: Callable[..., tuple[Tensor, ...]]
    tensors: tuple[str, ...]  # names, after the inputs


class Layers:
    """The layers of a model cut before the items at `cuts`. `values`: what is sent between them.

    For each layer: `nodes`, its operations and those that it computes again, in order; `slices`, its inputs
    and outputs; `tensors`, the parameters and buffers that it uses.
    """

    def __init__(self, flow: Dataflow, cuts: Sequence[int]) -> None:
        self.flow = flow
        outputs = [output for output in flow.operations.outputs if isinstance(output, fx.Node)]
        parts = [flow.items[start:end] for start, end in pairwise([0, *cuts, len(flow.items)])]
        needs = [_needs(flow, part, outputs if part is parts[-1] else []) for part in parts]
        self.nodes = [sorted(nodes, key=flow.order.__getitem__) for nodes, _, _ in needs]
        self.tensors = [list(dict.fromkeys(names)) for _, _, names in needs]
        sources = ((node, node.meta.get("source")) for node in flow.order)
        numbers = {
            node: ValueId(INPUT, source.number) for node, source in sources if isinstance(source, Input)
        }
        self.values = {value: node for node, value in numbers.items()}
        self.slices: list[Slice] = []
        for index, (_, inputs, _) in enumerate(needs):
            later = {node for _, needed, _ in needs[index + 1 :] for node in needed}
            makes = outputs if index == len(cuts) else [node for node in parts[index] if node in later]
            enters = tuple(sorted(numbers[node] for node in inputs))
            leaves = tuple(ValueId(index, number) for number in range(len(makes)))
            self.slices.append(Slice(index, index + 1, enters, leaves))
            self.values |= zip(leaves, makes, strict=True)
            numbers |= zip(makes, leaves, strict=True)
        self.code = cache(self._code)

    def _code(self, slice: Slice, device: torch.device) -> Code:
        """Return the code of a slice, from the values that enter to those that leave."""
        graph, enters = fx.Graph(), [self.values[value] for value in slice.enters]
        leaves = [self.values[value] for value in slice.leaves]
        copies = {node: graph.placeholder(f"x{number}") for number, node in enumerate(enters)}
        nodes = [(index, node) for index in range(slice.start, slice.end) for node in self.nodes[index]]
        used = dict.fromkeys(
            [*(source_node for _, node in nodes for source_node in node.all_input_nodes), *leaves]
        )
        sources = [(node, node.meta.get("source")) for node in used]
        tensors = {node: source.name for node, source in sources if isinstance(source, ModelTensor)}
        constant_of = {node: source.tensor for node, source in sources if isinstance(source, Constant)}
        copies |= {node: graph.placeholder(node.name) for node in tensors}
        copies |= {node: graph.get_attr(node.name) for node in constant_of}
        _add_sizes(graph, [node for node in used if is_size(node)], enters, copies)

        def argument(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return copies[value]
            return device if isinstance(value, torch.device) else value

        seeded = set[int]()
        for index, node in nodes:
            if node in copies:
                continue
            if is_random(node) and index not in seeded:
                graph.call_function(draws.begin, (index,))
                seeded.add(index)
            args: Any
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), argument)
            target: Any = node.target
            region = node.meta.get("region", Region())
            if region != Region():
                target, args = in_region, (node.target, *region, *args)
            copies[node] = graph.call_function(target, args, kwargs)
        graph.output(tuple(copies[leaf] for leaf in leaves))
        constants = {node.name: tensor.to(device) for node, tensor in constant_of.items()}
        return Code(fx.GraphModule(constants, graph).forward, tuple(tensors.values()))


def _needs(
    flow: Dataflow, items: list[fx.Node], outputs: list[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node], list[str]]:
    """Return a layer's operations, the values of other layers that it uses, and its tensors' names."""
    nodes, inputs, tensors = dict.fromkeys(items), dict[fx.Node, None](), list[str]()
    todo = [*(source_node for item in items for source_node in item.all_input_nodes), *outputs]
    numbers = set[Any]()  # of samples, and lengths
    for node in todo:  # grows
        source = node.meta.get("source")
        if isinstance(source, ModelTensor):
            tensors.append(source.name)
        elif isinstance(source, Input) or (node in flow.position and node not in nodes):
            inputs[node] = None
        elif is_size(node):
            numbers |= _symbols(node)
        elif source is None and node not in nodes:
            nodes[node] = None
            todo += node.all_input_nodes
    for number in sorted(numbers - {n for node in inputs for n in _numbers_in(node)}, key=str):
        data = (node for node in flow.order if isinstance(node.meta.get("source"), Input))
        inputs[next(node for node in data if number in _numbers_in(node))] = None
    return list(nodes), list(inputs), tensors


def _symbols(node: fx.Node) -> set[Any]:
    """Return the symbols in a number that is computed from sizes."""
    value = node.meta["val"]
    sized = isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
    return set(value.node.expr.free_symbols) if sized else set()


def _numbers_in(node: fx.Node) -> dict[Any, tuple[int, int, int]]:
    """Return the symbols that dimensions of a value tell: the dimension, and a and b of a x symbol + b."""
    found: dict[Any, tuple[int, int, int]] = {}
    for dimension, size in enumerate(getattr(node.meta["val"], "shape", ())):
        if isinstance(size, torch.SymInt) and len(size.node.expr.free_symbols) == 1:
            (symbol,) = size.node.expr.free_symbols
            times = size.node.expr.coeff(symbol)
            more = size.node.expr - times * symbol
            if times.is_Integer and times != 0 and more.is_Integer:
                found.setdefault(symbol, (dimension, int(times), int(more)))
    return found


def _add_sizes(
    graph: fx.Graph, sizes: Sequence[fx.Node], enters: Sequence[fx.Node], copies: dict[fx.Node, Any]
) -> None:
    """Compute sizes from the numbers of samples and lengths, each read from the first tensor with it."""
    numbers: dict[Any, Any] = {}
    for symbol in sorted({symbol for node in sizes for symbol in _symbols(node)}, key=str):
        node = next(node for node in enters if symbol in _numbers_in(node))
        dimension, times, more = _numbers_in(node)[symbol]
        read: Any = fx.Proxy(graph.call_function(torch.ops.aten.sym_size.int, (copies[node], dimension)))
        read = read - more if more else read
        numbers[symbol] = read // times if times != 1 else read
    for node in sizes:
        value = node.meta["val"]
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            value = sympy_interp(PythonReferenceAnalysis, numbers, value.node.expr)
        copies[node] = value.node if isinstance(value, fx.Proxy) else value


def in_region(
    function: Callable[..., Any],
    grad: bool | None,
    autocast: bool | None,
    dtype: torch.dtype | None,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run an operation in its region, with autocast for the device of its first tensor."""
    device = next((arg.device.type for arg in args if isinstance(arg, Tensor)), "cpu")
    if grad is None and not autocast and not torch.is_autocast_enabled(device):
        return function(*args, **kwargs)
    with (
        nullcontext() if grad is None else torch.set_grad_enabled(grad),
        nullcontext() if autocast is None else torch.autocast(device, dtype, enabled=autocast),
    ):
        return function(*args, **kwargs)
